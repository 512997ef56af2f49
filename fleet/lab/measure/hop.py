"""Benchmark of chunk latency: from a producer's `append` to the delivery of the chunk to a blocked
consumer, through real Redis.

Producer and consumer are two processes, as in a fleet. The producer sends one small chunk at a
time, and the next chunk only once the consumer is again in the worker's blocking read, so that
chunks never queue.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Group

from fleet.control import scripts
from fleet.control.connect import Reply, connect, run
from fleet.control.notices import ChunkNotice
from fleet.core.chunk import WireTensor
from fleet.core.ids import Epoch, RequestId
from fleet.lab.measure.calls import Caller, ProcessCall
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Measurement, argument, whole_number
from fleet.lab.measure.pair import (
    BLOCK_MS,
    CONSUMER,
    PRODUCER,
    ack_of,
    append_of,
    bare_redis,
    links_of,
    ok,
    open_requests,
)
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, OTHER, PLAYED, Result
from fleet.lab.report.stats import Ratio, at_most, median, summarise
from fleet.lab.report.tables import table_of, titled
from fleet.worker.process.redis_link import RedisLink, TurnResult

PAYLOAD_CODES = 16
"""Payload of a chunk: one frame of codes, as in most chunks of speech between stages."""
PAUSE_S = 0.001
"""Pause between the consumer's confirmation of a chunk and the next append. During the pause the
consumer enters its blocking read in Redis.
"""
READY = "ready"
"""Message with which the consumer confirms a chunk to the producer."""
WARM_UP = 50
ACK_STRIDE = 8
FREE_SLOTS = 8
"""Number of free slots that the consumer reports, like a worker neither idle nor full. With a
single free slot every read of the inbox would return early.
"""
NUM_PINGS = 500
TIMEOUT_S = 20.0
TARGET_P50_US = 400.0
NUM_BINS = 60


class HopResult(Result, frozen=True, kw_only=True):
    """Measured chunk latencies. Units: microseconds. `delivery_us`: time from append to delivery.
    `append_us`: duration of the producer's calls.

    `ping_us`: plain round trip to Redis at the same pace, which separates a slow machine from a
    slow script, since after a pause every process must be woken first.
    """

    delivery_us: tuple[float, ...]
    append_us: tuple[float, ...]
    ping_us: tuple[float, ...]

    def tables(self) -> list[Group]:
        table = table_of("", "p50", "p95", "min")
        rows = {
            "append to delivery": self.delivery_us,
            "append call": self.append_us,
            "bare ping": self.ping_us,
        }
        for name, durations_us in rows.items():
            if summary := summarise(durations_us):
                table.add_row(
                    f"{name}, us", f"{summary.p50:.0f}", f"{summary.p95:.0f}", f"{summary.low:.0f}"
                )
        return [titled(f"{len(self.delivery_us)} hops through Redis", table)]

    def panels(self) -> list[Panel]:
        return [self._draw]

    def targets(self) -> list[Ratio]:
        p50_us = median(self.delivery_us)
        return [at_most("hop p50", p50_us, TARGET_P50_US, "us")]

    def _draw(self, axes: Axes) -> None:
        """Draw the distributions on a logarithmic scale, so that a few outliers do not compress the
        rest.
        """
        low, high = math.log10(min(self.delivery_us)), math.log10(max(self.delivery_us))
        edges = [10 ** (low + (high - low) * step / NUM_BINS) for step in range(NUM_BINS + 1)]
        axes.hist(self.delivery_us, bins=edges, color=FLEET)
        axes.set_xscale("log")
        axes.axvline(median(self.delivery_us), color=OTHER, label="p50")
        axes.axvline(TARGET_P50_US, color=PLAYED, linestyle="--", label="target for p50")
        axes.set(
            xlabel="us from append to delivery",
            ylabel="hops",
            title=f"{len(self.delivery_us)} hops through Redis",
        )
        axes.legend(fontsize=8)


def measure_hops(count: int, advance: Callable[[int], None]) -> HopResult:
    """Measure the latency of `count` chunks through a Redis that is started for the run with a
    fleet's settings.

    Raises: BenchError if a chunk never arrives; ConfigError if there is no Redis to start.
    """
    with bare_redis() as server, connect(server.url, one_connection=True) as client:
        ping_us = tuple(_duration_us(client.ping) for _ in range(NUM_PINGS))
        links = links_of(partial(RedisLink, client))
        ((request, epochs),) = open_requests(partial(run, client), links, 1)
        num_chunks = count + WARM_UP
        arguments = (server.url, request, epochs[PRODUCER], num_chunks)
        with ProcessCall("fleet.lab.measure.hop:produce", *arguments, name="hop") as producer:
            consumer = _Consumer(links[CONSUMER], request, epochs[CONSUMER], producer)
            delivery_us = consumer.receive(num_chunks, advance)
            append_us = producer.receive(tuple[float, ...])
    return HopResult(
        delivery_us=tuple(delivery_us[WARM_UP:]), append_us=append_us[WARM_UP:], ping_us=ping_us
    )


def _duration_us(call: Callable[[], Reply]) -> float:
    time.sleep(PAUSE_S)
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e6


@dataclass(frozen=True, slots=True)
class _Consumer:
    """The consuming worker, which confirms each chunk to the producer."""

    link: RedisLink
    request: RequestId
    epoch: Epoch
    producer: ProcessCall

    def receive(self, num_chunks: int, advance: Callable[[int], None]) -> list[float]:
        """Receive every chunk in a blocking read as a worker does, with an acknowledgement per
        stride of chunks; return the age of each chunk on arrival.
        """
        ages_us: list[float] = []
        acked = 0
        deadline = time.monotonic() + TIMEOUT_S
        self.producer.send(READY)
        while len(ages_us) < num_chunks:
            due = len(ages_us) - acked >= ACK_STRIDE
            acked = len(ages_us) if due else acked
            calls = [scripts.ack([ack_of(self.request, self.epoch, acked)])] if due else []
            result = self.link.exchange(calls, free_slots=FREE_SLOTS, block_ms=BLOCK_MS)
            arrived_us = time.time_ns() / 1000
            ages_us += _ages(result, arrived_us)
            if result.notices:
                if len(ages_us) > WARM_UP:
                    advance(1)
                if len(ages_us) < num_chunks:
                    self.producer.send(READY)
                deadline = time.monotonic() + TIMEOUT_S
            elif time.monotonic() > deadline:
                raise BenchError(
                    f"hop: chunk {len(ages_us)} of {num_chunks} did not arrive; did the producer "
                    "die?"
                )
        return ages_us


def _ages(result: TurnResult, arrived_us: float) -> list[float]:
    return [
        arrived_us - notice.chunk.produced_us
        for notice in result.notices
        if isinstance(notice, ChunkNotice)
    ]


def produce(redis_url: str, request: RequestId, epoch: Epoch, count: int, caller: Caller) -> None:
    """Append one chunk after another, each with a timestamp taken just before, and send the
    duration of each append to the caller.
    """
    took_us: list[float] = []
    tensors = {"codes": WireTensor("int32", (1, PAYLOAD_CODES), bytes(4 * PAYLOAD_CODES))}
    with connect(redis_url, one_connection=True) as client:
        for index in range(count):
            caller.receive(str)
            time.sleep(PAUSE_S)
            item = append_of(request, epoch, index, tensors)
            began_s = time.perf_counter()
            reply = run(client, scripts.append([item]))
            took_us.append((time.perf_counter() - began_s) * 1e6)
            ok(reply)
    caller.send(took_us)


MEASUREMENT = Measurement(
    place=10,
    key="hops",
    run=lambda context: measure_hops(
        count := context.options.hops, context.progress.counted("hops", count)
    ),
    option="--hop",
    help="measure append to delivery through a Redis started for it",
    about={"--hop": "one chunk from append to delivery through real Redis"},
    arguments=(
        argument(
            "--hops", type=whole_number(), default=1000, metavar="N", help="number of hops (1000)"
        ),
    ),
)
