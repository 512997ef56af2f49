"""Bytes that a connection has to send. Pure: knows no socket."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

MAX_PARTS = 1024
"""Buffers that the kernel accepts in one call (IOV_MAX of Linux and macOS)."""


class SendQueue:
    """Bytes of a connection that the kernel has not taken yet, in order, with callbacks for the end
    of each frame. Not thread-safe.
    """

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self._ends: deque[tuple[int, Callable[[], None]]] = deque()
        self.num_bytes = 0
        self.num_bytes_sent = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def first(self) -> list[memoryview]:
        """Return the first buffers in the queue, as many as the kernel accepts in one call."""
        return list(islice(self._parts, MAX_PARTS))

    def add(
        self, parts: Sequence[memoryview], num_bytes: int, when_sent: Callable[[], None] | None
    ) -> None:
        self._parts.extend(parts)
        self.num_bytes += num_bytes
        if when_sent is not None:
            self._ends.append((self.num_bytes_sent + self.num_bytes, when_sent))

    def drop_sent(self, num_sent: int) -> list[Callable[[], None]]:
        """Drop the first `num_sent` bytes, which the kernel has taken; return the callbacks of the
        frames that are now sent.
        """
        self.num_bytes_sent += num_sent
        if self._parts:
            self.num_bytes -= num_sent
        while self._parts and num_sent >= self._parts[0].nbytes:
            num_sent -= self._parts.popleft().nbytes
        if self._parts and num_sent:
            self._parts[0] = self._parts[0][num_sent:]
        ended: list[Callable[[], None]] = []
        while self._ends and self._ends[0][0] <= self.num_bytes_sent:
            ended.append(self._ends.popleft()[1])
        return ended

    def clear(self) -> None:
        """Drop all bytes of a closed connection, and the callbacks without calling them."""
        self._parts.clear()
        self._ends.clear()
        self.num_bytes = 0
