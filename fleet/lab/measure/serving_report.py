"""Tables and panels of the serving benchmark: the fleet beside the implementations that it is
compared with. Measures nothing.
"""

from collections.abc import Sequence
from functools import partial

from rich.console import Group

from fleet.lab.measure.answer_timing import AnswerTiming, AudioChunk
from fleet.lab.measure.load import LoadPhase
from fleet.lab.measure.reference import ReferenceResult
from fleet.lab.measure.serving import Serving
from fleet.lab.report.plot import Axes, Panel, finish_bars
from fleet.lab.report.result import FLEET, MANY, MS, OTHER, P95_ALPHA, PLAYED, TWIN
from fleet.lab.report.stats import Ratio, at_least, at_most, median, summarise
from fleet.lab.report.tables import cells, figure, table_of, titled

FIRST_AUDIO_RATIO = 0.10
LAST_SAMPLE_RATIO = 0.6
THROUGHPUT_RATIO, THROUGHPUT_CONCURRENCY = 4.0, 8
TWIN_RATIO = 1.25
LATENCIES = (
    ("first text, ms", MS, "first_text_s"),
    ("first audio, ms", MS, "first_audio_s"),
    ("last sample, ms", MS, "last_sample_s"),
    ("whole answer, ms", MS, "total_s"),
    ("RTF, s/s of audio", 1.0, "rtf"),
    ("longest gap, ms", MS, "max_gap_s"),
    ("chunks in time, %", 100.0, "viability"),
    ("playback stalled, ms", MS, "stalled_s"),
)
"""Rows of the latency table: (label, scale, field of `AnswerMetrics`)."""

Measured = tuple[str, str, LoadPhase | ReferenceResult]
"""A result with its label and colour: (label, colour, result)."""


def serving_table(serving: Serving, baseline: ReferenceResult | None) -> Group:
    single, many = serving.single, serving.concurrent
    measured = (single, many, *([baseline] if baseline else ()))
    columns = ["", "single\np50", "\np95", f"{many.concurrency} at a time\np50", "\np95"]
    table = table_of(*columns, *(("baseline\np50", "\np95") if baseline else ()))
    for name, scale, field in LATENCIES:
        if single.summary(field) or many.summary(field):
            table.add_row(
                name, *(cell for each in measured for cell in cells(each.summary(field), scale))
            )
    table.add_section()
    rates = {
        "throughput, s of audio/s": [
            each.throughput if single.audio_s else None for each in measured
        ],
        "requests, 1/s": [each.requests_per_s for each in measured],
        "answer tokens, 1/s": [
            each.tokens_per_s if isinstance(each, LoadPhase) else None for each in measured
        ],
        "background load, cores": [each.others_cores for each in measured],
    }
    for name, numbers in rates.items():
        if any(number is not None for number in numbers):
            table.add_row(name, *(cell for number in numbers for cell in (figure(number), "")))
    phases = (
        f"{len(single.timings)} requests one at a time, then {len(many.timings)}, "
        f"{many.concurrency} at a time"
    )
    return titled(f"{serving.model} at {serving.url}: {phases}", table)


def twin_table(twin: ReferenceResult) -> Group:
    table = table_of("", "p50", "p95")
    first = twin.summary("first_audio_s")
    if first is not None:
        table.add_row("first audio, ms", *cells(first, MS))
    table.add_row("whole answer, ms", *cells(twin.summary("total_s"), MS))
    if first is not None:
        table.add_row("throughput, s of audio/s", figure(twin.throughput), "")
    table.add_row("background load, cores", figure(twin.others_cores), "")
    return titled(f"the same stages in one process ({twin.device_line})", table)


def serving_panels(
    serving: Serving, baseline: ReferenceResult | None, twin: ReferenceResult | None
) -> list[Panel]:
    """Return the panels of the picture; there are none for answers without audio."""
    if not any(timing.audio for timing in serving.single.timings):
        return []
    many = f"fleet,\n{serving.concurrent.concurrency} at a time"
    measured: list[Measured] = [
        ("fleet,\none at a time", FLEET, serving.single),
        (many, MANY, serving.concurrent),
    ]
    measured += [("one process", TWIN, twin)] if twin else []
    measured += [("baseline", OTHER, baseline)] if baseline else []
    return [
        partial(_timeline, serving=serving, baseline=baseline),
        partial(
            _latencies, title="request to first audio", measured=measured, field="first_audio_s"
        ),
        partial(
            _latencies, title="request to last sample", measured=measured, field="last_sample_s"
        ),
        partial(_throughput, measured=measured),
    ]


def against_baseline(serving: Serving, baseline: ReferenceResult) -> list[Ratio]:
    """Compare with the reference: medians of the same requests one at a time, and the fleet's
    concurrent throughput relative to the reference's sequential one.
    """
    first, last = serving.single.summary("first_audio_s"), serving.single.summary("last_sample_s")
    count = len(serving.single.timings)
    seconds = [answer.seconds for answer in baseline.answers[:count]]
    first_audio = summarise([answer.first_audio_s for answer in baseline.answers[:count]])
    if first is None or last is None or first_audio is None:
        return []
    ratios = [
        at_most("first audio / baseline", first.p50 / first_audio.p50, FIRST_AUDIO_RATIO),
        at_most("last sample / baseline", last.p50 / median(seconds), LAST_SAMPLE_RATIO),
    ]
    concurrency = serving.concurrent.concurrency
    if concurrency >= THROUGHPUT_CONCURRENCY:
        value = serving.concurrent.throughput / baseline.throughput
        name = f"throughput at {concurrency} / baseline"
        ratios.append(at_least(name, value, THROUGHPUT_RATIO))
    return ratios


def against_twin(serving: Serving, twin: ReferenceResult) -> list[Ratio]:
    """Compare with the slow twin: total time of the same requests, one at a time."""
    wall_s = sum(metrics.total_s for metrics in serving.single.metrics)
    return [at_most("wall time / twin", wall_s / twin.seconds, TWIN_RATIO)]


def _timeline(axes: Axes, serving: Serving, baseline: ReferenceResult | None) -> None:
    """Plot one answer over time: the answer whose time to first audio is the median."""
    spoken = sorted(
        (timing for timing in serving.single.timings if timing.audio),
        key=lambda timing: timing.audio[0].at_s,
    )
    timing = spoken[len(spoken) // 2]
    times, received = _received(timing.audio)
    axes.step(times, received, where="post", color=FLEET, label="received")
    axes.plot([chunk.at_s for chunk in timing.audio], received[1:], "o", color=FLEET, markersize=4)
    axes.plot(*_played(timing.audio), color=PLAYED, linestyle="--", label="played")
    if baseline is not None:
        _reference_step(axes, timing, baseline)
    axes.set(xlabel="s since the request", ylabel="s of audio", title="one answer, chunk by chunk")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.25)


def _received(audio: Sequence[AudioChunk]) -> tuple[list[float], list[float]]:
    times, received = [0.0], [0.0]
    for chunk in audio:
        times.append(chunk.at_s)
        received.append(received[-1] + chunk.audio_s)
    return times, received


def _played(audio: Sequence[AudioChunk]) -> tuple[list[float], list[float]]:
    """Return the curve of audio played over time, as (times, seconds played): it starts with the
    first chunk and is flat while the buffer is empty.
    """
    times, played, free_s = [audio[0].at_s], [0.0], audio[0].at_s
    for chunk in audio:
        start_s = max(free_s, chunk.at_s)
        free_s = start_s + chunk.audio_s
        times += [start_s, free_s]
        played += [played[-1], played[-1] + chunk.audio_s]
    return times, played


def _reference_step(axes: Axes, timing: AnswerTiming, baseline: ReferenceResult) -> None:
    answered = baseline.answers[timing.prompt]
    times = [0.0, answered.seconds, max(answered.seconds, timing.done_s)]
    axes.step(
        times,
        [0.0, answered.audio_s, answered.audio_s],
        where="post",
        color=OTHER,
        label="baseline",
    )


def _latencies(axes: Axes, title: str, measured: Sequence[Measured], field: str) -> None:
    """Draw bars of one latency: p50 solid, p95 behind it."""
    known = [
        (label, color, summary)
        for label, color, each in measured
        if (summary := each.summary(field))
    ]
    for place, (_, color, summary) in enumerate(known):
        p50_ms, p95_ms = summary.p50 * MS, summary.p95 * MS
        axes.bar(place, p95_ms, color=color, alpha=P95_ALPHA, width=0.6)
        axes.bar(place, p50_ms, color=color, width=0.6)
        axes.annotate(
            f"{p50_ms:.0f} / {p95_ms:.0f}", (place, p95_ms), ha="center", va="bottom", fontsize=8
        )
    axes.set(ylabel="ms", title=f"{title} (p50 / p95)")
    _finish(axes, [label for label, _, _ in known])


def _throughput(axes: Axes, measured: Sequence[Measured]) -> None:
    for place, (_, color, each) in enumerate(measured):
        axes.bar(place, each.throughput, color=color, width=0.6)
        axes.annotate(
            f"{each.throughput:.1f}", (place, each.throughput), ha="center", va="bottom", fontsize=8
        )
    axes.set(ylabel="s of audio per s", title="throughput")
    _finish(axes, [label for label, _, _ in measured])


def _finish(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.margins(y=0.12)
    finish_bars(axes)
