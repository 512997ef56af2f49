"""One evaluation of a running fleet, part by part. Writes no file except the requested WAV files."""

import time
from collections.abc import Callable, Mapping

import msgspec

from fleet.pocket.judge import speech_in, speech_out, speed, typed
from fleet.pocket.judge.ask import JudgeClient
from fleet.pocket.judge.options import JudgeOptions, Part
from fleet.pocket.judge.report import JudgeReport
from fleet.pocket.judge.words import MISSING, alike, known_words, unsayable
from fleet.reporting.machine import describe_machine

replace = msgspec.structs.replace


def run(url: str, options: JudgeOptions | None = None) -> JudgeReport:
    """Evaluate the fleet at `url`.

    Raises: ApiError if it cannot be reached or fails a request; ConfigError if espeak-ng or pocketsphinx is missing.
    """
    chosen = options or JudgeOptions()
    client = JudgeClient(url, api_key=chosen.api_key, own_sampling=chosen.own_sampling, seed=chosen.seed)
    report = JudgeReport(
        began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        url=client.url,
        model=client.name,
        machine=describe_machine(),
        sampling="the checkpoint's own" if chosen.own_sampling else "greedy",
        seed=chosen.seed,
    )
    # Speed first: processes that the other parts leave running on this machine would slow it.
    for part in sorted(set(chosen.parts), key=("speed", "typed", "speech_out", "speech_in").index):
        started_s = time.monotonic()
        report = _JUDGES[part](report, client, chosen)
        report = replace(report, took_s={**report.took_s, part: round(time.monotonic() - started_s, 1)})
    return report


def _speed(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    return replace(report, figures=report.figures + speed.judge(client, options))


def _typed(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    figures, answered = typed.judge(client, options)
    return replace(report, figures=report.figures + figures, typed=answered)


def _speech_out(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    lacking = tuple(word for word in known_words() if word in MISSING or unsayable([word]))
    figures, measured, errors = speech_out.judge(client, options)
    report = replace(report, lacking=lacking, alike=alike())
    return replace(report, figures=report.figures + figures, speech_out=measured, pitch_errors=errors)


def _speech_in(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    figures, answered, transcribed = speech_in.judge(client, options)
    return replace(report, figures=report.figures + figures, speech_in=answered, transcribed=transcribed)


_JUDGES: Mapping[Part, Callable[[JudgeReport, JudgeClient, JudgeOptions], JudgeReport]] = {
    "speed": _speed, "typed": _typed, "speech_out": _speech_out, "speech_in": _speech_in,
}  # fmt: skip
