"""One edge to the client as its gateway follows it: chunks in whatever order in, each row out once, in order. Pure; no Redis.

The log of an edge may come back without its tail, and what it lost is made again, cut otherwise: the log is then followed anew
from its first chunk, and rows that were told are left out.
"""

from fleet.core.chunk import Chunk
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import EdgeName, Epoch, StageName


class ClientEdge:
    """`next` counts the chunks of the log that came in order, `epoch` is that of the last of them; `consumed` counts those that
    were taken, `acked` those that Redis knows of as taken, `told` the rows that the client got. `forked`: the log is not the one
    that was followed so far. `checked`: the epoch of the producing task at which that was last looked at.

    Invariants: rows are told in order, each once, and nothing after the final chunk.
    """

    def __init__(self, name: EdgeName, source: StageName, stride: int) -> None:
        self.name, self.source, self.stride = name, source, stride
        self.next = self.consumed = self.acked = self.told = 0
        self.epoch = self.checked = Epoch(0)
        self.ended = self.diverged = False
        self._num_rows = 0
        self._early: dict[int, Chunk] = {}

    def wants(self, chunk: Chunk) -> bool:
        return not self.ended and chunk.index >= self.next and chunk.index not in self._early

    def put(self, chunk: Chunk) -> list[Chunk]:
        """Takes a chunk, and returns those that are next by it. Repeats are dropped; that Redis lost what they repeat shows by
        the epoch of whoever makes it again.
        """
        if self.diverged or self.ended or chunk.index < self.next:
            return []
        self._early.setdefault(chunk.index, chunk)
        ready: list[Chunk] = []
        while (following := self._early.pop(self.next, None)) is not None:
            if following.first_row != self._num_rows:
                self.diverged = True
                break
            self.next += 1
            self.epoch, self._num_rows = following.epoch, self._num_rows + following.num_rows
            ready.append(following)
        return ready

    def drop_early(self) -> None:
        """What came before its turn."""
        self._early.clear()

    def begin_again(self) -> None:
        """Follow the log from its first chunk. What was put and not yet told is in it, or will be made again."""
        self.next = self.consumed = self.acked = self._num_rows = 0
        self.epoch, self.diverged = Epoch(0), False
        self.drop_early()

    def tell(self, chunk: Chunk) -> Chunk | None:
        """Counts the next chunk as taken; what of it was not told before: None where it was all of it.

        Raises: RedisUnreachable if the edge ends before the last row that was told.
        """
        num_again = self.told - chunk.first_row
        if num_again > chunk.num_rows and chunk.final:
            raise RedisUnreachable("Redis lost what was told, and made again it came out shorter; try again")
        untold = chunk if not num_again else None
        if num_again and (num_again < chunk.num_rows or chunk.final):
            untold = chunk.without(num_again)
        self.consumed, self.ended = chunk.index + 1, chunk.final
        self.told = max(self.told, chunk.first_row + chunk.num_rows)
        return untold
