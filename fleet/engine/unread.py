"""Pieces of input that an engine was fed and has not read. Pure; knows no engine."""

from collections import deque


class UnreadPieces:
    """Counts the pieces of one request by their rows: an engine reads rows in order, any number at
    a time.
    """

    def __init__(self) -> None:
        self._ends: deque[int] = deque()
        self._num_fed = 0

    def add(self, num_rows: int) -> None:
        """Add a piece of `num_rows` rows; a piece may have 0 rows."""
        self._num_fed += num_rows
        self._ends.append(self._num_fed)

    def count(self, num_waiting: int) -> int:
        """Return the number of pieces with unread rows. `num_waiting`: number of unread rows."""
        num_read = self._num_fed - num_waiting
        while self._ends and self._ends[0] <= num_read:
            self._ends.popleft()
        return len(self._ends)
