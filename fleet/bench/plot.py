"""The report as one picture: arrival and playback of one answer, latencies, throughput. Measures nothing."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fleet.bench.answer_timing import AnswerTiming, AudioChunk
from fleet.bench.hand_off import PARTS, StageHandOffs
from fleet.bench.hop import HopResult
from fleet.bench.interference import SPLIT, TOGETHER, Interference, Side
from fleet.bench.reference import ReferenceResult
from fleet.bench.report import BenchReport
from fleet.bench.scale_result import ScaleResult
from fleet.bench.serving import Serving
from fleet.bench.targets import HAND_OFF_P50_MS, HOP_P50_US
from fleet.reporting.plot import Axes, Panel, draw_panels, finish_bars
from fleet.reporting.stats import Summary, percentile, summarise

FLEET, MANY, OTHER, TWIN, PLAYED = "#2563eb", "#0d9488", "#b45309", "#7c3aed", "#6b7280"
PANEL_INCHES = (6.0, 3.8)
P95_ALPHA = 0.4
HOP_BINS = 60
SIDE_COLORS = {TOGETHER: OTHER, SPLIT: FLEET}
UNDISTURBED_ALPHA = 0.35
LEAST_GAP_MS = 0.5

Bar = tuple[str, str, Summary | None]
"""(label, colour, seconds)"""


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture; a report without anything to draw makes none."""
    machine = report.machine
    model = f"{report.serving.model}, " if report.serving else ""
    title = f"{model}{machine.processor}, {machine.cores} cores, load {machine.load_1min} before, {report.began}"
    draw_panels(_panels(report), path, title, PANEL_INCHES)


def _panels(report: BenchReport) -> list[Panel]:
    panels: list[Panel] = []
    serving, baseline, twin = report.serving, report.baseline, report.twin
    if serving is not None and any(timing.audio for timing in serving.single.timings):
        panels += [
            lambda axes: _timeline(axes, serving, baseline),
            lambda axes: _bars(axes, "request to first audio", _latencies(serving, baseline, twin, "first_audio_s")),
            lambda axes: _bars(axes, "request to last sample", _latencies(serving, baseline, twin, "last_sample_s")),
            lambda axes: _throughput(axes, serving, baseline, twin),
        ]
    hops = report.hops
    if hops is not None:
        panels.append(lambda axes: _hops(axes, hops))
    if report.scale is not None:
        panels.append(partial(_costs, scale=report.scale))
    if report.hand_offs is not None:
        panels += [partial(_hand_offs, stage=stage) for stage in report.hand_offs.stages]
    interference = report.interference
    if interference is not None:
        top_s = max(gap.gap_s for side in (interference.together, interference.split) for gap in side.disturbed)
        panels += [partial(_gaps, side=side, top_s=top_s) for side in (interference.together, interference.split)]
        panels.append(lambda axes: _gap_shares(axes, interference))
    return panels


def _timeline(axes: Axes, serving: Serving, baseline: ReferenceResult | None) -> None:
    """Plot the answer with the median time to first audio."""
    spoken = sorted((timing for timing in serving.single.timings if timing.audio), key=lambda timing: timing.audio[0].at_s)
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
    """Return the audio played by each time: from the first chunk on, flat while the buffer is empty."""
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
    axes.step(times, [0.0, answered.audio_s, answered.audio_s], where="post", color=OTHER, label="baseline")


def _latencies(serving: Serving, baseline: ReferenceResult | None, twin: ReferenceResult | None, field: str) -> list[Bar]:
    many = f"fleet,\n{serving.concurrent.concurrency} at a time"
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
    """Draw p50 solid, p95 behind it."""
    known = [(label, color, summary) for label, color, summary in bars if summary is not None]
    for place, (_, color, summary) in enumerate(known):
        axes.bar(place, summary.p95 * 1e3, color=color, alpha=P95_ALPHA, width=0.6)
        axes.bar(place, summary.p50 * 1e3, color=color, width=0.6)
        label = f"{summary.p50 * 1e3:.0f} / {summary.p95 * 1e3:.0f}"
        axes.annotate(label, (place, summary.p95 * 1e3), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(known)), [label for label, _, _ in known], fontsize=8)
    axes.set(ylabel="ms", title=f"{title} (p50 / p95)")
    axes.margins(y=0.12)
    finish_bars(axes)


def _throughput(axes: Axes, serving: Serving, baseline: ReferenceResult | None, twin: ReferenceResult | None) -> None:
    rows = [
        ("fleet,\none at a time", FLEET, serving.single.throughput),
        (f"fleet,\n{serving.concurrent.concurrency} at a time", MANY, serving.concurrent.throughput),
        *([("one process", TWIN, twin.throughput)] if twin else []),
        *([("baseline", OTHER, baseline.throughput)] if baseline else []),
    ]
    for place, (_, color, value) in enumerate(rows):
        axes.bar(place, value, color=color, width=0.6)
        axes.annotate(f"{value:.1f}", (place, value), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    axes.set(ylabel="s of audio per s", title="throughput")
    axes.margins(y=0.12)
    finish_bars(axes)


def _hops(axes: Axes, hops: HopResult) -> None:
    """Draw on a logarithmic scale, where a few late hops leave the others room."""
    low, high = math.log10(min(hops.delivery_us)), math.log10(max(hops.delivery_us))
    edges = [10 ** (low + (high - low) * step / HOP_BINS) for step in range(HOP_BINS + 1)]
    axes.hist(hops.delivery_us, bins=edges, color=FLEET)
    axes.set_xscale("log")
    axes.axvline(percentile(hops.delivery_us, 50), color=OTHER, label="p50")
    axes.axvline(HOP_P50_US, color=PLAYED, linestyle="--", label="target for p50")
    axes.set(xlabel="us from append to delivery", ylabel="hops", title=f"{len(hops.delivery_us)} hops through Redis")
    axes.legend(fontsize=8)


def _hand_offs(axes: Axes, stage: StageHandOffs) -> None:
    """Draw each hand-off as one bar, its parts from left to right; the shortest at the bottom."""

    def whole_us(number: int) -> int:
        return (stage.hand_offs[number].resumed_us or 0) - stage.hand_offs[number].prefilled_us

    for place, number in enumerate(sorted(range(len(stage.hand_offs)), key=whole_us)):
        hand_off = stage.hand_offs[number]
        for part, (_, begin, end) in enumerate(PARTS):
            began_us, ended_us = getattr(hand_off, begin), getattr(hand_off, end)
            if began_us is not None and ended_us is not None:
                left_ms = (began_us - hand_off.prefilled_us) / 1e3
                axes.barh(place, (ended_us - began_us) / 1e3, left=left_ms, height=1.0, color=f"C{part}")
    for part, (name, _, _) in enumerate(PARTS):
        axes.barh(0, 0, color=f"C{part}", label=name)
    axes.axvline(HAND_OFF_P50_MS, color=PLAYED, linestyle="--", label="target for p50")
    axes.set(xlabel="ms since the source's last step", title=f"{len(stage.hand_offs)} hand-offs of {stage.stage}")
    axes.set_yticks([])
    axes.legend(fontsize=7, loc="lower right")


def _gaps(axes: Axes, side: Side, top_s: float) -> None:
    color = SIDE_COLORS[side.name]
    for gaps, alpha in ((side.undisturbed, UNDISTURBED_ALPHA), (side.disturbed, 1.0)):
        axes.plot([gap.at_s for gap in gaps], [gap.gap_s * 1e3 for gap in gaps], ".", color=color, markersize=2, alpha=alpha)
    for prompt in side.long_prompts:
        axes.axvline(prompt.sent_s, color=PLAYED, linewidth=0.6, alpha=P95_ALPHA)
    axes.set(xlabel="s (lines: long prompts arrive)", ylabel="ms", title=f"gaps of running answers: {side.name}")
    axes.set_ylim(0, top_s * 1e3 * 1.05)


def _gap_shares(axes: Axes, found: Interference) -> None:
    """Plot the share of gaps longer than each length, since the tail is what a listener notices."""
    for side in (found.together, found.split):
        for gaps, style, when in ((side.undisturbed, ":", "undisturbed"), (side.disturbed, "-", "long prompts")):
            lengths = sorted(gap.gap_s * 1e3 for gap in gaps)
            shares = [1 - place / len(lengths) for place in range(len(lengths))]
            axes.step(lengths, shares, style, color=SIDE_COLORS[side.name], label=f"{side.name}, {when}")
    axes.axhline(0.05, color=PLAYED, linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="ms", ylabel="share of longer gaps", title="gaps of running answers")
    axes.set_xlim(left=LEAST_GAP_MS)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.25)


def _costs(axes: Axes, scale: ScaleResult) -> None:
    """Draw the CPU per chunk, stacked by process, for each number of streams; above it the 99th percentile of the hops."""
    for place, phase in enumerate(scale.phases):
        window, bottom = phase.window, 0.0
        for number, name in enumerate(window.cpu_s):
            cost_us, label = window.cost_of_us(name), None if place else name
            axes.bar(place, cost_us, bottom=bottom, color=f"C{number}", width=0.6, label=label)
            bottom += cost_us
        late = [ages.p99_us / 1e3 for ages in (window.between_workers, window.to_gateway) if ages is not None]
        axes.annotate(f"hop p99\n{max(late, default=0.0):.0f} ms", (place, bottom), ha="center", va="bottom", fontsize=8)
    labels = [f"{phase.streams} streams\n{phase.window.chunks_per_s:.0f} chunks/s" for phase in scale.phases]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set(ylabel="us of CPU per chunk", title="CPU per chunk")
    axes.margins(y=0.2)
    axes.legend(fontsize=7)
