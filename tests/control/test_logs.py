"""The log of all processes: lines have labels, logging never blocks, and dropped lines are
counted.
"""

import asyncio
import logging
import logging.config
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from fleet.config import load_config
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect_for_a_call
from fleet.control.log_stream import MAX_WAITING, LogShipper, shipping
from fleet.core.errors import BadInput, RedisUnreachable
from fleet.core.ids import new_request_id
from fleet.core.log_labels import Labels
from fleet.telemetry.views import LogLine, LogQuery
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
