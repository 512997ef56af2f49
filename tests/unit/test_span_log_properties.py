"""The log of sent passes under random sequences of passes, compared with the rows that a span
worker needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fleet.spans.protocol.messages import SpanExtent, SpanPass
from fleet.spans.protocol.pass_log import SpanLog

ROW_BYTES = 8
UNLIMITED = 10**9
Rows = dict[int, list[bytes]]
"""Rows of each page table, in the order of their positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnExtent:
    """A random extent of a page table: `num_rows` rows, beginning `num_replaced` rows before the
    table's end.
    """

    table: int
    num_replaced: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPass:
    """A random pass. `lag`: number of preceding passes that are not completed when it is sent.
    `closes`: page table that it closes.
    """

    extents: Sequence[DrawnExtent]
    lag: int
    closes: int | None


def drawn_extents() -> st.SearchStrategy[list[DrawnExtent]]:
    extents = st.builds(
        DrawnExtent,
        table=st.integers(1, 4),
        num_replaced=st.integers(0, 4),
        num_rows=st.integers(1, 4),
    )
    return st.lists(extents, max_size=3, unique_by=lambda each: each.table)


PASSES = st.lists(
    st.builds(
        DrawnPass,
        extents=drawn_extents(),
        lag=st.integers(0, 4),
        closes=st.none() | st.integers(1, 4),
    ),
    max_size=12,
)


@dataclass(slots=True)
class PassSender:
    """Sends random passes to a log, and records the rows that a span worker has after every pass.
    All sent rows have different bytes.
    """

    log: SpanLog
    states: list[Rows] = field(default_factory=lambda: [{}])
    completed: int = 0
    num_closed: int = 0
    num_sent: int = 0

    def send(self, drawn: DrawnPass) -> None:
        number = len(self.states)
        self.completed = max(self.completed, number - 1 - drawn.lag)
        # A table that was closed is never used again: a later one has another number.
        rows = {table: list(given) for table, given in self.states[-1].items()}
        closed = tuple(table for table in rows if table % 10 == drawn.closes)
        for table in closed:
            del rows[table]
        self.num_closed += bool(closed)
        extents, sent = self._written(drawn, rows)
        work = SpanPass(
            generation=1, number=number, extents=extents, closed=closed, completed=self.completed
        )
        self.log.add(work, memoryview(sent))
        self.states.append(rows)

    def _written(self, drawn: DrawnPass, rows: Rows) -> tuple[tuple[SpanExtent, ...], bytes]:
        extents: list[SpanExtent] = []
        sent = b""
        for each in drawn.extents:
            table = next(
                (one for one in rows if one % 10 == each.table), 10 * self.num_closed + each.table
            )
            own = rows.setdefault(table, [])
            start = max(0, len(own) - each.num_replaced)
            own[start:] = [
                (self.num_sent + added).to_bytes(ROW_BYTES, "big") for added in range(each.num_rows)
            ]
            self.num_sent += each.num_rows
            written = b"".join(own[start:])
            extents.append(
                SpanExtent(
                    table=table,
                    pages=(),
                    start=start,
                    stop=len(own),
                    before=0,
                    keys=written,
                    draws=False,
                )
            )
            sent += written
        return tuple(extents), sent


def sender_of(passes: Sequence[DrawnPass], keep_bytes: int = UNLIMITED) -> PassSender:
    sender = PassSender(SpanLog(keep_bytes))
    for drawn in passes:
        sender.send(drawn)
    return sender


def feed(
    rows: Rows, again: Sequence[tuple[SpanPass, list[memoryview]]], open_tables: Sequence[int]
) -> Rows:
    """Return the rows that a span worker has after the passes in `again` are sent again. `rows`:
    its rows before.
    """
    fed = {table: list(given) for table, given in rows.items() if table in open_tables}
    for work, parts in again:
        for extent, part in zip(work.extents, parts, strict=True):
            assert bytes(part) == extent.keys, "keys and rows belong together"
            own = fed.setdefault(extent.table, [])
            assert extent.start <= len(own), "rows are missing before those of the pass"
            own[extent.start :] = [
                bytes(part[at : at + ROW_BYTES]) for at in range(0, len(part), ROW_BYTES)
            ]
    return fed


@given(PASSES)
def test_worker_behind_by_any_number_of_passes_has_all_rows_once_it_is_fed(
    passes: list[DrawnPass],
) -> None:
    sender = sender_of(passes)
    last = sender.states[-1]
    for number, had in enumerate(sender.states):
        assert feed(had, sender.log.after(number), list(last)) == last


@given(PASSES)
def test_only_later_passes_are_sent_again_and_each_that_is_not_completed(
    passes: list[DrawnPass],
) -> None:
    sender = sender_of(passes)
    for number in range(len(sender.states)):
        again = [work.number for work, _ in sender.log.after(number)]
        running = range(max(number, sender.completed) + 1, len(sender.states))
        assert again == sorted(set(again)) and all(each > number for each in again)
        assert set(running) <= set(again)
    assert sender.log.after(len(passes)) == []


@given(PASSES)
def test_kept_rows_are_those_of_open_tables_and_counted_to_the_byte(
    passes: list[DrawnPass],
) -> None:
    sender = sender_of(passes)
    assert sender.log.num_bytes == sum(
        len(part) for _, parts in sender.log.after(0) for part in parts
    )
    assert sender.log.num_tables == len(sender.states[-1])
    sender.log.complete(len(passes))
    sender.log.add(SpanPass(generation=1, number=len(passes) + 1, extents=()), memoryview(b""))
    open_tables = list(sender.states[-1])
    sender.log.keep_only(open_tables[:1])
    assert sender.log.num_tables == len(open_tables[:1])
    sender.log.close(open_tables)
    assert (sender.log.num_bytes, sender.log.num_tables) == (0, 0)


@given(PASSES, st.integers(0, 20 * ROW_BYTES))
def test_beyond_the_limit_only_rows_of_running_passes_are_kept(
    passes: list[DrawnPass], keep_bytes: int
) -> None:
    unlimited, limited = sender_of(passes), sender_of(passes, keep_bytes)
    log, completed = limited.log, limited.completed
    assert log.after(completed) == unlimited.log.after(completed), (
        "a worker that has the completed passes lacks nothing"
    )
    assert log.num_bytes == sum(len(part) for _, parts in log.after(0) for part in parts)
    assert log.num_bytes <= keep_bytes or all(work.number > completed for work, _ in log.after(0))
