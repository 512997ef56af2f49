"""Results of the scale benchmark's measurements without workers: Redis alone, and costs that must
not grow. Measures nothing.
"""

from collections.abc import Sequence

import msgspec
from rich.console import Group

from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_most
from fleet.lab.report.tables import figure, table_of, titled

MOVE_S, WATCH_MS = 5.0, 100.0
PAYLOAD_FACTOR, OVERHEAD_BYTES = 1.2, 512
COMMANDS = 7.2
"""Largest number of Redis commands per chunk: its append, its read, and its share of
acknowledgements and of calls for a group of chunks.
"""
CHUNKS_PER_STREAM_S = 12.5


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Mean cost of one chunk when one process makes the calls of many streams.

    `payload_bytes`: size of the chunk as appended; `tensor_bytes`: size of its tensors alone.
    `redis_us`: CPU time of Redis. `append_only_bytes`: bytes that Redis wrote to its append-only
    file, acknowledgements included. `commands`: commands that Redis ran, including commands within
    scripts.
    """

    streams: int
    chunks: int
    tensor_bytes: int
    payload_bytes: float
    redis_us: float
    append_only_bytes: float
    commands: float

    @property
    def append_only_limit(self) -> float:
        return PAYLOAD_FACTOR * self.payload_bytes + OVERHEAD_BYTES

    @property
    def streams_per_core(self) -> float:
        """Number of real-time streams for which Redis would use one core."""
        return 1e6 / self.redis_us / CHUNKS_PER_STREAM_S if self.redis_us else 0.0

    @property
    def targets(self) -> tuple[Ratio, Ratio]:
        """Compare two counts that do not depend on the machine with their targets. Requires at
        least 8 streams: with fewer, a call has fewer chunks to share its cost.
        """
        chunk = f"per chunk of {self.tensor_bytes} bytes"
        logged, limit = self.append_only_bytes, self.append_only_limit
        return (
            at_most(f"append-only file {chunk}", logged, limit, "bytes"),
            at_most(f"commands {chunk}", self.commands, COMMANDS),
        )


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the simulated fleet: answers of one gateway, and grants that wait for a claim."""

    answers: int
    waiting: int


class ScaleCosts(Result, frozen=True, kw_only=True):
    """Costs with many answers and waiting grants.

    `rejoin_s`: time from the fencing of a gateway until it has all its answers again.
    `take_over_s`: time after that until 16 clients, which resume one answer after another, have
    resumed all answers at another gateway. `lapsed_leases`: number of lease checks during both
    times that found a lease expired. `watch_ms`: longest pass of the conductor's loop while it
    checks all waiting grants.
    """

    sizes: Sizes
    rejoin_s: float
    take_over_s: float
    lapsed_leases: int
    watch_ms: float
    replays: tuple[Replay, ...]

    def tables(self) -> Sequence[Group]:
        table = table_of(
            "Redis alone", *(f"{replay.tensor_bytes} bytes" for replay in self.replays)
        )
        table.add_row("CPU per chunk, us", *(figure(replay.redis_us) for replay in self.replays))
        table.add_row(
            "streams per core", *(figure(replay.streams_per_core) for replay in self.replays)
        )
        table.add_row("commands per chunk", *(figure(replay.commands) for replay in self.replays))
        table.add_row(
            "append-only file per chunk, bytes",
            *(figure(replay.append_only_bytes) for replay in self.replays),
        )
        table.add_row(
            "chunk with its header, bytes",
            *(figure(replay.payload_bytes) for replay in self.replays),
        )
        costs = table_of("", "")
        costs.add_row(
            f"a fenced gateway has its {self.sizes.answers} answers again, s", figure(self.rejoin_s)
        )
        costs.add_row("another gateway has resumed them, s", figure(self.take_over_s))
        costs.add_row(
            f"the conductor's longest turn with {self.sizes.waiting} waiting grants, ms",
            figure(self.watch_ms),
        )
        return [
            titled("calls of many streams, made by one process", table),
            titled("costs without workers", costs),
        ]

    def targets(self) -> Sequence[Ratio]:
        answers = f"of {self.sizes.answers} answers"
        watch = f"conductor's turn with {self.sizes.waiting} waiting grants"
        return [
            *(ratio for replay in self.replays for ratio in replay.targets),
            at_most(f"rejoin {answers}", self.rejoin_s, MOVE_S, "s"),
            at_most(f"take-over {answers}", self.take_over_s, MOVE_S, "s"),
            at_most("lapsed leases meanwhile", self.lapsed_leases, 0, "looks"),
            at_most(watch, self.watch_ms, WATCH_MS, "ms"),
        ]
