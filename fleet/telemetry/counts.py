"""Counters of one process: chunk latencies, pulls (reads of another worker's memory) by edge, and
chunk arrivals at one task.

Histogram buckets are fixed, so the counts of many workers add up. Pure. Knows no clock and no
transport: latencies are exact on one machine; between machines they include the difference of the
clocks.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from fleet.core.ids import EdgeName, WorkerId
from fleet.telemetry.trace import BatchSizes, Receipt

PER_DECADE = 20
BOUNDS_US = tuple(round(100 * 10 ** (step / PER_DECADE)) for step in range(5 * PER_DECADE + 1))
"""Upper bounds of the histogram buckets in microseconds, from 0.1 ms to 10 s, each 12 % above the
last. Longer durations count as 10 s.
"""
SEPARATOR = ","
KV = "kv"
"""Name under which pulls of KV pages between the halves of a split stage are counted, as such pages
belong to no edge.
"""
RECEIVED = "received"
"""Prefix of the field in a task's hash that stores its `Receipts`. The epoch is appended, since a
task may have several owners.
"""
BATCHED = "batched"
"""Prefix of the field in a task's hash that stores its `BatchSizes`, with the epoch appended."""


def bound_of(us: float) -> int:
    """Return the index in `BOUNDS_US` of the bucket of a duration in microseconds."""
    return min(bisect_left(BOUNDS_US, us), len(BOUNDS_US) - 1)


class LatencyCounts:
    """Histogram of durations, one count per bound. Chunk latencies are measured from the producer's
    time stamp to the arrival at the consumer.
    """

    def __init__(self, counts: list[int] | None = None) -> None:
        self.counts = counts or [0] * len(BOUNDS_US)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatencyCounts) and self.counts == other.counts

    def add(self, us: int) -> None:
        self.counts[bound_of(us)] += 1

    @property
    def total(self) -> int:
        return sum(self.counts)

    def __add__(self, other: "LatencyCounts") -> "LatencyCounts":
        pairs = zip(self.counts, other.counts, strict=True)
        return LatencyCounts([left + right for left, right in pairs])

    def __sub__(self, earlier: "LatencyCounts") -> "LatencyCounts":
        """Return the counts added since `earlier`, an older copy of this histogram."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return LatencyCounts([new - old for new, old in pairs])

    def percentile_us(self, percent: float) -> int | None:
        """Return the upper bound of the bucket that contains this percentile, in microseconds: at
        most 12 % too large. Returns None if nothing was counted.
        """
        wanted, seen = self.total * percent / 100, 0
        if not self.total:
            return None
        for bound, count in zip(BOUNDS_US, self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return bound
        raise AssertionError("counts that do not add up to their total")

    def percentile_ms(self, percent: float) -> float | None:
        found = self.percentile_us(percent)
        return None if found is None else found / 1000

    def encoded(self) -> str:
        """Return the counts as text for Redis, which `decode` reads."""
        return SEPARATOR.join(str(count) for count in self.counts)

    @classmethod
    def decode(cls, text: str) -> "LatencyCounts":
        """Return the counts in a text that `encoded` has written; zeros for "".

        Raises: ValueError for any other text.
        """
        counts = [int(count) for count in text.split(SEPARATOR)] if text else [0] * len(BOUNDS_US)
        if len(counts) != len(BOUNDS_US):
            raise ValueError(f"{len(counts)} counts instead of {len(BOUNDS_US)}")
        return cls(counts)


class PullCounts(msgspec.Struct, kw_only=True):
    """Pulls (reads of another worker's memory) for one edge since the worker joined. `num_pulls`,
    `num_bytes`, `durations`: number, size and histogram of durations of the successful pulls.
    `num_failed`: failed pulls. `in_flight`: pulls in progress now.
    """

    num_pulls: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    in_flight: int = 0
    durations: LatencyCounts = msgspec.field(default_factory=LatencyCounts)

    def __add__(self, other: "PullCounts") -> "PullCounts":
        names = self.__struct_fields__
        return PullCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class SentCounts(msgspec.Struct, kw_only=True):
    """Chunks that a worker sent over one edge since it joined, and the bytes of their tensors.
    `num_waiting`: number of the worker's tasks that wait for credit on this edge now.
    """

    num_chunks: int = 0
    num_bytes: int = 0
    num_waiting: int = 0

    def __add__(self, other: "SentCounts") -> "SentCounts":
        names = self.__struct_fields__
        return SentCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class PullTally:
    """Counter of one worker's pulls (reads of another worker's memory), by edge."""

    def __init__(self) -> None:
        self._counts: dict[str, PullCounts] = {}

    def ended(self, edge: str, num_bytes: int, took_us: int) -> None:
        counts = self._of(edge)
        counts.num_pulls += 1
        counts.num_bytes += num_bytes
        counts.durations.add(took_us)

    def failed(self, edge: str) -> None:
        self._of(edge).num_failed += 1

    def counts(self, in_flight: dict[str, int]) -> dict[str, PullCounts]:
        """Return the pull counts by edge; later pulls change the result. `in_flight`: number of
        pulls in progress by edge.
        """
        for edge in in_flight:
            self._of(edge)
        for edge, counts in self._counts.items():
            counts.in_flight = in_flight.get(edge, 0)
        return self._counts

    def _of(self, edge: str) -> PullCounts:
        return self._counts.setdefault(edge, PullCounts())


@dataclass(slots=True)
class Receipts:
    """Statistics of chunk arrivals and pulls at one owner of a task, by input edge; reported once,
    when the ownership ends. Chunks that were read from the log when the task was opened have no
    arrival time and are not counted.
    """

    _receipts: dict[EdgeName, Receipt] = field(default_factory=dict[EdgeName, Receipt])
    _latencies_us: Counter[EdgeName] = field(default_factory=Counter[EdgeName])

    def arrived(self, edge: EdgeName, at_us: int, produced_us: int) -> None:
        receipt, latency_us = self._of(edge), max(0, at_us - produced_us)
        receipt.num_chunks += 1
        receipt.first_us = receipt.first_us or at_us
        receipt.last_us = at_us
        receipt.hop_max_us = max(receipt.hop_max_us, latency_us)
        self._latencies_us[edge] += latency_us

    def pulled(self, edge: EdgeName, num_bytes: int, took_us: int) -> None:
        receipt = self._of(edge)
        receipt.num_pulls += 1
        receipt.pull_bytes += num_bytes
        receipt.pull_us += took_us
        receipt.pull_max_us = max(receipt.pull_max_us, took_us)

    def failed(self, edge: EdgeName) -> None:
        self._of(edge).num_failed_pulls += 1

    def line(self, worker: WorkerId) -> bytes | None:
        """Encode the statistics as JSON for the trace; None if no chunk arrived and nothing was
        pulled. `worker`: the owner of the task.
        """
        for edge, receipt in self._receipts.items():
            receipt.worker = worker
            receipt.hop_mean_us = self._latencies_us[edge] // max(1, receipt.num_chunks)
        return msgspec.json.encode(tuple(self._receipts.values())) if self._receipts else None

    def _of(self, edge: EdgeName) -> Receipt:
        return self._receipts.setdefault(edge, Receipt(edge=edge))


@dataclass(slots=True)
class BatchTally:
    """Counter of the batches in which one owner computes a task; reported with its `Receipts`."""

    num_steps: int = 0
    num_requests: int = 0
    most: int = 0

    def add(self, num_requests: int) -> None:
        """Add an engine step that produced output for `num_requests` requests, this task's
        included.
        """
        self.num_steps += 1
        self.num_requests += num_requests
        self.most = max(self.most, num_requests)

    def line(self, worker: WorkerId) -> bytes | None:
        """Encode the sizes as JSON for the trace; None before the first step. `worker`: the owner
        of the task.
        """
        if not self.num_steps:
            return None
        mean = round(self.num_requests / self.num_steps, 2)
        return msgspec.json.encode(
            BatchSizes(worker=worker, num_steps=self.num_steps, mean=mean, most=self.most)
        )


decode_batch_sizes = msgspec.json.Decoder(BatchSizes).decode
decode_receipts = msgspec.json.Decoder(tuple[Receipt, ...]).decode
