"""The log of sent passes (for replay to a replaced span worker): order, replaced rows, limits."""

from collections.abc import Sequence

from fleet.spans.protocol.messages import SpanExtent, SpanPass
from fleet.spans.protocol.pass_log import SpanLog

WIDTH = 4


def extent(table: int, start: int, stop: int, pages: Sequence[int] = ()) -> SpanExtent:
    keys = b"".join(bytes([table, row]) + bytes(6) for row in range(start, stop))
    return SpanExtent(
        table=table, pages=tuple(pages), start=start, stop=stop, before=0, keys=keys, draws=True
    )


def add(
    log: SpanLog,
    number: int,
    *extents: SpanExtent,
    completed: int = 0,
    closed: tuple[int, ...] = (),
) -> None:
    rows = b"".join(
        bytes([each.table, row]) * (WIDTH // 2)
        for each in extents
        for row in range(each.start, each.stop)
    )
    log.add(
        SpanPass(generation=1, number=number, extents=extents, completed=completed, closed=closed),
        memoryview(rows),
    )


def contents(log: SpanLog, number: int = 0) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Check the rows and keys of the kept passes; return the passes as (number, [(table, start,
    stop)]).
    """
    found: list[tuple[int, list[tuple[int, int, int]]]] = []
    for work, parts in log.after(number):
        for each, rows in zip(work.extents, parts, strict=True):
            positions = range(each.start, each.stop)
            assert bytes(rows) == b"".join(
                bytes([each.table, row]) * (WIDTH // 2) for row in positions
            )
            assert each.keys == extent(each.table, each.start, each.stop).keys
        found.append((work.number, [(each.table, each.start, each.stop) for each in work.extents]))
    return found


def test_pass_is_sent_again_with_its_rows_in_the_same_order() -> None:
    log = SpanLog(1000)
    add(log, 1, extent(1, 0, 3), extent(2, 0, 2))
    add(log, 2, extent(2, 2, 3), extent(1, 3, 6), extent(3, 0, 2))
    assert contents(log) == [(1, [(1, 0, 3), (2, 0, 2)]), (2, [(2, 2, 3), (1, 3, 6), (3, 0, 2)])]
    assert contents(log, 1) == [(2, [(2, 2, 3), (1, 3, 6), (3, 0, 2)])]


def test_closed_tables_are_dropped_and_running_passes_remain_without_them() -> None:
    log = SpanLog(1000)
    add(log, 1, extent(1, 0, 3), extent(2, 0, 2))
    add(log, 2, extent(1, 3, 4), completed=1, closed=(2,))
    assert contents(log) == [(1, [(1, 0, 3)]), (2, [(1, 3, 4)])]
    log.keep_only(())
    assert contents(log) == [(2, [])] and (log.num_bytes, log.num_tables) == (0, 0)
    log.complete(2)
    assert contents(log) == []


def test_rows_that_are_computed_again_replace_completed_ones() -> None:
    log = SpanLog(1000)
    add(log, 1, extent(1, 0, 5), extent(2, 0, 5))
    add(log, 2, extent(1, 5, 9))
    add(log, 3, extent(1, 1, 2), completed=2)
    assert contents(log) == [(1, [(1, 0, 1), (2, 0, 5)]), (3, [(1, 1, 2)])], (
        "the row that is left alone comes first, as in a pass"
    )
    assert log.num_bytes == 7 * WIDTH


def test_rows_of_running_passes_are_not_replaced() -> None:
    log = SpanLog(1000)
    add(log, 1, extent(1, 0, 5))
    add(log, 2, extent(1, 0, 5))
    assert contents(log) == [(1, [(1, 0, 5)]), (2, [(1, 0, 5)])]


def test_each_extent_gets_the_pages_that_its_table_has_up_to_it() -> None:
    log = SpanLog(1000)
    add(log, 1, extent(1, 0, 20, (4, 5)))
    add(log, 2, extent(1, 20, 21, (4, 5)), completed=1)
    add(log, 3, extent(1, 12, 40, (4, 7, 8)), completed=2)
    assert [each.pages for work, _ in log.after(0) for each in work.extents] == [(4, 7), (4, 7, 8)]


def test_beyond_its_limit_a_log_drops_the_rows_of_completed_passes() -> None:
    log = SpanLog(6 * WIDTH)
    add(log, 1, extent(1, 0, 3))
    add(log, 2, extent(1, 3, 6), completed=1)
    assert log.num_bytes == 6 * WIDTH
    add(log, 3, extent(1, 6, 7), completed=1)
    assert contents(log) == [(2, [(1, 3, 6)]), (3, [(1, 6, 7)])] and log.num_bytes == 4 * WIDTH
