"""Log of the steps that a process has sent to the next process of a route, from which they are sent
again when that process is replaced.

Knows no connection and no tensor library.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from fleet.spans.protocol.messages import SpanExtent, SpanPass


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of one request in one logged step, with the bytes that were sent.

    `number`: number of the step. `place`: index of the extent in the step. `num_pages`: pages that
    the table had at that step.
    """

    number: int
    place: int
    extent: SpanExtent
    num_pages: int
    rows: memoryview

    def cut(self, stop: int) -> "KeptRows":
        """Return a copy without the rows from position `stop` on, and with `draws` False."""
        extent, num_rows = self.extent, self.extent.stop - self.extent.start
        left = stop - extent.start
        cut = msgspec.structs.replace(extent, stop=stop, keys=extent.keys[: 8 * left], draws=False)
        return replace(
            self, extent=cut, rows=memoryview(bytes(self.rows[: len(self.rows) // num_rows * left]))
        )


class KeptTable:
    """The logged rows of one page table, without rows that later steps replaced. Pages are stored
    once for all rows, as of the latest step.
    """

    def __init__(self) -> None:
        self._kept: list[KeptRows] = []
        self._pages: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(len(one.rows) for one in self._kept)

    def add(self, added: KeptRows, completed: int) -> int:
        """Add the rows of a step, which replace rows of completed steps from the same position on;
        return the bytes of the replaced rows.
        """
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
        """Drop the rows of steps up to number `completed`; return True if any rows are left."""
        self._kept = [one for one in self._kept if one.number > completed]
        return bool(self._kept)

    def after(self, number: int) -> list[KeptRows]:
        """Return the rows of steps after `number`, with their pages."""
        return [
            replace(
                one, extent=msgspec.structs.replace(one.extent, pages=self._pages[: one.num_pages])
            )
            for one in self._kept
            if one.number > number
        ]


class SpanLog:
    """Steps that may have to be sent again: steps that are not completed, and all rows of open
    tables.

    `keep_bytes`: size of the log beyond which rows of completed steps are dropped. A replaced
    worker that lacks dropped rows reports this, and the anchor computes their requests again from
    the first row.
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
        """Record a step that is sent, with its rows, which must not change later. Drops the tables
        that the step closes, and all rows of completed steps if the log exceeds `keep_bytes`.
        """
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
        """Drop the rows of closed page tables."""
        for table in tables:
            self.num_bytes -= self._tables.pop(table, KeptTable()).num_bytes

    def keep_only(self, tables: Iterable[int]) -> None:
        """Drop the rows of all page tables except `tables`."""
        self.close(set(self._tables) - set(tables))

    def complete(self, number: int) -> None:
        """Record that every process has computed the steps up to `number`. The steps' rows are kept
        until their tables are closed, or the log exceeds `keep_bytes`.
        """
        for old in [old for old in self._passes if old <= number]:
            del self._passes[old]
        self._completed = max(self._completed, number)

    def _drop_completed(self) -> None:
        """Drop the rows of all completed steps, to free memory."""
        self._tables = {
            number: table for number, table in self._tables.items() if table.drop(self._completed)
        }
        self.num_bytes = sum(table.num_bytes for table in self._tables.values())

    def after(self, number: int) -> list[tuple[SpanPass, list[memoryview]]]:
        """Return the steps after `number` in order, each with its rows, for a process that lacks
        them.
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
