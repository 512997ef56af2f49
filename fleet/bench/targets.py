"""What a fleet is held to, as ratios that hold on any machine. Pure."""

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
"""Streams that fall behind real time are no load of that size."""
JOIN_RATIO = 1.5
HAND_OFF_P50_MS = 5.0
PAGES_RATIO = 0.5
VOICE_OURS_P50_MS = 400.0
BARGE_IN_P50_MS, FREED_P50_MS = 250.0, 300.0


def against_baseline(serving: Serving, baseline: ReferenceResult) -> list[Ratio]:
    """Medians of the same requests, one at a time; then many at a time against one after another."""
    first, last = serving.single.summary("first_audio_s"), serving.single.summary("last_sample_s")
    count = len(serving.single.traces)
    seconds = [answer.seconds for answer in baseline.answers[:count]]
    at_once = summarise([answer.first_audio_s for answer in baseline.answers[:count]])
    if first is None or last is None or at_once is None:
        return []
    ratios = [
        Ratio(name="first audio / baseline", value=first.p50 / at_once.p50, target=FIRST_AUDIO_RATIO, at_most=True),
        Ratio(name="last sample / baseline", value=last.p50 / percentile(seconds, 50), target=LAST_SAMPLE_RATIO, at_most=True),
    ]
    concurrency = serving.concurrent.concurrency
    if concurrency >= THROUGHPUT_CONCURRENCY:
        value = serving.concurrent.throughput / baseline.throughput
        name = f"throughput at {concurrency} / baseline"
        ratios.append(Ratio(name=name, value=value, target=THROUGHPUT_RATIO, at_most=False))
    return ratios


def against_twin(serving: Serving, twin: ReferenceResult) -> list[Ratio]:
    """The wall time of the same requests, one at a time."""
    wall_s = sum(metrics.total_s for metrics in serving.single.metrics)
    twin_s = sum(answer.seconds for answer in twin.answers)
    return [Ratio(name="wall time / twin", value=wall_s / twin_s, target=TWIN_RATIO, at_most=True)]


def of_hops(hops: HopResult) -> list[Ratio]:
    delivery = hops.delivery
    if delivery is None:
        return []
    return [Ratio(name="hop p50", value=delivery.p50, target=HOP_P50_US, at_most=True, unit="us")]


def of_hand_offs(result: HandOffResult) -> list[Ratio]:
    """The median of each stage's; and the speed of blocks, of a plain read's."""
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
    """All of a turn's wait but the silence that was waited for."""
    ours = voice.ours_ms
    if ours is None:
        return []
    return [Ratio(name="voice turn less its silence, p50", value=ours.p50, target=VOICE_OURS_P50_MS, at_most=True, unit="ms")]


def of_voices(voices: VoiceSessionsResult) -> list[Ratio]:
    """Nobody's sound runs dry, and everybody is answered; whoever is one too many waits for a place."""
    talks, beyond = len(voices.talks), voices.beyond
    unanswered = talks * voices.wanted_turns - len(voices.turns)
    ratios = [
        Ratio(name=f"underruns of {talks} voice sessions", value=voices.underruns, target=0, at_most=True, unit="underruns"),
        Ratio(name="questions not answered", value=unanswered, target=0, at_most=True, unit="questions"),
    ]
    if beyond is not None:
        queued = beyond.position == 1 and not beyond.early and beyond.let_in_ms is not None and beyond.answered
        ratios.append(Ratio(name="one too many waits, and is let in", value=float(queued), target=1, at_most=False))
    return ratios


def of_barge_in(result: BargeInResult) -> list[Ratio]:
    """From the first voiced sample: the answer's end, and its memory free."""
    held = (
        ("barge-in to cancelled, p50", "cancelled_ms", BARGE_IN_P50_MS),
        ("cancelled to memory free, p50", "freed_ms", FREED_P50_MS),
    )
    found = [(name, result.summary(part), target) for name, part, target in held]
    return [Ratio(name=name, value=part.p50, target=target, at_most=True, unit="ms") for name, part, target in found if part]


def of_scale(scale: ScaleResult) -> list[Ratio]:
    """At the most streams: real time, and late chunks. From the fewest to the most: the cost of a chunk. Nothing may be lost."""
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
    return [*ratios, Ratio(name="answers not whole", value=broken, target=0, at_most=True, unit="answers")]
