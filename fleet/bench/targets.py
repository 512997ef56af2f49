"""What a fleet is held to, as ratios that hold on any machine. Pure."""

from collections.abc import Sequence

from fleet.bench.hop import HopResult
from fleet.bench.reference import Result
from fleet.bench.serving import Serving
from fleet.bench.stats import Ratio, percentile

FIRST_AUDIO_RATIO = 0.10
LAST_SAMPLE_RATIO = 0.6
THROUGHPUT_RATIO = 4.0
TWIN_RATIO = 1.25
HOP_P50_US = 400.0


def against_baseline(serving: Serving, baseline: Result) -> list[Ratio]:
    """Medians of the same requests, one at a time; then many at a time against one after another."""
    first, last = serving.single.summary("first_audio_s"), serving.single.summary("last_sample_s")
    count = len(serving.single.traces)
    seconds = [answer.seconds for answer in baseline.answers[:count]]
    at_once = [answer.first_audio_s for answer in baseline.answers[:count]]
    if first is None or last is None:
        return []
    return [
        Ratio(name="first audio / baseline", value=first.p50 / _p50(at_once), target=FIRST_AUDIO_RATIO, at_most=True),
        Ratio(name="last sample / baseline", value=last.p50 / _p50(seconds), target=LAST_SAMPLE_RATIO, at_most=True),
        Ratio(
            name=f"throughput at {serving.concurrent.concurrency} / baseline",
            value=serving.concurrent.throughput / baseline.throughput,
            target=THROUGHPUT_RATIO,
            at_most=False,
        ),
    ]


def against_twin(serving: Serving, twin: Result) -> list[Ratio]:
    """The wall time of the same requests, one at a time."""
    wall_s = sum(metrics.total_s for metrics in serving.single.metrics)
    twin_s = sum(answer.seconds for answer in twin.answers)
    return [Ratio(name="wall time / twin", value=wall_s / twin_s, target=TWIN_RATIO, at_most=True)]


def of_hops(hops: HopResult) -> list[Ratio]:
    delivery = hops.delivery
    if delivery is None:
        return []
    return [Ratio(name="hop p50", value=delivery.p50, target=HOP_P50_US, at_most=True, unit="us")]


def _p50(samples: Sequence[float]) -> float:
    return percentile(samples, 50)
