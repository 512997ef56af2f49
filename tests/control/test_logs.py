"""The common log of all processes: logging never blocks, the number of lines of each kind is
bounded, and lines about the fleet outlast any number of other lines.
"""

import asyncio
import logging
import logging.config
import re
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect_for_a_call, run
from fleet.control.line_budget import MAX_KINDS, MAX_PER_KIND, PERIOD_S, LineBudget
from fleet.control.log_stream import MAX_STORED, MAX_WAITING, LogShipper, add_line, shipping
from fleet.core.errors import BadInput, RedisUnreachable
from fleet.core.ids import new_request_id
from fleet.core.log_labels import Labels
from fleet.telemetry.views import LogLine, LogQuery
from tests.control_plane import WORKER, Control
from tests.support import RedisProcess, stream_entries, wait_until

LABELS = Labels("worker", "lm@test:1:a", "lm")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger used by this test only."""
    own_logger = logging.getLogger("fleet.test_logs")
    own_logger.setLevel(logging.INFO)
    own_logger.propagate = False
    yield own_logger
    own_logger.handlers.clear()


def shipper(url: str, labels: Labels = LABELS) -> LogShipper:
    return LogShipper(connect_for_a_call(url, 0.5), labels)


async def test_log_line_has_labels_request_and_traceback(
    redis_url: str, gateway_client: FleetClient, logger: logging.Logger
) -> None:
    handler, request = shipper(redis_url), new_request_id()
    logger.addHandler(handler)
    logger.info("request %s fails in lm: no", request)
    logger.warning("this is of %s", "an epoch", extra={"epoch": 7, "request_id": "req-9"})
    try:
        raise ValueError("broken <b>")
    except ValueError:
        logger.exception("an exception")
    logger.debug("below the level")
    handler.end()
    page = await gateway_client.telemetry.logs(LogQuery())
    exception, warned, failed = page.lines
    assert (failed.request, failed.worker, failed.stage, failed.process, failed.level) == (
        request,
        "lm@test:1:a",
        "lm",
        "worker",
        "info",
    )
    assert (warned.epoch, warned.request, warned.message) == (7, "req-9", "this is of an epoch")
    assert (
        exception.level == "error"
        and exception.trace.endswith("ValueError: broken <b>")
        and not failed.trace
    )
    assert page.newest == exception.id and page.next == "" and page.dropped == 0


async def test_log_lines_are_searched_and_paged(
    redis_url: str, gateway_client: FleetClient, logger: logging.Logger
) -> None:
    handler = shipper(redis_url)
    logger.addHandler(handler)
    for number in range(30):
        (logger.warning if number % 3 == 0 else logger.info)("Line %d", number)
    handler.end()
    seen: list[LogLine] = []
    before = ""
    while True:
        page = await gateway_client.telemetry.logs(LogQuery(text="lInE"), before=before, limit=7)
        seen += page.lines
        if not (before := page.next):
            break
    assert [line.message for line in seen] == [f"Line {number}" for number in range(29, -1, -1)]
    warned = (await gateway_client.telemetry.logs(LogQuery(level="warning"), limit=4)).lines
    assert [line.message for line in warned] == ["Line 27", "Line 24", "Line 21", "Line 18"]
    assert not (await gateway_client.telemetry.logs(LogQuery(worker="lm@other:1:a"))).lines
    assert (
        len((await gateway_client.telemetry.logs(LogQuery(process="worker", request=""))).lines)
        == 30
    )
    for query, before in (
        (LogQuery(level="loud"), ""),
        (LogQuery(), "x"),
        (LogQuery(), "1-" + "9" * 30),
    ):
        with pytest.raises(BadInput):
            await gateway_client.telemetry.logs(query, before=before)


async def test_log_is_followed_from_any_line(
    redis_url: str, gateway_client: FleetClient, logger: logging.Logger
) -> None:
    handler = shipper(redis_url)
    logger.addHandler(handler)
    for number in range(5):
        logger.info("early %d", number)
    handler.end()
    third = (await gateway_client.telemetry.logs(LogQuery())).lines[2]
    follower = gateway_client.telemetry.follow_logs(LogQuery(text="l"), after=third.id)
    assert [(await anext(follower)).message for _ in range(2)] == ["early 3", "early 4"]
    next_line = asyncio.ensure_future(anext(follower))
    logger.handlers.clear()
    second = shipper(redis_url)
    logger.addHandler(second)
    logger.info("nothing to find")
    logger.info("late")
    assert (await asyncio.wait_for(next_line, 10)).message == "late"
    await asyncio.to_thread(second.end)
    await follower.aclose()


def test_logging_never_blocks_and_dropped_lines_are_counted(
    own_redis: RedisProcess, logger: logging.Logger
) -> None:
    handler = shipper(own_redis.url)
    own_redis.kill()
    logger.addHandler(handler)
    began = time.thread_time()
    for number in range(MAX_WAITING + 500):
        # of as many kinds that none reaches its bound
        logger.info(f"line {number % 50} of %d", number)
    assert time.thread_time() - began < 5, "logging without Redis used the caller's CPU time"
    own_redis.start()
    with redis.Redis.from_url(own_redis.url) as client:
        wait_until(lambda: client.xlen(keys.LOGS) >= MAX_WAITING, "the waiting lines to arrive")
        wait_until(
            lambda: int(client.get(keys.LOGS_DROPPED) or 0) == 500,
            "the dropped lines to be counted",
        )  # pyright: ignore[reportArgumentType]
        logger.info("after all")
        handler.end()
        assert stream_entries(client, keys.LOGS)[-1][1][b"m"] == b"after all"


def test_logging_continues_after_reconfiguration(redis_url: str, client: redis.Redis) -> None:
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.INFO)
    with shipping(redis_url, LABELS):
        logging.config.dictConfig(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "loggers": {"other": {"level": "INFO"}},
            }
        )
        logging.getLogger("fleet.web").info("still here")
    root.setLevel(level)
    assert [fields[b"m"] for _, fields in stream_entries(client, keys.LOGS)] == [b"still here"]


def test_concurrent_threads_lose_no_log_lines(
    redis_url: str, client: redis.Redis, logger: logging.Logger
) -> None:
    handler = shipper(redis_url)
    logger.addHandler(handler)
    threads = [
        threading.Thread(target=lambda n=n: [logger.info(f"%d {i}", n) for i in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handler.end()
    messages = {fields[b"m"] for _, fields in stream_entries(client, keys.LOGS)}
    assert len(messages) == 800


def test_process_ships_log_lines_until_it_ends(redis_url: str, client: redis.Redis) -> None:
    root, level = logging.getLogger(), logging.getLogger().level
    before = list(root.handlers)
    root.setLevel(logging.INFO)
    with shipping(redis_url, Labels("web")) as labels:
        labels.worker = "gateway@test:1:a"
        logging.getLogger("fleet.web").info("hello")
    root.setLevel(level)
    assert root.handlers == before
    ((_, fields),) = stream_entries(client, keys.LOGS)
    assert (fields[b"p"], fields[b"w"], fields[b"m"], fields[b"n"]) == (
        b"web",
        b"gateway@test:1:a",
        b"hello",
        b"fleet.web",
    )


async def test_reads_without_redis_raise_redis_unreachable(own_redis: RedisProcess) -> None:
    client_of_fleet = await FleetClient.connect(own_redis.url, load_config(None, ("engine=fake",)))
    own_redis.kill()
    for call in (
        client_of_fleet.telemetry.logs(LogQuery()),
        client_of_fleet.telemetry.workers(),
        client_of_fleet.jobs.list_jobs(),
        client_of_fleet.telemetry.series(),
    ):
        with pytest.raises(RedisUnreachable):
            await call
    with pytest.raises(RedisUnreachable):
        await anext(client_of_fleet.telemetry.follow_events())
    await client_of_fleet.stop()


async def test_log_line_of_another_version_is_shown_in_part(
    client: redis.Redis, gateway_client: FleetClient
) -> None:
    client.xadd(keys.LOGS, {"m": b"\xff\xfe", "l": "shout"})
    (line,) = (await gateway_client.telemetry.logs(LogQuery())).lines
    assert (line.level, line.message, line.at_us) == ("info", "\ufffd\ufffd", 0)


CHATTER = 24_000


def chat(client: redis.Redis, count: int) -> None:
    """Add `count` log lines as another process would. Trimming is exact here, so that the test can
    count lines.
    """
    pipe = client.pipeline(transaction=False)
    for number in range(count):
        pipe.xadd(keys.LOGS, {"m": f"chatter {number}"}, maxlen=MAX_STORED, approximate=False)
    pipe.execute()


def kill_worker(client: redis.Redis) -> None:
    run(client, scripts.register(WORKER, "lm", 60_000_000, {}))
    run(client, scripts.fence_worker("", WORKER, died=True, cause="SIGKILL"))


async def read_all(client: FleetClient, query: LogQuery, limit: int) -> list[LogLine]:
    """Read every page of the log, the newest line first."""
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


def test_lines_of_one_kind_are_bounded_and_counted(
    redis_url: str, client: redis.Redis, logger: logging.Logger
) -> None:
    handler = shipper(redis_url)
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
