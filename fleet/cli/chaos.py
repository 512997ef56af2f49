"""`fleet chaos`: hands its options to the package that strikes a fleet of its own. Knows no schedule and no verdict."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.options import ConfigFile, Overrides

Roles = Annotated[
    str,
    typer.Option(metavar="LIST", help="Whom to strike: stages, or halves of them, conductor, web.", show_default="all of them"),
]
Hows = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="kill: SIGKILL. stop: SIGSTOP until its lease has lapsed, then SIGCONT. term: SIGTERM.",
        show_default="kill,stop,term",
    ),
]


def chaos(
    config: ConfigFile = None,
    set_: Overrides = None,
    seed: Annotated[int, typer.Option(help="Of the requests and of the schedule: the same seed asks and strikes alike.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests that differ; each is sent at least once while blows fall.")] = 16,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    kills: Annotated[int | None, typer.Option(help="Blows in all.", show_default="each role in each way once")] = None,
    kills_per_role: Annotated[int | None, typer.Option(metavar="N", help="Blows at each role, in place of --kills.")] = None,
    roles: Roles = "",
    how: Hows = "",
    spacing: Annotated[float, typer.Option(metavar="S", help="Seconds from recovery to the next blow, give or take half.")] = 1.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="The verdict, with every request and every blow.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The run as a picture.")] = None,
) -> None:
    """Kill, freeze and end processes of a fleet at work, and see whether every listener hears every byte all the same.

    Starts a fleet of its own on free ports, with a Redis of its own, two replicas of every role, two conductors, two gateways,
    and numerics=invariant unless --set says otherwise; a fleet that runs already is not touched. It is asked each request
    undisturbed first, greedy and drawn ones, then again and again while a schedule drawn from --seed strikes: each time the
    replica with most tasks, or the conductor that leads, and the next one only when all are there again. Where a stage is split,
    every other blow at a half of it waits for a hand-off. A listener whose gateway is lost goes on at the other one, with
    Last-Event-ID.

    The verdict counts requests lost, answers that differ from the undisturbed ones in any byte, and what is held at the end. Each
    answer is also read once more from its beginning: nothing that was heard may have changed. With --set numerics=fast rounding
    depends on who is answered beside whom, so there a difference from the undisturbed answer is counted by kind and not judged.
    Pauses heard are told by signal, by role and by how the fleet found out, beside the undisturbed ones, and not judged.

    Exit status: 0 nothing was lost, differed or stayed, and the fleet recovered each time; 1 otherwise, or an option will not do.

    Examples:

      fleet chaos

      fleet chaos --set checkpoint=tiny --how kill --roles conductor,web --kills 10 --json chaos.json --png chaos.png

      fleet chaos --config configs/both_pd.yaml --how kill --kills-per-role 5
    """
    from fleet.chaos.main import run
    from fleet.chaos.options import ChaosOptions

    given = ChaosOptions(
        config=config,
        overrides=tuple(set_ or ()),
        seed=seed,
        requests=requests,
        concurrency=concurrency,
        kills=kills,
        kills_per_role=kills_per_role,
        roles=roles,
        how=how,
        spacing_s=spacing,
        json=json,
        png=png,
    )
    status = run(given, tuple(sys.argv[1:]))
    raise typer.Exit(status)
