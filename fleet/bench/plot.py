"""The report as one picture: when an answer's audio came against when it is played, latencies, throughput. Measures nothing."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleet.bench.hop import HopResult
from fleet.bench.reference import Result
from fleet.bench.report import Report
from fleet.bench.serving import Serving
from fleet.bench.stats import Summary, percentile, summarise
from fleet.bench.targets import HOP_P50_US
from fleet.bench.trace import Heard, Trace

FLEET, MANY, OTHER, TWIN, PLAYED = "#2563eb", "#0d9488", "#b45309", "#7c3aed", "#6b7280"
WIDTH_INCHES, HEIGHT_INCHES, DPI = 6.0, 3.8, 130
P95_ALPHA = 0.4
HOP_BINS = 60

Axes = Any
"""`matplotlib.axes.Axes`, whose annotations are incomplete."""
Panel = Callable[[Axes], None]
Bar = tuple[str, str, Summary | None]
"""(label, colour, seconds)"""


def draw(report: Report, path: Path) -> None:
    """Write the picture; a report without anything to draw makes none."""
    panels = _panels(report)
    if not panels:
        return
    import matplotlib

    # No window: this runs where there is no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (WIDTH_INCHES * columns, HEIGHT_INCHES * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    places: list[Axes] = list(axes.flat)
    for panel, place in zip(panels, places, strict=False):
        panel(place)
    for place in places[len(panels) :]:
        place.set_axis_off()
    figure.suptitle(_title(report), fontsize=9)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _title(report: Report) -> str:
    machine = report.machine
    model = f"{report.serving.model}, " if report.serving else ""
    return f"{model}{machine.processor}, {machine.cores} cores, load {machine.load_1min} before, {report.began}"


def _panels(report: Report) -> list[Panel]:
    panels: list[Panel] = []
    serving, baseline, twin = report.serving, report.baseline, report.twin
    if serving is not None and any(trace.audio for trace in serving.single.traces):
        panels += [
            lambda axes: _timeline(axes, serving, baseline),
            lambda axes: _bars(axes, "request to first audio", _latencies(serving, baseline, twin, "first_audio_s")),
            lambda axes: _bars(axes, "request to last sample", _latencies(serving, baseline, twin, "last_sample_s")),
            lambda axes: _throughput(axes, serving, baseline, twin),
        ]
    hops = report.hops
    if hops is not None:
        panels.append(lambda axes: _hops(axes, hops))
    return panels


def _timeline(axes: Axes, serving: Serving, baseline: Result | None) -> None:
    """The answer whose first sound came at the median moment."""
    heard = sorted((trace for trace in serving.single.traces if trace.audio), key=lambda trace: trace.audio[0].at_s)
    trace = heard[len(heard) // 2]
    times, received = _received(trace.audio)
    axes.step(times, received, where="post", color=FLEET, label="received")
    axes.plot([chunk.at_s for chunk in trace.audio], received[1:], "o", color=FLEET, markersize=4)
    axes.plot(*_played(trace.audio), color=PLAYED, linestyle="--", label="played")
    if baseline is not None:
        _reference_step(axes, trace, baseline)
    axes.set(xlabel="s since the request", ylabel="s of audio", title="one answer, chunk by chunk")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.25)


def _received(audio: Sequence[Heard]) -> tuple[list[float], list[float]]:
    times, received = [0.0], [0.0]
    for chunk in audio:
        times.append(chunk.at_s)
        received.append(received[-1] + chunk.audio_s)
    return times, received


def _played(audio: Sequence[Heard]) -> tuple[list[float], list[float]]:
    """What the listener has heard by when: from the first chunk on, flat where nothing was left to play."""
    times, played, free_s = [audio[0].at_s], [0.0], audio[0].at_s
    for chunk in audio:
        start_s = max(free_s, chunk.at_s)
        free_s = start_s + chunk.audio_s
        times += [start_s, free_s]
        played += [played[-1], played[-1] + chunk.audio_s]
    return times, played


def _reference_step(axes: Axes, trace: Trace, baseline: Result) -> None:
    answered = baseline.answers[trace.prompt]
    times = [0.0, answered.seconds, max(answered.seconds, trace.done_s)]
    axes.step(times, [0.0, answered.audio_s, answered.audio_s], where="post", color=OTHER, label="baseline")


def _latencies(serving: Serving, baseline: Result | None, twin: Result | None, field: str) -> list[Bar]:
    many = f"fleet,\n{serving.concurrent.concurrency} at once"
    bars: list[Bar] = [
        ("fleet,\none at a time", FLEET, serving.single.summary(field)),
        (many, MANY, serving.concurrent.summary(field)),
    ]
    for label, color, other in (("one process", TWIN, twin), ("baseline", OTHER, baseline)):
        if other is not None:
            first = field == "first_audio_s"
            bars.append((label, color, summarise([a.first_audio_s if first else a.seconds for a in other.answers])))
    return bars


def _bars(axes: Axes, title: str, bars: Sequence[Bar]) -> None:
    """p50 solid, p95 behind it."""
    known = [(label, color, summary) for label, color, summary in bars if summary is not None]
    for place, (_, color, summary) in enumerate(known):
        axes.bar(place, summary.p95 * 1e3, color=color, alpha=P95_ALPHA, width=0.6)
        axes.bar(place, summary.p50 * 1e3, color=color, width=0.6)
        label = f"{summary.p50 * 1e3:.0f} / {summary.p95 * 1e3:.0f}"
        axes.annotate(label, (place, summary.p95 * 1e3), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(known)), [label for label, _, _ in known], fontsize=8)
    axes.set(ylabel="ms", title=f"{title} (p50 / p95)")
    axes.margins(y=0.12)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.25)


def _throughput(axes: Axes, serving: Serving, baseline: Result | None, twin: Result | None) -> None:
    rows = [
        ("fleet,\none at a time", FLEET, serving.single.throughput),
        (f"fleet,\n{serving.concurrent.concurrency} at once", MANY, serving.concurrent.throughput),
        *([("one process", TWIN, twin.throughput)] if twin else []),
        *([("baseline", OTHER, baseline.throughput)] if baseline else []),
    ]
    for place, (_, color, value) in enumerate(rows):
        axes.bar(place, value, color=color, width=0.6)
        axes.annotate(f"{value:.1f}", (place, value), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    axes.set(ylabel="s of audio per s", title="throughput")
    axes.margins(y=0.12)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.25)


def _hops(axes: Axes, hops: HopResult) -> None:
    """On a logarithmic scale: a few late ones would else squeeze all the others into one bar."""
    low, high = math.log10(min(hops.delivery_us)), math.log10(max(hops.delivery_us))
    edges = [10 ** (low + (high - low) * step / HOP_BINS) for step in range(HOP_BINS + 1)]
    axes.hist(hops.delivery_us, bins=edges, color=FLEET)
    axes.set_xscale("log")
    axes.axvline(percentile(hops.delivery_us, 50), color=OTHER, label="p50")
    axes.axvline(HOP_P50_US, color=PLAYED, linestyle="--", label="target for p50")
    axes.set(xlabel="us from append to delivery", ylabel="hops", title=f"{len(hops.delivery_us)} hops through Redis")
    axes.legend(fontsize=8)
