"""Span hop benchmark: blocks of rows between two processes, on the connection and through the ring
that NIXL reads.

Each transport needs two processes of its own, since UCX reads its settings once. Knows no layers.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Group

from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.serving import Steps
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, median
from fleet.lab.report.tables import figure, table_of, titled
from fleet.process.parent_death import signalled_with_parent

KIB = 1024
SIZES_KIB = (16, 256, 1024, 2048, 4096, 16 * KIB, 64 * KIB)
SMALL_SIZES_KIB = (16, 256)
HOST, TCP = "host", "tcp"
TRANSPORTS = {HOST: "NIXL in the host's memory", TCP: "NIXL over TCP (UCX_TLS=tcp)"}
THRESHOLD_KIB, TARGET = 2048, 1.2
LIMIT_S = 300


class HopSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one size, sent in turns on the connection and through the ring, each until its
    receiver has answered.

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
        """Time on the connection relative to that through the ring."""
        return median(self.connection_us) / median(self.ring_us)


class TransportHops(msgspec.Struct, frozen=True, kw_only=True):
    """`transport`: a key of `TRANSPORTS`."""

    transport: str
    hops: tuple[HopSamples, ...]

    def table(self) -> Group:
        table = table_of("KiB", "connection us", "ring us", "ratio", "CPU us", "CPU us, ring")
        for hop in self.hops:
            times = (median(hop.connection_us), median(hop.ring_us), hop.ratio)
            table.add_row(
                f"{hop.kib}", *map(figure, (*times, hop.connection_cpu_us, hop.ring_cpu_us))
            )
        return titled(
            "one block between two processes and the answer to it: TCP, and "
            f"{TRANSPORTS[self.transport]}",
            table,
        )


class SpanHopsResult(Result, frozen=True, kw_only=True):
    """The hops of each transport."""

    transports: tuple[TransportHops, ...]

    def tables(self) -> list[Group]:
        return [each.table() for each in self.transports]

    def targets(self) -> Sequence[Ratio]:
        """Return the gain at the size from which on the ring is used unless `spans.nixl_kib` is
        set.
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


def measure_span_hops(steps: Steps, *, small: bool) -> SpanHopsResult:
    """Raises: BenchError if a process of the measurement fails."""
    step = steps("hops of rows", len(TRANSPORTS))
    measured: list[TransportHops] = []
    for transport in TRANSPORTS:
        measured.append(_measure(transport, SMALL_SIZES_KIB if small else SIZES_KIB))
        step()
    return SpanHopsResult(transports=tuple(measured))


def _measure(transport: str, sizes_kib: Sequence[int]) -> TransportHops:
    command = [
        sys.executable,
        "-m",
        "fleet.lab.measure.span_hops_run",
        transport,
        *map(str, sizes_kib),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    env |= {"UCX_TLS": "tcp"} if transport == TCP else {}
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            preexec_fn=signalled_with_parent(signal.SIGKILL),
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(
            f"the measurement of {TRANSPORTS[transport]} did not end within {LIMIT_S} s"
        ) from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise BenchError(
            f"the measurement of {TRANSPORTS[transport]} failed: "
            f"{lines[-1] if lines else done.returncode}"
        )
    return TransportHops(
        transport=transport, hops=msgspec.json.decode(done.stdout, type=tuple[HopSamples, ...])
    )
