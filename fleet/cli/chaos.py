"""`fleet chaos`: passes its options on to `fleet.chaos`. Knows no schedule and no verdict."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.options import ConfigFile, Overrides

Roles = Annotated[
    str,
    typer.Option(
        metavar="LIST", help="Roles whose processes get faults: stages, or halves of them, conductor, web.", show_default="all"
    ),
]
Hows = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Kinds of faults. In processes: kill (SIGKILL), stop (SIGSTOP until the lease has lapsed, then SIGCONT), term "
        "(SIGTERM). In Redis: oom (maxmemory below what is used), readonly (a replica without its primary), noreplicas, misconf "
        "(its log may not grow), tail (killed, and the last writes cut off its log), partition (one gateway cut off from it), "
        "clock (set forward and back), failover (killed, and its replica promoted by a sentinel). redis: all of these.",
        show_default="kill,stop,term",
    ),
]


def chaos(
    config: ConfigFile = None,
    set_: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of the requests and of the schedule of faults.")] = 0,
    requests: Annotated[int, typer.Option(help="Different requests; each is sent at least once under faults.")] = 16,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    voice: Annotated[int, typer.Option(metavar="N", help="Voice sessions beside the requests.")] = 0,
    kills: Annotated[int | None, typer.Option(help="Faults in all.", show_default="each kind once per role")] = None,
    kills_per_role: Annotated[
        int | None, typer.Option(metavar="N", help="Faults per role, and of each kind in Redis, in place of --kills.")
    ] = None,
    roles: Roles = "",
    how: Hows = "",
    spacing: Annotated[float, typer.Option(metavar="S", help="Seconds from recovery to the next fault, times 0.5 to 1.5.")] = 1.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="The verdict, with every request and every fault.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The run as a picture.")] = None,
) -> None:
    """Kill, freeze and terminate processes of a fleet under load, and check that its clients still receive every byte.

    Starts a fleet of its own on free ports, with a Redis of its own, two replicas of every role, two conductors, two gateways,
    and numerics=invariant unless --set says otherwise; a running fleet is not touched. Each request, greedy or sampled, is first
    answered without faults. Then all are sent again and again, while faults are injected by a schedule drawn from --seed: each
    into the replica with most tasks, or into the leading conductor, and the next only once the fleet is complete again. Where a
    stage is split, every other fault in a half of it waits for a hand-off. A client whose gateway is lost resumes its answer at
    the other one, with Last-Event-ID; one that is refused with 503 sends its request again.

    Faults in Redis last for a few seconds, longer than a lease, and are repaired. Voice sessions ask one question after another
    over WS /v1/realtime and resume at another gateway too. The audio that they receive must be that of the log, and at the end
    the conversation must have every question and answer.

    The verdict counts lost requests, answers that differ from the undisturbed ones in any byte, and what is left at the end. Each
    answer is also read once more from its beginning, and must not have changed. With --set numerics=fast rounding depends on the
    batch, so differences from the undisturbed answers are counted by kind, and do not fail the run. Pauses are reported by
    signal, by role and by detection, next to the undisturbed ones, and do not fail the run either.

    Exit status: 0 nothing was lost, different or left, and the fleet recovered each time; 1 otherwise, or an option is invalid.

    Examples:

      fleet chaos

      fleet chaos --set checkpoint=tiny --how kill --roles conductor,web --kills 10 --json chaos.json --png chaos.png

      fleet chaos --config configs/both_pd.yaml --how kill --kills-per-role 5

      fleet chaos --set engine=fake --how redis --kills-per-role 5 --voice 4
    """
    from fleet.chaos.main import run
    from fleet.chaos.options import ChaosOptions

    options = ChaosOptions(
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
        voice=voice,
        json=json,
        png=png,
    )
    status = run(options, tuple(sys.argv[1:]))
    raise typer.Exit(status)
