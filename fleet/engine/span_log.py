"""Log of what a process has sent to the next one of a route: a replaced neighbour is fed from it, and alone computes again.

Knows no connection and no tensor library.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from fleet.core.span_messages import SpanExtent, SpanPass


@dataclass(frozen=True, slots=True)
class KeptRows:
    """One table's rows of a pass."""

    number: int
    extent: SpanExtent
    rows: memoryview


class SpanLog:
    """Passes that may have to be sent again: those that are not completed, and the rows of open tables.

    `keep_bytes`: beyond it, rows of completed passes are dropped; a process that needs them reports that they are missing, and their
    requests are computed again from the first row.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._passes: dict[int, SpanPass] = {}
        self._tables: dict[int, list[KeptRows]] = {}
        self._completed = 0
        self.num_bytes = 0

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def add(self, work: SpanPass, rows: memoryview) -> None:
        """Record a pass that is sent, with its rows, which must not change."""
        self.close(work.closed)
        self.complete(work.completed)
        self._passes[work.number] = msgspec.structs.replace(work, extents=())
        num_rows = sum(extent.stop - extent.start for extent in work.extents)
        width = len(rows) // max(1, num_rows)
        first = 0
        for extent in work.extents:
            size = width * (extent.stop - extent.start)
            # A copy, unless the pass is all of it: the memory of a pass is free only once no part of it is kept.
            part = rows if size == len(rows) else memoryview(bytes(rows[first : first + size]))
            self._tables.setdefault(extent.table, []).append(KeptRows(work.number, extent, part))
            self.num_bytes += size
            first += size
        if self.num_bytes > self._keep_bytes:
            self._drop_completed()

    def close(self, tables: Iterable[int]) -> None:
        """Drop the rows of tables that are closed."""
        for table in tables:
            self.num_bytes -= sum(len(kept.rows) for kept in self._tables.pop(table, ()))

    def keep_only(self, tables: Iterable[int]) -> None:
        """Drop the rows of all tables but these."""
        self.close(set(self._tables) - set(tables))

    def complete(self, number: int) -> None:
        """Record that every process has computed the passes up to a number."""
        for old in [old for old in self._passes if old <= number]:
            del self._passes[old]
        self._completed = max(self._completed, number)

    def _drop_completed(self) -> None:
        """Drop the rows of completed passes."""
        for table, kept in list(self._tables.items()):
            left = [one for one in kept if one.number > self._completed]
            self.num_bytes -= sum(len(one.rows) for one in kept) - sum(len(one.rows) for one in left)
            if left:
                self._tables[table] = left
            else:
                del self._tables[table]

    def after(self, number: int) -> list[tuple[SpanPass, list[memoryview]]]:
        """Return the passes to send to a process that has computed those up to `number`, with their rows, in order."""
        of_pass: dict[int, list[KeptRows]] = defaultdict(list)
        for kept in self._tables.values():
            for one in kept:
                if one.number > number:
                    of_pass[one.number].append(one)
        found: list[tuple[SpanPass, list[memoryview]]] = []
        for each in sorted({*of_pass, *(open_ for open_ in self._passes if open_ > number)}):
            kept = of_pass[each]
            work = self._passes.get(each) or SpanPass(generation=0, number=each, extents=(), completed=self._completed)
            extents = tuple(one.extent for one in kept)
            found.append((msgspec.structs.replace(work, extents=extents), [one.rows for one in kept]))
        return found
