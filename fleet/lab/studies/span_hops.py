"""Study of the transfer of hidden states between two span processes: over their TCP connection, and
through the ring that NIXL reads.

Each transport needs two processes of its own, since UCX reads its settings once. Knows no layers.

On 27 November 2026, on two cores that others used too (medians of one run), the ring in the host's
memory was 0.75 times as fast as the connection at 256 KiB, 1.6 at 1, 2 and 16 MiB, 1.4 at 4 MiB and
3.2 at 64 MiB; with NIXL over TCP 0.25 to 0.83. Of nine runs, one missed the target at 2 MiB with
0.95.
"""

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.console import Group

from fleet.lab.measure.calls import Caller, ProcessCall, ProcessSettings, call
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, median
from fleet.lab.report.tables import figures, table_of, titled
from fleet.spans.net.connection import ConnectionClosed, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.spans.net.listener import SpanListener
from fleet.spans.net.ring import MAX_BLOCK_SHARE, BlockReads
from fleet.transfer.reach import LOCAL, Reach

KIB = 1024
SIZES_KIB = (16, 256, 1024, 2048, 4096, 16 * KIB, 64 * KIB)
SMALL_SIZES_KIB = (16, 256)
HOST, TCP = "host", "tcp"
TRANSPORTS = {HOST: "NIXL in the host's memory", TCP: "NIXL over TCP (UCX_TLS=tcp)"}
THRESHOLD_KIB, TARGET = 2048, 1.2


ADDRESS, LOOPBACK_DEVICE = "127.0.0.1", "lo"
KEY_BYTES = 32
WAIT_S = 60.0
RING_BYTES = MAX_BLOCK_SHARE * 80 * KIB**2
"""Size of the ring: larger than a worker's, so that the largest measured block fits."""
WARM_UP, FEWEST, MOST = 3, 8, 40
BYTES_PER_SIZE = 256 * KIB**2


class HopSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Round-trip times of blocks of one size, sent alternately over the TCP connection and through
    the ring. A round trip ends with the receiver's answer.

    Units: microseconds. `connection_cpu_us`, `ring_cpu_us`: median CPU time of both processes for
    one block.
    """

    kib: int
    connection_us: tuple[float, ...]
    ring_us: tuple[float, ...]
    connection_cpu_us: float
    ring_cpu_us: float

    @property
    def ratio(self) -> float:
        """Median time over the connection relative to the median time through the ring."""
        return median(self.connection_us) / median(self.ring_us)


class TransportHops(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of all block sizes on one transport. `transport`: a key of `TRANSPORTS`."""

    transport: str
    hops: tuple[HopSamples, ...]

    def table(self) -> Group:
        table = table_of("KiB", "connection us", "ring us", "ratio", "CPU us", "CPU us, ring")
        for hop in self.hops:
            times = (median(hop.connection_us), median(hop.ring_us), hop.ratio)
            table.add_row(f"{hop.kib}", *figures(*times, hop.connection_cpu_us, hop.ring_cpu_us))
        return titled(
            "one block between two processes and the answer to it: TCP, and "
            f"{TRANSPORTS[self.transport]}",
            table,
        )


class SpanHopsResult(Result, frozen=True, kw_only=True):
    """Block transfer times between two processes on each transport."""

    transports: tuple[TransportHops, ...]

    def tables(self) -> list[Group]:
        return [each.table() for each in self.transports]

    def targets(self) -> Sequence[Ratio]:
        """Return the gain of the ring in the host's memory, at the block size from which Fleet uses
        the ring by default (`spans.nixl_kib`).
        """
        found = [
            hop
            for each in self.transports
            if each.transport == HOST
            for hop in each.hops
            if hop.kib == THRESHOLD_KIB
        ]
        name = f"connection / ring, {THRESHOLD_KIB} KiB"
        return [at_least(name, hop.ratio, TARGET) for hop in found]


@dataclass(frozen=True, slots=True)
class MeasuredHop:
    """Round trip of one block. `sent_cpu_us`: CPU time that the sending process used for the block.
    `received_cpu_us`: CPU time of the receiving process from its start until the answer.
    """

    took_us: float
    sent_cpu_us: float
    received_cpu_us: float


class MeasuredEnd:
    """Sending end of one connection between the two processes."""

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
        """Send a block, wait for the answer and return the times. Raises: BenchError."""
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
        """Send blocks until the connection uses the ring. Raises: BenchError if it never does."""
        until_s = time.monotonic() + WAIT_S
        while not self.connection.num_blocks[1]:
            if time.monotonic() > until_s:
                raise BenchError("NIXL does not start here, or does not reach the other process")
            self.hop(memoryview(bytes(KIB)))
            time.sleep(0.01)


def measure(ends: Sequence[MeasuredEnd], kib: int) -> HopSamples:
    """Measure blocks of `kib` KiB alternately over the connection without a ring and the connection
    with a ring.
    """
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


def measure_span_hops(context: Context) -> SpanHopsResult:
    """Measure the blocks on each transport. Raises: BenchError if a process of the measurement
    fails.
    """
    sizes_kib = SMALL_SIZES_KIB if context.options.small else SIZES_KIB
    step = context.steps("hops of rows", len(TRANSPORTS))
    measured: list[TransportHops] = []
    for transport, name in TRANSPORTS.items():
        env = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
        env |= {"UCX_TLS": "tcp"} if transport == TCP else {}
        label = f"the measurement of {name}"
        function = "fleet.lab.studies.span_hops:send"
        hops = call(
            *(function, transport, sizes_kib),
            kind=tuple[HopSamples, ...],
            name=label,
            settings=ProcessSettings(env=env),
        )
        measured.append(TransportHops(transport=transport, hops=hops))
        step()
    return SpanHopsResult(transports=tuple(measured))


def send(transport: str, sizes_kib: list[int]) -> list[HopSamples]:
    """Start a second process, send blocks of each size to it, and return the times of the round
    trips, a list entry for each size.
    """
    key = secrets.token_bytes(KEY_BYTES)
    with ProcessCall("fleet.lab.studies.span_hops:receive", transport, key.hex()) as receiver:
        port = receiver.receive(int)
        ends = [
            MeasuredEnd(port, key, "connection", None),
            MeasuredEnd(port, key, "ring", _blocks(transport)),
        ]
        ends[1].use_ring()
        measured = [measure(ends, kib) for kib in sizes_kib]
        for end in ends:
            end.connection.close()
        return measured


def receive(transport: str, key: str, caller: Caller) -> None:
    """Answer each block with the CPU time that this process has used so far, in microseconds, until
    the connections end.
    """
    arrivals = SpanArrivals(_blocks(transport))
    listener = SpanListener(ADDRESS, arrivals=arrivals, key=bytes.fromhex(key), own_name="receiver")
    assert isinstance(listener.address, tuple), "a measurement of TCP"
    caller.send(listener.address[1])
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


MEASUREMENT = Measurement(
    place=80,
    key="span_hops",
    run=measure_span_hops,
    option="--span-hops",
    help="measure rows between span workers by TCP and by NIXL",
    has_small=True,
    about={
        "--span-hops": "blocks of 16 KiB to 64 MiB between two processes: on a TCP connection, and "
        "through a ring of memory that NIXL reads (stages.*.spans.nixl_kib), in the memory of this "
        "host and over TCP. With --small the small ones only"
    },
)
