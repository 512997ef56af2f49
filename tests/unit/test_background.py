"""Background tasks: an unexpected exception is logged with its stack, and endless work is restarted
after it. Also thread pools.
"""

import asyncio
import logging
import threading

import pytest

from fleet.process import background
from fleet.process.background import full_thread_pool


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def test_endless_work_starts_again_after_an_exception_which_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts, ended = 0, asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise ValueError("not expected")
        ended.set()
        await wait_forever()

    task = background.keep_running(work, "the reader", pause_s=0.0)
    await ended.wait()
    task.cancel()
    assert starts == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the reader failed; it starts again in 0 s"
    ] * 2
    assert all(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


async def test_endless_work_that_returns_or_is_cancelled_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        return

    await background.keep_running(work, "the reader")
    task = background.keep_running(wait_forever, "the waiter")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not caplog.records


async def test_failure_of_background_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("not expected")

    task = background.start(work(), "the writer")
    await asyncio.wait({task})
    (record,) = caplog.records
    assert record.getMessage() == "the writer failed" and record.exc_info


async def test_cancelled_work_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    task = background.start(wait_forever(), "the writer")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert not caplog.records


def test_full_thread_pool_has_all_its_threads_before_the_first_call() -> None:
    with full_thread_pool(5, "pool-of-this-test") as pool:
        names = {
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("pool-of-this-test")
        }
        assert len(names) == 5
        assert {
            pool.submit(lambda: threading.current_thread().name).result() for _ in range(20)
        } <= names
