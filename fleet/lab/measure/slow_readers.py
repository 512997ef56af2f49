"""Listeners beside slow readers: first sound and gaps of ordinary answers, without and with many
clients that read one byte a second.

The slow readers ask first, and read on while the listeners are measured; every one of them has a
request that lives, and none holds a slot. Rounds without and with them alternate. Takes the stages
from the graph.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
from rich.console import Group

from fleet.lab.client.client import ApiClient
from fleet.lab.client.transport import OpenResponse
from fleet.lab.measure.answer_timing import AnswerTiming, gaps, measure_answer, time_answer
from fleet.lab.measure.deployment import TargetFleet, started_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement, argument, whole_number
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import MS, Result
from fleet.lab.report.stats import Ratio, Summary, at_most, summarise
from fleet.lab.report.tables import summary_table

ROUNDS = 2
SETTLE_S, POLL_S = 120.0, 0.5
READ_PERIOD_S = 1.0
MOST_RATIO = 1.2
UNREAD_BYTES = 65_536
"""Number of bytes that a client may leave unread. The limit is low, so that even short answers to
slow readers exceed it and their tasks wait.
"""


class Listened(msgspec.Struct, frozen=True, kw_only=True):
    """What listeners heard: time until the first sound of each answer, and gaps between successive
    chunks of audio. Units: seconds.
    """

    first_s: tuple[float, ...]
    gaps_s: tuple[float, ...]

    @staticmethod
    def of(timings: Sequence[AnswerTiming]) -> "Listened":
        first_s = [measure_answer(timing).first_audio_s for timing in timings]
        return Listened(
            first_s=tuple(first for first in first_s if first is not None),
            gaps_s=tuple(gap for timing in timings for gap in gaps(timing.audio)),
        )

    def summaries(self) -> tuple[Summary | None, Summary | None]:
        """Summarise the times until first sounds, and the gaps. Units: milliseconds."""
        first_ms, gaps_ms = (
            [value * MS for value in values] for values in (self.first_s, self.gaps_s)
        )
        return summarise(first_ms), summarise(gaps_ms)


class BesideSlowReaders(Result, frozen=True, kw_only=True):
    """Results of the rounds without and with slow readers. `num_waiting`: slow readers whose
    requests had not ended when the last round ended. `held`: largest number of tasks that workers
    still ran for slow readers when the listeners of a round began.
    """

    num_listeners: int
    num_slow: int
    num_waiting: int
    held: int
    without: Listened
    beside: Listened
    others_cores: float

    def tables(self) -> list[Group]:
        rows = [
            (f"{what}, {name}", summary)
            for name, listened in (("alone", self.without), ("beside", self.beside))
            for what, summary in zip(("first sound", "gaps"), listened.summaries(), strict=True)
        ]
        title = (
            f"{self.num_listeners} listeners, alone and beside {self.num_slow} slow readers, "
            f"who held {self.held} slots"
        )
        return [summary_table(title, "ms", rows)]

    def targets(self) -> list[Ratio]:
        pairs = zip(self.without.summaries(), self.beside.summaries(), strict=True)
        return [
            at_most(f"p95 of {what}, beside / alone", beside.p95 / alone.p95, MOST_RATIO)
            for what, (alone, beside) in zip(("first sound", "gaps"), pairs, strict=True)
            if alone and beside
        ]


class _Slow:
    """Slow readers, each on a connection of its own, read by one thread."""

    def __init__(self, api: ApiClient, bodies: Sequence[bytes]) -> None:
        self._api = api
        self._bodies = bodies
        self.responses: list[OpenResponse] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Send every request, and read one byte a second of each answer during the block."""
        with ThreadPoolExecutor(max_workers=len(self._bodies)) as pool:
            self.responses = list(pool.map(self._open, self._bodies))
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            for response in self.responses:
                response.close()

    def _open(self, body: bytes) -> OpenResponse:
        return self._api.open_chat(body, small_buffers=True)

    def _read(self) -> None:
        while not self._stop.wait(READ_PERIOD_S):
            for response in self.responses:
                response.read(1)


class _Load:
    """Ordinary listeners and slow readers of one fleet."""

    def __init__(self, target: TargetFleet, context: Context) -> None:
        self._options = context.options
        self._api, self._config = target.api, target.config
        self._roles = {str(role.name) for role in target.config.roles()}
        self._model = self._api.model()

    def bodies(self, count: int) -> list[bytes]:
        options = self._options
        bounds = stage_bounds(self._config, options.max_tokens, options.frames)
        return [
            encode_call(self._model, PROMPTS[at % len(PROMPTS)], self._config, bounds)
            for at in range(count)
        ]

    def listen(self) -> list[AnswerTiming]:
        """Send `--requests` chats, `--concurrency` at a time, and read every answer on arrival."""
        began_s, bodies = time.perf_counter(), self.bodies(self._options.requests)
        with ThreadPoolExecutor(max_workers=self._options.concurrency) as pool:
            recordings = list(pool.map(self._api.record_chat, bodies))
        return [time_answer(at, recording, began_s) for at, recording in enumerate(recordings)]

    def slow(self, count: int) -> _Slow:
        return _Slow(self._api, self.bodies(count))

    def settle(self) -> int:
        """Wait until workers run no task, for at most `SETTLE_S`; return the number of tasks still
        running.
        """
        deadline_s, held = time.monotonic() + SETTLE_S, -1
        while time.monotonic() < deadline_s and held:
            time.sleep(POLL_S)
            workers = self._api.workers().data
            held = sum(worker.running for worker in workers if worker.role in self._roles)
        return held

    def num_live(self, slow: _Slow) -> int:
        """Return the number of slow readers whose requests have not ended."""
        requests = [self._api.traced_request(response.request_id) for response in slow.responses]
        return sum(not request.ended_us for request in requests)


def measure_slow_readers(context: Context) -> BesideSlowReaders:
    """Measure listeners alone and beside slow readers, on a fleet started for this purpose. Raises:
    BenchError if the request of a slow reader ended early, ApiError if a request fails.
    """
    options = context.options
    num_slow: int = options.slow
    overrides = (
        *options.overrides,
        f"limits.max_requests={num_slow + options.concurrency + 8}",
        f"limits.max_unread_bytes={UNREAD_BYTES}",
        "web.send_timeout_s=3600",
    )
    alone, beside = list[AnswerTiming](), list[AnswerTiming]()
    num_waiting, held = num_slow, 0
    with started_fleet(context, "starting a fleet", *overrides) as target:
        load = _Load(target, context)
        load.listen()
        background_load = BackgroundLoad()
        advance = context.steps("rounds of listeners, alone and beside slow readers", 2 * ROUNDS)
        for _ in range(ROUNDS):
            alone += load.listen()
            advance()
            slow = load.slow(num_slow)
            with slow.reading():
                held = max(held, load.settle())
                beside += load.listen()
                num_waiting = min(num_waiting, load.num_live(slow))
            load.settle()
            advance()
    if num_waiting < num_slow:
        raise BenchError(
            f"only {num_waiting} of {num_slow} slow readers had to wait; give more --frames"
        )
    return BesideSlowReaders(
        num_listeners=options.concurrency,
        num_slow=num_slow,
        num_waiting=num_waiting,
        held=held,
        without=Listened.of(alone),
        beside=Listened.of(beside),
        others_cores=background_load.cores(),
    )


MEASUREMENT = Measurement(
    place=55,
    key="slow_readers",
    run=measure_slow_readers,
    option="--slow-readers",
    help="measure listeners beside clients that hardly read",
    about={
        "--slow-readers": "first sound and gaps of --requests answers, --concurrency at a time, in "
        "a fleet of its own: alone, then beside clients that read one byte a second"
    },
    arguments=(
        argument(
            "--slow",
            type=whole_number(),
            default=100,
            metavar="N",
            help="slow readers (100)",
        ),
    ),
)
