"""`fleet chaos`: passes its options on to `fleet.lab.faults`. Knows no schedule and no verdict."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.options import ConfigFile, Overrides

Seed = Annotated[int, typer.Option(help="Seed of the requests and of the schedule of faults.")]
Requests = Annotated[
    int, typer.Option(help="Different requests; each is sent at least once under faults.")
]
Roles = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Roles whose processes get faults: stages, halves or span workers of them, "
        "conductor, web.",
        show_default="all",
    ),
]
Hows = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Kinds of faults. In processes: kill (SIGKILL), stop (SIGSTOP until the lease has "
        "lapsed, then SIGCONT), term "
        "(SIGTERM), pause (SIGSTOP for less or more than a lease, of one process or of all "
        "workers, then SIGCONT), hang (SIGSTOP until the keeper ends it). In Redis: oom (maxmemory "
        "below what is used), readonly (a replica without "
        "its primary), noreplicas, misconf "
        "(its log may not grow), tail (killed, and the last writes cut off its log), partition "
        "(one gateway cut off from it), "
        "clock (set forward and back), failover (killed, and its replica promoted by a "
        "sentinel). redis: all of these. In clients: slow (more readers than slots, at a few "
        "bytes a second for 10 s). all: every kind.",
        show_default="kill,stop,term",
    ),
]
Kills = Annotated[
    int | None, typer.Option(help="Faults in all.", show_default="each kind once per role")
]
KillsPerRole = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Faults per role, and of each kind in Redis, in place of --kills."
    ),
]
Saves = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Conversations that are saved again and again beside the requests, as by `fleet "
        "session save`.",
        show_default="2 where a stage's layers are divided",
    ),
]
Spacing = Annotated[
    float,
    typer.Option(metavar="S", help="Seconds from recovery to the next fault, times 0.5 to 1.5."),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        metavar="M",
        help="Time in which faults are injected, as many as fit unless their number is given; "
        "the last one may outlast it. Duration of a soak.",
        show_default="of a soak: 20",
    ),
]
Soak = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Send N short requests evenly over --minutes to a fleet on the fake engine "
        "instead. A tenth of "
        "the clients leave; workers and gateways are killed. Redis's memory and keys, and size, "
        "open files and threads "
        "of each kind of process, must be at most 3 % more at the end than at a quarter of the "
        "way.",
        show_default=False,
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 if a soak fails.")]
Json = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The verdict, with every request and every fault."),
]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="The run as a picture.")]


HELP = """\
Inject faults into a fleet under load, and check that its clients still receive every byte.

Starts a fleet of its own on free ports, with a Redis of its own, two replicas of every role,
two conductors, two gateways, and numerics=invariant unless --set says otherwise; a running
fleet is not touched. Each request, greedy or sampled, is first answered without faults. Then
all are sent again and again, while faults are injected by a schedule drawn from --seed: each
into the replica with most tasks, or into the leading conductor, and the next only once the
fleet is complete again. Where a stage is split, every other fault in a half of it waits for a
hand-off; where its conversations are saved, for a save. A client whose gateway is lost resumes
its answer at the other one, with Last-Event-ID; one that is refused with 429 or 503 sends its
request again. Faults in Redis last longer than a lease, and are repaired. Slow readers
(--how slow) read a few bytes a second while the others are answered, and then the rest. Voice
sessions ask one question after another over WS /v1/realtime, and resume too. Where stages hear
and speak for themselves, half of the questions are spoken, by the fleet itself, and clients of
/v1/audio/speech and /v1/audio/transcriptions send their calls beside the requests, and again if
their gateway is lost.

The verdict counts lost requests, answers that differ from the undisturbed ones in any byte, and
what is left at the end. Each answer is also read once more from its beginning, and must not
have changed. Spoken answers must be those of the log, and a voice session must have every
question and answer at its end. A save may fail, with an error that says why and without a
change of the file; each file must have the rows of the undisturbed conversation, and the last
ones must load. With --set training.enabled=true answers are captured; each that the trainer
acknowledged must be in its last checkpoint, and new in one window only. With --set
numerics=fast rounding depends on the batch, so differences from the undisturbed answers are
counted by kind, and do not fail the run. Pauses are reported by fault, role and detection, next
to the undisturbed ones.

Exit status: 0 nothing was lost, different or left, and the fleet recovered each time; 1
otherwise, or an option is invalid.

Examples:

  fleet chaos

  fleet chaos --set checkpoint=tiny --how kill --roles conductor,web --kills 10 --json
  chaos.json --png chaos.png

  fleet chaos --config configs/both_pd.yaml --how kill --kills-per-role 5

  fleet chaos --set engine=fake --how redis --kills-per-role 5 --voice 4

  fleet chaos --set training.enabled=true --roles trainer,thinker,conductor --how kill,stop

  fleet chaos --config configs/voice.yaml --voice 2 --kills-per-role 5

  fleet chaos --how all --voice 2 --minutes 30

  fleet chaos --soak 20000 --check --json soak.json --png soak.png
"""


def chaos(
    config: ConfigFile = None,
    set_: Overrides = None,
    seed: Seed = 0,
    requests: Requests = 16,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    voice: Annotated[
        int, typer.Option(metavar="N", help="Voice sessions beside the requests.")
    ] = 0,
    saves: Saves = None,
    kills: Kills = None,
    kills_per_role: KillsPerRole = None,
    roles: Roles = "",
    how: Hows = "",
    spacing: Spacing = 1.0,
    soak: Soak = None,
    minutes: Minutes = None,
    check: Check = False,
    json: Json = None,
    png: Png = None,
) -> None:
    """Run `fleet chaos`; `HELP` explains it."""
    from fleet.lab.faults.main import run
    from fleet.lab.faults.options import ChaosOptions

    options = ChaosOptions(
        config=config,
        overrides=tuple(set_ or ()),
        seed=seed,
        requests=requests,
        concurrency=concurrency,
        voice=voice,
        saves=saves,
        kills=kills,
        kills_per_role=kills_per_role,
        roles=roles,
        how=how,
        spacing_s=spacing,
        soak=soak,
        minutes=minutes,
        check=check,
        json=json,
        png=png,
    )
    raise typer.Exit(run(options, tuple(sys.argv[1:])))
