"""The sending process of the span hop benchmark, as a script; it starts the receiving one, which is
this script too.
"""

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.span_hops import HOST, KIB, HopSamples
from fleet.lab.report.stats import median
from fleet.process.parent_death import signalled_with_parent
from fleet.spans.net.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.spans.net.listener import SpanListener
from fleet.spans.net.ring import MAX_BLOCK_SHARE, BlockReads
from fleet.transfer.reach import LOCAL, Reach

ADDRESS, LOOPBACK_DEVICE = "127.0.0.1", "lo"
KEY_BYTES = 32
WAIT_S = 60.0
RING_BYTES = MAX_BLOCK_SHARE * 80 * KIB**2
"""More than a worker's, so that the largest block has room."""
WARM_UP, FEWEST, MOST = 3, 8, 40
BYTES_PER_SIZE = 256 * KIB**2
RECEIVER = "receive"


@dataclass(frozen=True, slots=True)
class MeasuredHop:
    """One block. `received_cpu_us`: CPU time of the receiving process so far."""

    took_us: float
    sent_cpu_us: float
    received_cpu_us: float


class MeasuredEnd:
    """The sending end of one connection."""

    def __init__(self, port: int, key: bytes, name: str, blocks: BlockReads | None) -> None:
        self._arrivals = SpanArrivals(blocks)
        address = (ADDRESS, port)
        self.connection: SpanConnection = dial(
            address,
            key=key,
            own_name=name,
            purpose="bench",
            arrivals=self._arrivals,
            timeout_s=WAIT_S,
        )

    def hop(self, block: memoryview) -> MeasuredHop:
        """Send a block, and wait for the answer. Raises: BenchError."""
        cpu_ns, began_ns = time.process_time_ns(), time.perf_counter_ns()
        self.connection.send(b"block", block)
        arrived = self._arrivals.take(WAIT_S)
        took_us, cpu_us = (
            (time.perf_counter_ns() - began_ns) / 1e3,
            (time.process_time_ns() - cpu_ns) / 1e3,
        )
        if len(arrived) != 1 or not isinstance(arrived[0], FrameReceived):
            raise BenchError(f"a block was not answered: {arrived}")
        return MeasuredHop(took_us, cpu_us, float(arrived[0].frame.header))

    def use_ring(self) -> None:
        """Send blocks until they go through the ring. Raises: BenchError."""
        until_s = time.monotonic() + WAIT_S
        while not self.connection.num_blocks[1]:
            if time.monotonic() > until_s:
                raise BenchError("NIXL does not start here, or does not reach the other process")
            self.hop(memoryview(bytes(KIB)))
            time.sleep(0.01)


def measure(ends: Sequence[MeasuredEnd], kib: int) -> HopSamples:
    """Measure blocks of one size on the connection without a ring and the one with it, in turns."""
    source = np.frombuffer(secrets.token_bytes(kib * KIB), np.uint8)
    block = source.copy()
    num_rounds = WARM_UP + min(MOST, max(FEWEST, BYTES_PER_SIZE // len(block)))
    received_cpu_us = ends[0].hop(memoryview(b"")).received_cpu_us
    took_us: tuple[list[float], list[float]] = ([], [])
    cpu_us: tuple[list[float], list[float]] = ([], [])
    for number in range(num_rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            np.copyto(block, source)  # rows are in the cache of the core that has computed them
            hop = ends[which].hop(block.data)
            if number >= WARM_UP:
                took_us[which].append(hop.took_us)
                cpu_us[which].append(hop.sent_cpu_us + hop.received_cpu_us - received_cpu_us)
            received_cpu_us = hop.received_cpu_us
    return HopSamples(
        kib=kib,
        connection_us=tuple(took_us[0]),
        ring_us=tuple(took_us[1]),
        connection_cpu_us=median(cpu_us[0]),
        ring_cpu_us=median(cpu_us[1]),
    )


def send(transport: str, sizes_kib: Sequence[int]) -> tuple[HopSamples, ...]:
    key = secrets.token_bytes(KEY_BYTES)
    command = [sys.executable, "-m", "fleet.lab.measure.span_hops_run", transport, RECEIVER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=signalled_with_parent(signal.SIGKILL),
    ) as receiver:
        try:
            assert receiver.stdin is not None and receiver.stdout is not None
            receiver.stdin.write(f"{key.hex()}\n")
            receiver.stdin.flush()
            port = int(receiver.stdout.readline())
            ends = [
                MeasuredEnd(port, key, "connection", None),
                MeasuredEnd(port, key, "ring", _blocks(transport)),
            ]
            ends[1].use_ring()
            measured = tuple(measure(ends, kib) for kib in sizes_kib)
            for end in ends:
                end.connection.close()
            return measured
        finally:
            receiver.kill()


def receive(transport: str) -> None:
    """Answer each block with the CPU time of this process so far, until the connections end."""
    arrivals = SpanArrivals(_blocks(transport))
    listener = SpanListener(
        ADDRESS, arrivals=arrivals, key=bytes.fromhex(sys.stdin.readline()), own_name=RECEIVER
    )
    assert isinstance(listener.address, tuple), "a measurement of TCP"
    print(listener.address[1], flush=True)
    num_closed = 0
    while num_closed < 2:
        for arrival in arrivals.take(WAIT_S):
            num_closed += isinstance(arrival, ConnectionClosed)
            if isinstance(arrival, FrameReceived):
                arrival.connection.send(b"%f" % (time.process_time_ns() / 1e3))
            del arrival  # its memory is free before the next block comes


def _blocks(transport: str) -> BlockReads:
    return BlockReads(
        min_bytes=1,
        ring_bytes=RING_BYTES,
        reach=LOCAL if transport == HOST else Reach((LOOPBACK_DEVICE,)),
    )


if __name__ == "__main__":
    if sys.argv[2] == RECEIVER:
        receive(sys.argv[1])
    else:
        sys.stdout.buffer.write(
            msgspec.json.encode(send(sys.argv[1], [int(kib) for kib in sys.argv[2:]]))
        )
