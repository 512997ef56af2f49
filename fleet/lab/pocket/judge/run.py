"""Evaluation of a running fleet, part by part. Writes no file except WAV files, if requested."""

import time
from collections.abc import Callable, Mapping

import msgspec

from fleet.lab.pocket.judge import speech_in, speech_out, speed, typed
from fleet.lab.pocket.judge.ask import JudgeClient
from fleet.lab.pocket.judge.options import JudgeOptions, Part
from fleet.lab.pocket.judge.report import JudgeReport
from fleet.lab.report.machine import describe_machine

_JUDGES: Mapping[Part, Callable[[JudgeReport, JudgeClient, JudgeOptions], JudgeReport]] = {
    "speed": speed.judge,
    "typed": typed.judge,
    "speech_out": speech_out.judge,
    "speech_in": speech_in.judge,
}
"""Evaluation function of each part, in order. Speed comes first, since processes started by other
parts on this machine would slow it.
"""


def run(url: str, options: JudgeOptions | None = None) -> JudgeReport:
    """Evaluate the fleet at `url` and return the report.

    Raises: ApiError if the fleet cannot be reached or fails a request; ConfigError if espeak-ng or
    pocketsphinx is missing.
    """
    chosen = options or JudgeOptions()
    client = JudgeClient(
        url, api_key=chosen.api_key, own_sampling=chosen.own_sampling, seed=chosen.seed
    )
    report = JudgeReport(
        began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        url=client.url,
        model=client.name,
        machine=describe_machine(),
        sampling="the checkpoint's own" if chosen.own_sampling else "greedy",
        seed=chosen.seed,
    )
    for part, judge in _JUDGES.items():
        if part not in chosen.parts:
            continue
        started_s = time.monotonic()
        report = judge(report, client, chosen)
        took_s = {**report.took_s, part: round(time.monotonic() - started_s, 1)}
        report = msgspec.structs.replace(report, took_s=took_s)
    return report
