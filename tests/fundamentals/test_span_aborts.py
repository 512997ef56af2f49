"""Requests aborted at random moments leave nothing behind: in the anchor, in the span workers and
in Redis.
"""

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from fleet.control.client import FleetClient
from fleet.spans.host.process import SpanWorkerProcess
from fleet.worker.worker_process import WorkerProcess
from tests.fundamentals.test_abort import assert_every_key_expires
from tests.harness import gateway_at, wait_none_live
from tests.span_threads import FORWARD, REVERSE, SpanThreads, span_threads
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(2, "fundamentals with many processes")

NUM_AT_A_TIME, NUM_TOKENS = 24, 24
EXPIRING = "limits.max_cached_conversations=0"


async def abort_at_random(client: FleetClient, fleet: SpanThreads, chance: random.Random) -> bool:
    """Send a request and abort it after some chunks, or never; return True if it was aborted."""
    spec = fleet.spec(
        chance.randrange(8),
        NUM_TOKENS,
        tuple(chance.randrange(5, 300) for _ in range(chance.randrange(1, 90))),
    )
    stream = await client.requests.submit(spec, None)
    num_read = chance.randrange(0, NUM_TOKENS + 4)
    if num_read == 0:
        await stream.abort("the client left")
        return True
    num_chunks = 0
    async for _ in stream:
        num_chunks += 1
        if num_chunks == num_read:
            await stream.abort("the client left")
            return True
    return False


@pytest.mark.parametrize("division", [FORWARD, REVERSE], ids=["forward", "reverse"])
async def test_aborted_requests_leave_nothing_behind(
    redis_url: str, tmp_path: Path, division: str, thorough: bool
) -> None:
    num_requests, chance = (1250 if thorough else 100), random.Random(5)
    with span_threads(
        redis_url, tmp_path, division, EXPIRING, f"limits.max_requests={NUM_AT_A_TIME}"
    ) as fleet:
        anchor = fleet.add_anchor()
        span_workers = [fleet.add_span_worker() for _ in range(2)]
        await asyncio.to_thread(fleet.wait_route)
        async with gateway_at(redis_url, fleet.config) as client:
            limit, num_aborted = asyncio.Semaphore(NUM_AT_A_TIME), 0

            async def one() -> bool:
                async with limit:
                    return await abort_at_random(client, fleet, chance)

            num_aborted = sum(await asyncio.gather(*(one() for _ in range(num_requests))))
            assert num_aborted >= 0.8 * num_requests
            await wait_none_live(client)
        await asyncio.to_thread(
            wait_until, lambda: is_empty(anchor, span_workers), "everything to be free"
        )
        assert_every_key_expires(redis_url)


def is_empty(anchor: WorkerProcess, span_workers: list[SpanWorkerProcess]) -> bool:
    """Return True if no process holds a page, a table, sent rows or a result."""
    engine = cast(Any, anchor.settings.built.engine)
    hosts = [cast(Any, process)._hosting.route for process in span_workers]
    return (
        engine.pool.num_used == 0
        and engine._passes.is_empty
        and not any(
            route.host.num_tables or route.log.num_tables or route.log.num_bytes or route.results
            for route in hosts
        )
    )
