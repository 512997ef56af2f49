"""What a fleet is held to, as ratios that hold on any machine. Pure."""

from fleet.bench.hop import HopResult
from fleet.bench.reference import Result
from fleet.bench.serving import Serving
from fleet.bench.stats import Ratio, percentile, summarise

FIRST_AUDIO_RATIO = 0.10
LAST_SAMPLE_RATIO = 0.6
THROUGHPUT_RATIO, THROUGHPUT_CONCURRENCY = 4.0, 8
TWIN_RATIO = 1.25
HOP_P50_US = 400.0


def against_baseline(serving: Serving, baseline: Result) -> list[Ratio]:
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
