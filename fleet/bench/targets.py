"""Targets of a fleet, as ratios that hold on any machine. Pure."""

from fleet.bench.barge_in import BargeInResult
from fleet.bench.hand_off import HandOffResult
from fleet.bench.hop import HopResult
from fleet.bench.reference import ReferenceResult
from fleet.bench.scale_result import ScaleResult
from fleet.bench.serving import Serving
from fleet.bench.voice import VoiceResult
from fleet.bench.voice_sessions_result import VoiceSessionsResult
from fleet.reporting.stats import Ratio, percentile, summarise

FIRST_AUDIO_RATIO = 0.10
LAST_SAMPLE_RATIO = 0.6
THROUGHPUT_RATIO, THROUGHPUT_CONCURRENCY = 4.0, 8
TWIN_RATIO = 1.25
HOP_P50_US = 400.0
SCALE_HOP_P99_MS = 50.0
SCALE_COST_RATIO = 1.3
SCALE_PACE_RATIO = 0.97
"""Streams that fall behind real time are a smaller load than the one reported."""
JOIN_RATIO = 1.5
HAND_OFF_P50_MS = 5.0
PAGES_RATIO = 0.5
VOICE_P50_MS = 400.0
BARGE_IN_P50_MS, FREED_P50_MS = 250.0, 300.0


def against_baseline(serving: Serving, baseline: ReferenceResult) -> list[Ratio]:
    """Compare medians of the same requests one at a time, and concurrent throughput with that of the sequential baseline."""
    first, last = serving.single.summary("first_audio_s"), serving.single.summary("last_sample_s")
    count = len(serving.single.timings)
    seconds = [answer.seconds for answer in baseline.answers[:count]]
    first_audio = summarise([answer.first_audio_s for answer in baseline.answers[:count]])
    if first is None or last is None or first_audio is None:
        return []
    ratios = [
        Ratio(name="first audio / baseline", value=first.p50 / first_audio.p50, target=FIRST_AUDIO_RATIO, at_most=True),
        Ratio(name="last sample / baseline", value=last.p50 / percentile(seconds, 50), target=LAST_SAMPLE_RATIO, at_most=True),
    ]
    concurrency = serving.concurrent.concurrency
    if concurrency >= THROUGHPUT_CONCURRENCY:
        value = serving.concurrent.throughput / baseline.throughput
        name = f"throughput at {concurrency} / baseline"
        ratios.append(Ratio(name=name, value=value, target=THROUGHPUT_RATIO, at_most=False))
    return ratios


def against_twin(serving: Serving, twin: ReferenceResult) -> list[Ratio]:
    """Compare the wall time of the same requests, one at a time."""
    wall_s = sum(metrics.total_s for metrics in serving.single.metrics)
    twin_s = sum(answer.seconds for answer in twin.answers)
    return [Ratio(name="wall time / twin", value=wall_s / twin_s, target=TWIN_RATIO, at_most=True)]


def of_hops(hops: HopResult) -> list[Ratio]:
    delivery = summarise(hops.delivery_us)
    if delivery is None:
        return []
    return [Ratio(name="hop p50", value=delivery.p50, target=HOP_P50_US, at_most=True, unit="us")]


def of_hand_offs(result: HandOffResult) -> list[Ratio]:
    """Check the median hand-off of each stage, and the speed of reads by block relative to a plain read."""
    wholes = [(stage.stage, stage.whole_ms) for stage in result.stages]
    ratios = [
        Ratio(name=f"hand-off p50, {name}", value=whole.p50, target=HAND_OFF_P50_MS, at_most=True, unit="ms")
        for name, whole in wholes
        if whole is not None
    ]
    if result.pages is not None:
        ratios.append(Ratio(name="KV blocks / plain read", value=result.pages.ratio, target=PAGES_RATIO, at_most=False))
    return ratios


def of_voice(voice: VoiceResult) -> list[Ratio]:
    """Check the median of voice to voice without the end-of-turn silence."""
    fleet_ms = voice.fleet_ms
    if fleet_ms is None:
        return []
    return [Ratio(name="voice turn without its silence, p50", value=fleet_ms.p50, target=VOICE_P50_MS, at_most=True, unit="ms")]


def of_voice_sessions(result: VoiceSessionsResult) -> list[Ratio]:
    """Check that no playback underruns, every question is answered, and the session beyond the limit is queued."""
    sessions, queued = len(result.sessions), result.queued
    unanswered = sessions * result.wanted_turns - len(result.turns)
    ratios = [
        Ratio(name=f"underruns of {sessions} voice sessions", value=result.underruns, target=0, at_most=True, unit="underruns"),
        Ratio(name="questions not answered", value=unanswered, target=0, at_most=True, unit="questions"),
    ]
    if queued is not None:
        admitted = queued.position == 1 and not queued.early and queued.admitted_ms is not None and queued.answered
        ratios.append(Ratio(name="extra session queued, then admitted", value=float(admitted), target=1, at_most=False))
    return ratios


def of_barge_in(result: BargeInResult) -> list[Ratio]:
    """Check the medians from the first voiced sample to the answer's end, and from there to its memory free."""
    targets = (
        ("barge-in to cancelled, p50", "cancelled_ms", BARGE_IN_P50_MS),
        ("cancelled to memory free, p50", "freed_ms", FREED_P50_MS),
    )
    found = [(name, result.summary(part), target) for name, part, target in targets]
    return [Ratio(name=name, value=part.p50, target=target, at_most=True, unit="ms") for name, part, target in found if part]


def of_scale(scale: ScaleResult) -> list[Ratio]:
    """Check pace and late chunks with the most streams, the growth of the CPU per chunk, and that no answer is incomplete."""
    few, many = scale.phases[0], scale.phases[-1]
    window, joined = many.window, scale.joined
    pace = window.chunks_per_s / scale.real_time_per_s(many.streams)
    ratios = [Ratio(name=f"pace of {many.streams} streams / real time", value=pace, target=SCALE_PACE_RATIO, at_most=False)]
    for name, ages in (("between workers", window.between_workers), ("worker to gateway", window.to_gateway)):
        if ages is not None:
            late = f"hop p99 at {many.streams} streams, {name}"
            ratios.append(Ratio(name=late, value=ages.p99_us / 1e3, target=SCALE_HOP_P99_MS, at_most=True, unit="ms"))
    if few is not many and few.window.cost_us:
        name = f"CPU per chunk, {many.streams} streams / {few.streams}"
        value = window.cost_us / few.window.cost_us
        ratios.append(Ratio(name=name, value=value, target=SCALE_COST_RATIO, at_most=True))
    if joined.alone.chunks:
        value = joined.together.chunks_per_s / joined.alone.chunks_per_s
        ratios.append(Ratio(name="chunks/s with a second worker", value=value, target=JOIN_RATIO, at_most=False))
    broken = sum(len(phase.broken) for phase in (*scale.phases, joined))
    return [*ratios, Ratio(name="incomplete answers", value=broken, target=0, at_most=True, unit="answers")]
