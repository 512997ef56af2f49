"""Hop benchmark: from a producer's `append` to the delivery of the chunk to a blocked consumer,
through real Redis.

Two processes, as in a fleet: the producer sends one small chunk at a time, and the next only once
the consumer waits again, in the worker's own blocking read, so that chunks never queue.
"""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

import msgspec
from rich.console import Group

from fleet.control import scripts
from fleet.control.connect import Reply, connect, run
from fleet.control.notices import ChunkNotice
from fleet.core.chunk import Chunk, WireTensor
from fleet.core.clock import now_us
from fleet.core.ids import Epoch, RequestId, RoleName
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.pair import (
    BLOCK_MS,
    CONSUMER,
    EDGE,
    PRODUCER,
    WORKERS,
    bare_redis,
    ok,
    open_requests,
)
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, OTHER, PLAYED, Result
from fleet.lab.report.stats import Ratio, at_most, median, summarise
from fleet.lab.report.tables import table_of, titled
from fleet.process.parent_death import signalled_with_parent
from fleet.worker.process.redis_link import RedisLink, TurnResult

PAYLOAD_CODES = 16
"""One frame of codes, as in most chunks of speech between stages."""
PAUSE_S = 0.001
"""From the consumer's confirmation of a chunk to the next append: by then the consumer waits in
Redis.
"""
READY = b"\n"
"""The consumer's confirmation, on the producer's standard input."""
WARM_UP = 50
ACK_STRIDE = 8
FREE_SLOTS = 8
"""Free slots of a worker that is neither idle nor full; with a single one every read of the inbox
would return early.
"""
NUM_PINGS = 500
TIMEOUT_S = 20.0
TARGET_P50_US = 400.0
NUM_BINS = 60


class HopResult(Result, frozen=True, kw_only=True):
    """Units: microseconds. `delivery_us`: append to delivery; `append_us`: duration of the
    producer's calls.

    `ping_us`: a bare round trip to Redis at the same pace, which separates a slow machine from a
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
        """Draw on a logarithmic scale, where a few late hops leave the others room."""
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


class _ProducerTask(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the producing process: the first line of its standard input."""

    redis_url: str
    request: RequestId
    epoch: Epoch
    count: int


def measure_hops(count: int, advance: Callable[[int], None]) -> HopResult:
    """Measure `count` hops through a Redis that is started for it, with a fleet's settings.

    Raises: BenchError if a chunk never arrives; ConfigError if there is no Redis to start.
    """
    with bare_redis() as server:
        client = connect(server.url, one_connection=True)
        ping_us = tuple(_duration_us(client.ping) for _ in range(NUM_PINGS))
        links = {
            stage: RedisLink(client, worker, RoleName(stage)) for stage, worker in WORKERS.items()
        }
        ((request, epochs),) = open_requests(partial(run, client), links, 1)
        task = _ProducerTask(
            redis_url=server.url, request=request, epoch=epochs[PRODUCER], count=count + WARM_UP
        )
        command = [sys.executable, "-m", "fleet.lab.measure.hop"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=signalled_with_parent(signal.SIGKILL),
        ) as producer:
            assert producer.stdin is not None and producer.stdout is not None
            try:
                producer.stdin.write(msgspec.json.encode(task) + b"\n")
                delivery_us = _consume(
                    links[CONSUMER], task, epochs[CONSUMER], producer.stdin, advance
                )
                append_us = msgspec.json.decode(producer.stdout.read(), type=tuple[float, ...])
            finally:
                producer.kill()
                client.close()
    return HopResult(
        delivery_us=tuple(delivery_us[WARM_UP:]), append_us=append_us[WARM_UP:], ping_us=ping_us
    )


def _duration_us(call: Callable[[], Reply]) -> float:
    time.sleep(PAUSE_S)
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e6


def _consume(
    link: RedisLink,
    task: _ProducerTask,
    epoch: Epoch,
    producer: IO[bytes],
    advance: Callable[[int], None],
) -> list[float]:
    """Wait for every chunk as a worker does, acknowledging in strides, and return the age of each
    on arrival.
    """
    ages_us: list[float] = []
    acked = 0
    deadline = time.monotonic() + TIMEOUT_S
    _confirm(producer)
    while len(ages_us) < task.count:
        due = len(ages_us) - acked >= ACK_STRIDE
        acked = len(ages_us) if due else acked
        ack = scripts.Ack(
            request=task.request,
            stage=CONSUMER,
            epoch=epoch,
            edge=EDGE,
            consumed=acked,
            producer=PRODUCER,
        )
        result = link.exchange(
            [scripts.ack([ack])] if due else [], free_slots=FREE_SLOTS, block_ms=BLOCK_MS
        )
        arrived_us = time.time_ns() / 1000
        ages_us += _ages(result, arrived_us)
        if result.notices:
            if len(ages_us) > WARM_UP:
                advance(1)
            _confirm(producer)
            deadline = time.monotonic() + TIMEOUT_S
        elif time.monotonic() > deadline:
            raise BenchError(
                f"hop: chunk {len(ages_us)} of {task.count} did not arrive; did the producer die?"
            )
    return ages_us


def _confirm(producer: IO[bytes]) -> None:
    """Let the producer send the next chunk; it may have ended after its last one."""
    with suppress(BrokenPipeError):
        producer.write(READY)
        producer.flush()


def _ages(result: TurnResult, arrived_us: float) -> list[float]:
    return [
        arrived_us - notice.chunk.produced_us
        for notice in result.notices
        if isinstance(notice, ChunkNotice)
    ]


def _produce(task: _ProducerTask) -> list[float]:
    """Append one chunk after another, each stamped just before it is sent; return the duration of
    each call.
    """
    client = connect(task.redis_url, one_connection=True)
    data = bytes(4 * PAYLOAD_CODES)
    took_us: list[float] = []
    for index in range(task.count):
        sys.stdin.buffer.read(len(READY))
        time.sleep(PAUSE_S)
        chunk = Chunk(
            request=task.request,
            edge=EDGE,
            index=index,
            epoch=task.epoch,
            tensors={"codes": WireTensor("int32", (1, PAYLOAD_CODES), data)},
            produced_us=now_us(),
        )
        item = scripts.Append(
            stage=PRODUCER,
            consumer=CONSUMER,
            chunk=chunk,
            location={},
            event=None,
            finish=False,
            num_items=1,
        )
        began_s = time.perf_counter()
        reply = run(client, scripts.append([item]))
        took_us.append((time.perf_counter() - began_s) * 1e6)
        ok(reply)
    client.close()
    return took_us


def main() -> None:
    """Run the producing process: its task on standard input, its durations on standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_ProducerTask)
    sys.stdout.buffer.write(msgspec.json.encode(_produce(job)))


if __name__ == "__main__":
    main()
