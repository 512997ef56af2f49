"""Evaluation of speed on this machine: one listener alone, then four concurrent ones that play
audio as it arrives.

Requests and timing are the same as in `fleet bench`. The results mean little while other processes
use the machine.
"""

from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice

from fleet.lab.measure.load import LoadPhase, run_phase
from fleet.lab.pocket.judge.ask import JudgeClient, typed
from fleet.lab.pocket.judge.options import COMMAND, JudgeOptions
from fleet.lab.pocket.judge.questions import distinct
from fleet.lab.pocket.judge.report import Figure, JudgeReport
from fleet.lab.pocket.shape import VOICES
from fleet.lab.report.progress import progress_bar

LISTENERS, WARM_UP = 4, 3
_figure = partial(Figure, "speed", at_most=True)


def judge(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    dialogues = distinct(options.speed, options.seed, lambda dialogue: len(dialogue.turns) == 2)
    bodies = [
        client.streamed_body(typed(dialogue, voice))
        for dialogue, voice in zip(dialogues, cycle(sorted(VOICES)), strict=False)
    ]
    _phase(client, "warm-up", list(islice(cycle(bodies), WARM_UP)), 1)
    alone = _phase(client, "one listener", bodies, 1)
    together = _phase(
        client,
        f"{LISTENERS} listeners",
        list(islice(cycle(bodies), LISTENERS * len(bodies))),
        LISTENERS,
    )
    return report.adding([*_alone(alone), *_together(together)])


def _phase(client: JudgeClient, name: str, bodies: Sequence[bytes], listeners: int) -> LoadPhase:
    with progress_bar(COMMAND, name, len(bodies)) as advance:
        return run_phase(name, client, bodies, listeners, advance)


def _alone(phase: LoadPhase) -> list[Figure]:
    rtf, first, count = phase.summary("rtf"), phase.summary("first_audio_s"), len(phase.metrics)
    p50_ms, p95_ms = (1e3 * first.p50, 1e3 * first.p95) if first else (None, None)
    return [
        _figure("RTF of one stream, median", rtf.p50 if rtf else None, count, "s/s", 0.5),
        _figure("first audio, median", p50_ms, count, "ms", 400),
        _figure("first audio, 95th percentile", p95_ms, count, "ms"),
    ]


def _together(phase: LoadPhase) -> list[Figure]:
    count, first = len(phase.metrics), phase.summary("first_audio_s")
    underruns = sum((each.stalled_s or 0) > 0 or not each.audio_s for each in phase.metrics)
    streams, p50_ms = f"{LISTENERS} streams at once", 1e3 * first.p50 if first else None
    return [
        _figure(f"answers that ran dry, {streams}", float(underruns), count, "", 0),
        _figure(f"audio made, {streams}", phase.throughput, count, "s/s"),
        _figure(f"first audio, {streams}, median", p50_ms, count, "ms"),
    ]
