"""Putting load on a fleet: the same requests one after another, or many at a time, in a closed loop. Knows no stage."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fleet.bench.answer_timing import AnswerMetrics, AnswerTiming, gaps, measure_answer
from fleet.bench.chat import ChatApi, Recording, read_recording
from fleet.reporting.stats import Summary, summarise

Advance = Callable[[], None]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of measuring: `concurrency` requests under way at any time until all were answered.

    `others_cores` is what other processes kept busy meanwhile; None where the fleet is not ours, hence one of them.
    """

    name: str
    concurrency: int
    wall_s: float
    traces: tuple[AnswerTiming, ...]
    metrics: tuple[AnswerMetrics, ...]
    others_cores: float | None = None

    @property
    def audio_s(self) -> float:
        return sum(metrics.audio_s for metrics in self.metrics)

    @property
    def throughput(self) -> float:
        """Seconds of audio made per second."""
        return self.audio_s / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.metrics) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return sum(trace.num_answer_tokens for trace in self.traces) / self.wall_s

    def summary(self, name: str) -> Summary | None:
        """Percentiles of one field of `Metrics` over the phase's requests."""
        return summarise([getattr(metrics, name) for metrics in self.metrics])

    def gap_summary(self) -> Summary | None:
        """Seconds between chunks of audio, those of all requests together."""
        return summarise([gap for trace in self.traces for gap in gaps(trace.audio)])


def run_phase(name: str, api: ChatApi, bodies: Sequence[bytes], concurrency: int, advance: Advance) -> Phase:
    """Send every body once, at most `concurrency` at a time; streams are decoded only when all have ended.

    Raises: BenchError as soon as one request fails; those under way are cut off.
    """
    cut_off = threading.Event()
    began_s = time.perf_counter()

    def one(prompt: int) -> Recording:
        try:
            recording = api.answer(prompt, bodies[prompt], began_s, cut_off.is_set)
        except BaseException:
            cut_off.set()
            raise
        advance()
        return recording

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        recordings = list(pool.map(one, range(len(bodies))))
    finally:
        cut_off.set()
        pool.shutdown(cancel_futures=True)
    wall_s = time.perf_counter() - began_s
    traces = tuple(read_recording(recording) for recording in recordings)
    return Phase(
        name=name, concurrency=concurrency, wall_s=wall_s, traces=traces, metrics=tuple(measure_answer(trace) for trace in traces)
    )
