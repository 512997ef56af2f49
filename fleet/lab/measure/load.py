"""Closed-loop load on a fleet: the same requests one at a time, or `concurrency` at a time. Takes
no stage names.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from fleet.lab.client.chat import StreamRecording
from fleet.lab.client.client import ApiClient
from fleet.lab.measure.answer_timing import (
    AnswerMetrics,
    AnswerTiming,
    gaps,
    measure_answer,
    time_answer,
)
from fleet.lab.measure.measurement import Advance
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.stats import Summary, summarise

Measured = TypeVar("Measured", bound=msgspec.Struct)


class LoadPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a load phase with `concurrency` requests at a time, until all are answered.

    `others_cores`: mean number of CPU cores used by other processes during the phase; None if the
    fleet was not started here, since its processes would count.
    """

    name: str
    concurrency: int
    wall_s: float
    timings: tuple[AnswerTiming, ...]
    metrics: tuple[AnswerMetrics, ...]
    others_cores: float | None = None

    @property
    def audio_s(self) -> float:
        return sum(metrics.audio_s for metrics in self.metrics)

    @property
    def throughput(self) -> float:
        """Seconds of audio produced per second."""
        return self.audio_s / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.metrics) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return sum(timing.num_answer_tokens for timing in self.timings) / self.wall_s

    def summary(self, field: str) -> Summary | None:
        """Summarise one field of `AnswerMetrics` over the requests."""
        return summarise([getattr(metrics, field) for metrics in self.metrics])

    def gap_summary(self) -> Summary | None:
        """Summarise the seconds between audio chunks, over all requests."""
        return summarise([gap for timing in self.timings for gap in gaps(timing.audio)])


def run_phase(
    name: str, api: ApiClient, bodies: Sequence[bytes], concurrency: int, advance: Advance
) -> LoadPhase:
    """Send every body once, at most `concurrency` at a time. Streams are decoded after all have
    ended.

    Raises: ApiError as soon as one request fails; the others are cancelled.
    """
    cancelled = threading.Event()
    began_s = time.perf_counter()

    def record(body: bytes) -> StreamRecording:
        try:
            recording = api.record_chat(body, cancelled.is_set)
        except BaseException:
            cancelled.set()
            raise
        advance()
        return recording

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        recordings = list(pool.map(record, bodies))
    finally:
        cancelled.set()
        pool.shutdown(cancel_futures=True)
    wall_s = time.perf_counter() - began_s
    timings = tuple(
        time_answer(prompt, recording, began_s) for prompt, recording in enumerate(recordings)
    )
    metrics = tuple(measure_answer(timing) for timing in timings)
    return LoadPhase(
        name=name, concurrency=concurrency, wall_s=wall_s, timings=timings, metrics=metrics
    )


def with_background_load(started_here: bool, measure: Callable[[], Measured]) -> Measured:
    """Run `measure` and return its result. `others_cores` of the result is set to the number of CPU
    cores used by other processes meanwhile, or to None if the fleet was not started here, since the
    fleet's own processes would count.
    """
    background_load = BackgroundLoad()
    result = measure()
    return msgspec.structs.replace(
        result, others_cores=background_load.cores() if started_here else None
    )
