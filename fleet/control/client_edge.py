"""A gateway's reader of one client edge: accepts chunks in any order, and delivers each row once,
in order. Pure; no Redis.

Redis may lose the tail of an edge's log. The lost rows are recomputed, perhaps divided into other
chunks: the log is then read again from its first chunk, and rows that were already delivered are
left out.
"""

from fleet.config.credits import Credits
from fleet.core.chunk import Chunk
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import EdgeName, Epoch, StageName


class ClientEdge:
    """Reader's position in one client edge. `next`: number of chunks received in order; `epoch`:
    epoch of the last such chunk. `consumed`: number of chunks delivered or skipped; `acked`: number
    of chunks acknowledged in Redis. `credits`: chunks and bytes after which an acknowledgement is
    due. `diverged`: True if the log no longer contains what was read from it. `checked`: epoch of
    the producing task when the log was last checked for divergence. `ended`: True once the final
    chunk was consumed; reset by `begin_again`. `complete`: True once the final chunk was delivered;
    never reset, so that an edge that begins again later delivers nothing and only returns credit.

    Invariants: rows are delivered in order, each once, and none after the final chunk.
    """

    def __init__(self, name: EdgeName, source: StageName, credits: Credits) -> None:
        self.name = name
        self.source = source
        self.next = 0
        self.consumed = 0
        self.acked = 0
        self.rows_delivered = 0
        self.epoch = self.checked = Epoch(0)
        self.ended = False
        self.complete = False
        self.diverged = False
        self._stride, self._stride_bytes = credits.ack_stride, credits.ack_stride_bytes
        self._unacked_bytes = 0
        self._num_rows = 0
        self._early: dict[int, Chunk] = {}

    def wants(self, index: int) -> bool:
        return not self.ended and index >= self.next and index not in self._early

    def put(self, chunk: Chunk) -> list[Chunk]:
        """Add a chunk, in any order; return the chunks that can be delivered next. A chunk of a
        known index is dropped, even if it was recomputed because Redis lost the first copy: the
        producing task then has a new epoch, which reveals the loss.
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
        """Discard the chunks that arrived before their predecessors."""
        self._early.clear()

    def begin_again(self) -> None:
        """Restart at the first chunk of the log. Chunks received but not delivered are in the log,
        or will be recomputed.
        """
        self.next = 0
        self.consumed = 0
        self.acked = 0
        self._num_rows = 0
        self.epoch = Epoch(0)
        self.ended = self.diverged = False
        self.drop_early()

    def is_ack_due(self) -> bool:
        """Return True if the consumed chunks are to be acknowledged now."""
        num_chunks = self.consumed - self.acked
        is_much = self._stride_bytes is not None and self._unacked_bytes >= self._stride_bytes
        return self.ended or num_chunks >= self._stride or (num_chunks > 0 and is_much)

    def begin_ack(self) -> int:
        """Return the number of chunks consumed so far, for an acknowledgement, and reset the count
        of unacknowledged bytes.
        """
        self._unacked_bytes = 0
        return self.consumed

    def consume(self, chunk: Chunk) -> Chunk | None:
        """Count `chunk`, the next in order, as consumed. Return the part of the chunk that is to be
        delivered, without rows that were delivered before; None if there is nothing to deliver.

        Raises: RedisUnreachable if the edge ends before the last row that was delivered.
        """
        new_part = None if self.complete else self._new_part(chunk)
        self.consumed = chunk.index + 1
        self._unacked_bytes += chunk.num_bytes
        self.ended = chunk.final
        self.complete |= chunk.final
        self.rows_delivered = max(self.rows_delivered, chunk.first_row + chunk.num_rows)
        return new_part

    def _new_part(self, chunk: Chunk) -> Chunk | None:
        num_repeated = self.rows_delivered - chunk.first_row
        if num_repeated > chunk.num_rows and chunk.final:
            raise RedisUnreachable(
                "Redis lost a part of the answer, and the recomputed one came out shorter; try "
                "again"
            )
        if not num_repeated:
            return chunk
        if num_repeated < chunk.num_rows or chunk.final:
            return chunk.without(num_repeated)
        return None
