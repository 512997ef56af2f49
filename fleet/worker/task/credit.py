"""Credit of an output edge: what was sent and its consumer has not acknowledged. Pure."""

from bisect import bisect_left
from collections.abc import Iterable

from fleet.config.credits import Credits


class EdgeCredit:
    """Counts the chunks of an edge and their bytes against its credits. `acked`: number of chunks
    that the consumer has acknowledged; may exceed the number of chunks, since the consumer may have
    ended, or Redis may have lost chunks.
    """

    def __init__(self, credits: Credits, sizes_bytes: Iterable[int] = (), acked: int = 0) -> None:
        self._credits = credits
        self._ends_bytes: list[int] = []
        """Bytes of each chunk and of all before it."""
        self.acked = acked
        for size in sizes_bytes:
            self.add_chunk(size)

    def add_chunk(self, size_bytes: int) -> None:
        self._ends_bytes.append(self._num_bytes + size_bytes)

    def acknowledge(self, consumed: int) -> None:
        self.acked = max(self.acked, consumed)

    @property
    def _num_bytes(self) -> int:
        return self._ends_bytes[-1] if self._ends_bytes else 0

    def is_used_up(self) -> bool:
        """Return True if the producer must wait."""
        num_left, most = len(self._ends_bytes) - self.acked, self._credits
        if num_left <= 0:
            return False
        if most.chunks is not None and num_left >= most.chunks:
            return True
        if most.num_bytes is None:
            return False
        read_bytes = self._ends_bytes[self.acked - 1] if self.acked else 0
        return self._num_bytes - read_bytes >= most.num_bytes

    def enough(self) -> int:
        """Return the number of acknowledged chunks, counted from the edge's first chunk, at which
        half of the credits is free again. A waiting task resumes at this number instead of at each
        acknowledged chunk.
        """
        most, enough = self._credits, 0
        if most.chunks is not None:
            enough = len(self._ends_bytes) - most.chunks // 2
        if most.num_bytes is not None:
            left_bytes = self._num_bytes - most.num_bytes // 2
            if left_bytes > 0:
                enough = max(enough, bisect_left(self._ends_bytes, left_bytes) + 1)
        return enough
