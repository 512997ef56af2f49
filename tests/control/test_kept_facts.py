"""Facts of the fleet outlast any number of other lines in its log, and each kind of line is
bounded.
"""

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect_for_a_call, run
from fleet.control.line_budget import MAX_KINDS, MAX_PER_KIND, PERIOD_S, LineBudget
from fleet.control.log_stream import MAX_STORED, LogShipper, add_line
from fleet.core.log_labels import Labels
from fleet.telemetry.views import LogLine, LogQuery
from tests.control_plane import WORKER, Control
from tests.support import stream_entries

CHATTER = 24_000


def chat(client: redis.Redis, count: int) -> None:
    """Add lines as another process would; trimming is exact, so that counts are."""
    pipe = client.pipeline(transaction=False)
    for number in range(count):
        pipe.xadd(keys.LOGS, {"m": f"chatter {number}"}, maxlen=MAX_STORED, approximate=False)
    pipe.execute()


def kill_worker(client: redis.Redis) -> None:
    run(client, scripts.register(WORKER, "lm", 60_000_000, {}))
    run(client, scripts.fence_worker("", WORKER, died=True, cause="SIGKILL"))


async def read_all(client: FleetClient, query: LogQuery, limit: int) -> list[LogLine]:
    """Read every page, the newest line first."""
    seen, before = list[LogLine](), ""
    while True:
        page = await client.telemetry.logs(query, before=before, limit=limit)
        seen += page.lines
        if not (before := page.next):
            return seen


def order_of(line: LogLine) -> tuple[int, ...]:
    return tuple(map(int, line.id.split("-")))


async def test_facts_are_found_behind_more_lines_than_the_log_keeps(
    client: redis.Redis, gateway_client: FleetClient
) -> None:
    chat(client, 5)
    kill_worker(client)
    add_line(client, Labels("conductor"), "conductor c died", level="warning")
    chat(client, CHATTER)
    for query, expected in (
        (LogQuery(text="died"), 2),
        (LogQuery(worker=WORKER), 1),
        (LogQuery(), MAX_STORED + 2),
    ):
        assert len(await read_all(gateway_client, query, limit=7000)) == expected
    lines = await read_all(gateway_client, LogQuery(), limit=1000)
    assert [line.message.partition(" ")[0] for line in lines[-3:]] == [
        "chatter",
        "conductor",
        "worker",
    ]
    assert [order_of(line) for line in lines] == sorted(
        (order_of(line) for line in lines), reverse=True
    )


async def test_page_that_ends_at_the_last_line_has_no_next_one(
    client: redis.Redis, gateway_client: FleetClient
) -> None:
    kill_worker(client)
    chat(client, 3)
    assert not (await gateway_client.telemetry.logs(LogQuery(), limit=4)).next, (
        "a fact is not listed twice"
    )
    assert (await gateway_client.telemetry.logs(LogQuery(), limit=3)).next


async def test_reader_that_was_away_is_sent_the_facts_that_it_missed(
    client: redis.Redis, gateway_client: FleetClient
) -> None:
    chat(client, 1)
    seen = (await gateway_client.telemetry.logs(LogQuery())).newest
    kill_worker(client)
    chat(client, CHATTER)
    follower = gateway_client.telemetry.follow_logs(LogQuery(), after=seen)
    first, second = [await asyncio.wait_for(anext(follower), 10) for _ in range(2)]
    assert (
        f"worker {WORKER} died" in first.message
        and second.message == f"chatter {CHATTER - MAX_STORED}"
    )
    await follower.aclose()


async def test_refusals_that_clients_cause_are_not_kept_as_facts(control: Control) -> None:
    control.submit("req-over", bound=1)
    assert len(stream_entries(control.client, keys.LOGS)) == 1
    assert not control.client.exists(keys.FACTS)


def test_fact_is_kept_although_the_log_was_deleted_and_the_clock_set_back(control: Control) -> None:
    control.client.xadd(keys.FACTS, {"m": "from the future"}, id="99999999999999-0")
    control.leave(died=True, cause="SIGKILL")
    assert len(stream_entries(control.client, keys.FACTS)) == 2


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    own_logger = logging.getLogger("fleet.test_kept_facts")
    own_logger.setLevel(logging.INFO)
    own_logger.propagate = False
    yield own_logger
    own_logger.handlers.clear()


def test_lines_of_one_kind_are_bounded_and_counted(
    redis_url: str, client: redis.Redis, logger: logging.Logger
) -> None:
    handler = LogShipper(connect_for_a_call(redis_url, 0.5), Labels("web"))
    logger.addHandler(handler)
    for number in range(CHATTER):
        logger.warning("request %d fails", number)
    logger.warning("another kind")
    handler.end()
    messages = [fields[b"m"].decode() for _, fields in stream_entries(client, keys.LOGS)]
    assert messages[:MAX_PER_KIND] == [f"request {number} fails" for number in range(MAX_PER_KIND)]
    other, counted = messages[MAX_PER_KIND:]
    assert other == "another kind"
    assert f"{CHATTER - MAX_PER_KIND} more lines" in counted and counted.endswith(
        f"request {CHATTER - 1} fails"
    )


def record(text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("fleet.web", logging.WARNING, "", 0, text, values, None)


def test_line_budget_is_per_kind_and_period() -> None:
    budget = LineBudget()
    for second in (0.0, PERIOD_S, 2 * PERIOD_S):
        admitted = [
            budget.admits(record("a %d", number), second) for number in range(2 * MAX_PER_KIND)
        ]
        assert admitted == [True] * MAX_PER_KIND + [False] * MAX_PER_KIND
        assert not budget.take_summaries(second + PERIOD_S / 2)
        (summary,) = budget.take_summaries(second + PERIOD_S)
        assert (
            re.match(rf"{MAX_PER_KIND} more lines", summary.getMessage())
            and summary.levelname == "WARNING"
        )
    assert not budget.take_summaries(3 * PERIOD_S), "a quiet kind needs no line"


def test_line_budget_of_unbounded_kinds_is_bounded() -> None:
    budget = LineBudget()
    admitted = sum(budget.admits(record(f"line {number}"), 0.0) for number in range(10 * MAX_KINDS))
    assert admitted == MAX_KINDS + MAX_PER_KIND and len(budget) <= MAX_KINDS + 1
    budget.take_summaries(PERIOD_S)
    assert budget.admits(record("line 0"), PERIOD_S)
