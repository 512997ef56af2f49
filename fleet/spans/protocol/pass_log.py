"""Log of the passes that a process has sent to the next one of a route: a replaced neighbour is fed
from it, and computes again.

Knows no connection and no tensor library.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from fleet.spans.protocol.messages import SpanExtent, SpanPass


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of one table in a step: its extent at index `place`. `num_pages`: pages that the table
    had then.
    """

    number: int
    place: int
    extent: SpanExtent
    num_pages: int
    rows: memoryview

    def cut(self, stop: int) -> "KeptRows":
        """Return the rows before position `stop`, after which nothing is drawn."""
        extent, num_rows = self.extent, self.extent.stop - self.extent.start
        left = stop - extent.start
        cut = msgspec.structs.replace(extent, stop=stop, keys=extent.keys[: 8 * left], draws=False)
        return replace(
            self, extent=cut, rows=memoryview(bytes(self.rows[: len(self.rows) // num_rows * left]))
        )


class KeptTable:
    """The rows of one table, without rows that later ones replaced. The table's pages are kept
    once, as of its last rows.
    """

    def __init__(self) -> None:
        self._kept: list[KeptRows] = []
        self._pages: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(len(one.rows) for one in self._kept)

    def add(self, added: KeptRows, completed: int) -> int:
        """Add rows; return the number of bytes of completed passes that they replace."""
        num_replaced, extent = 0, added.extent
        while (
            self._kept
            and self._kept[-1].extent.stop > extent.start
            and self._kept[-1].number <= completed
        ):
            last = self._kept.pop()
            num_replaced += len(last.rows)
            if last.extent.start < extent.start:
                self._kept.append(last.cut(extent.start))
                num_replaced -= len(self._kept[-1].rows)
        # One tuple for all rows: each of them would have that of its own pass, longer and longer.
        self._pages = extent.pages + self._pages[len(extent.pages) :]
        self._kept.append(replace(added, extent=msgspec.structs.replace(extent, pages=())))
        return num_replaced

    def drop(self, completed: int) -> bool:
        """Drop the rows of passes up to a number; return True if any are left."""
        self._kept = [one for one in self._kept if one.number > completed]
        return bool(self._kept)

    def after(self, number: int) -> list[KeptRows]:
        """Return the rows of later passes, with their pages."""
        return [
            replace(
                one, extent=msgspec.structs.replace(one.extent, pages=self._pages[: one.num_pages])
            )
            for one in self._kept
            if one.number > number
        ]


class SpanLog:
    """Passes that may have to be sent again: those that are not completed, and the rows of open
    tables.

    `keep_bytes`: beyond it, rows of completed passes are dropped. A worker that lacks them reports
    it, and their requests are computed again from the first row.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._passes: dict[int, SpanPass] = {}
        self._tables: dict[int, KeptTable] = {}
        self._completed = 0
        self.num_bytes = 0

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def add(self, work: SpanPass, rows: memoryview) -> None:
        """Record a pass that is sent, with its rows, which must not change."""
        self.close(work.closed)
        self.complete(work.completed)
        if work.number > self._completed:
            self._passes[work.number] = msgspec.structs.replace(work, extents=())
        num_rows = sum(extent.stop - extent.start for extent in work.extents)
        width = len(rows) // max(1, num_rows)
        first = 0
        for place, extent in enumerate(work.extents):
            size = width * (extent.stop - extent.start)
            # A copy, unless the pass is all of it: the memory of a pass is free only once no part
            # of it is kept.
            part = rows if size == len(rows) else memoryview(bytes(rows[first : first + size]))
            table = self._tables.setdefault(extent.table, KeptTable())
            kept = KeptRows(work.number, place, extent, len(extent.pages), part)
            self.num_bytes += size - table.add(kept, self._completed)
            first += size
        if self.num_bytes > self._keep_bytes:
            self._drop_completed()

    def close(self, tables: Iterable[int]) -> None:
        """Drop the rows of tables that are closed."""
        for table in tables:
            self.num_bytes -= self._tables.pop(table, KeptTable()).num_bytes

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
        self._tables = {
            number: table for number, table in self._tables.items() if table.drop(self._completed)
        }
        self.num_bytes = sum(table.num_bytes for table in self._tables.values())

    def after(self, number: int) -> list[tuple[SpanPass, list[memoryview]]]:
        """Return the passes to send to a process that has computed those up to `number`, with their
        rows, in order.
        """
        of_pass: dict[int, list[KeptRows]] = defaultdict(list)
        for table in self._tables.values():
            for one in table.after(number):
                of_pass[one.number].append(one)
        found: list[tuple[SpanPass, list[memoryview]]] = []
        for each in sorted({*of_pass, *(open_ for open_ in self._passes if open_ > number)}):
            # Single rows come first in a pass, here also those that are left of more.
            kept = sorted(
                of_pass[each], key=lambda one: (one.extent.stop - one.extent.start > 1, one.place)
            )
            work = self._passes.get(each) or SpanPass(
                generation=0, number=each, extents=(), completed=self._completed
            )
            extents = tuple(one.extent for one in kept)
            found.append(
                (msgspec.structs.replace(work, extents=extents), [one.rows for one in kept])
            )
        return found
