"""Redis calls of a task that is cancelled: the cancellation reaches the task even if the client
library discards it.
"""

import asyncio
from typing import cast

import pytest
import redis.asyncio

from fleet.control import scripts
from fleet.control.connect import run_async
from fleet.core.ids import Epoch, RequestId

CALL = scripts.abort(RequestId("req-1"), Epoch(1), "the client left")


class ReplyWins:
    """A client that returns its reply although its caller is cancelled, as `asyncio.wait_for` may
    do before Python 3.12.
    """

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def execute_command(self, *_: object) -> bytes:
        self.called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return b"ok"
        raise AssertionError("nothing sets the event")


async def test_cancellation_during_a_call_is_not_discarded() -> None:
    client = ReplyWins()
    task = asyncio.create_task(run_async(cast(redis.asyncio.Redis, client), CALL))
    await client.called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_time_out_around_endless_calls_ends_them() -> None:
    client = ReplyWins()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            while True:
                await run_async(cast(redis.asyncio.Redis, client), CALL)


class ReplyClient:
    """A fake Redis client that answers every call."""

    async def execute_command(self, *_: object) -> bytes:
        await asyncio.sleep(0)
        return b"ok"


async def test_task_that_was_cancelled_may_call_while_it_cleans_up() -> None:
    client, begun = ReplyClient(), asyncio.Event()

    async def work() -> object:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await run_async(cast(redis.asyncio.Redis, client), CALL)
        raise AssertionError("nothing sets the event")

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    assert await task == b"ok"
