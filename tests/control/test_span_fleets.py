"""Fleets with span workers: a span worker outside any route replaces a lost one without loading,
and aborted requests leave nothing behind.
"""

import asyncio
import random
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect, text
from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId
from fleet.spans.host.process import SpanWorkerProcess
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import BuiltSpan
from fleet.stages.options import BuildOptions
from fleet.stages.text import build_span
from fleet.worker.main import WorkerProcess
from tests.capabilities import remote_of
from tests.harness import gateway_at, wait_none_live
from tests.span_threads import FORWARD, REVERSE, SpanThreads, span_threads
from tests.storm import left_in_redis
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

NUM_AT_A_TIME, NUM_TOKENS = 24, 24
EXPIRING = "limits.max_cached_conversations=0"


async def abort_at_random(client: FleetClient, fleet: SpanThreads, chance: random.Random) -> bool:
    """Send a request, and abort it after a random number of chunks or never; return True if it was
    aborted.
    """
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
        with connect(redis_url) as control:
            wait_until(lambda: not left_in_redis(control), "Redis to hold nothing")


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


WAIT_S = 20.0
AUTOMATIC = "stages.lm.spans={anchor: '0:0', workers: auto, replicas: 2, standby: 1}"


def span_of(control: redis.Redis, worker: WorkerId | None) -> str:
    assert worker is not None
    return text(control.hget(keys.worker(worker), "span"))


def anchor_of(control: redis.Redis, worker: WorkerId | None) -> str:
    assert worker is not None
    return text(control.hget(keys.worker(worker), "anchor"))


@pytest.mark.parametrize(
    "division", [FORWARD, REVERSE, AUTOMATIC], ids=["forward", "reverse", "automatic"]
)
def test_unused_span_worker_takes_the_place_of_another_without_loading(
    redis_url: str, tmp_path: Path, division: str
) -> None:
    loads: list[str] = []

    def build(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
        loads.append(str(span))
        return build_span(options, span)

    with span_threads(redis_url, tmp_path, division) as fleet, connect(redis_url) as control:
        fleet.add_anchor()
        workers = [fleet.add_span_worker(build) for _ in range(3)]
        fleet.wait_route()
        (unused,) = wait_unused(fleet, control, [worker.last_id for worker in workers])
        wait_until(lambda: span_of(control, unused), "a span of the unused worker")
        span = span_of(control, unused)
        assert sorted(loads) == sorted(
            [
                span,
                *(
                    span_of(control, worker.last_id)
                    for worker in workers
                    if worker.last_id != unused
                ),
            ]
        )
        leaving = next(
            worker
            for worker in workers
            if worker.last_id != unused and span_of(control, worker.last_id) == span
        )
        leaving.stop.set()
        wait_until(lambda: anchor_of(control, unused), "the unused worker to be used")
        fleet.wait_route()
        assert span_of(control, unused) == span and len(loads) == 3


def test_worker_that_cannot_load_its_part_stays_out_of_the_route_and_unclaimed(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        span_threads(redis_url, tmp_path, AUTOMATIC.replace(", standby: 1", "")) as fleet,
        connect(redis_url) as control,
    ):
        anchor = fleet.add_anchor()
        workers = [fleet.add_span_worker() for _ in range(1)]
        fleet.wait_route()
        before = route_of(control, anchor.last_id)
        tried = threading.Event()

        def fail(_options: BuildOptions, _span: LayerSpan) -> BuiltSpan:
            tried.set()
            raise ConfigError("no memory")

        broken = fleet.add_span_worker(fail)
        assert tried.wait(WAIT_S)
        wait_until(lambda: anchor_of(control, broken.last_id) == "", "the worker to be released")
        assert (
            route_of(control, anchor.last_id) == before
            and anchor_of(control, workers[0].last_id) == anchor.last_id
        )
        assert remote_of(anchor.settings.built.engine).accepts_requests()


def route_of(control: redis.Redis, anchor: WorkerId | None) -> str:
    assert anchor is not None
    return text(control.hget(keys.worker(anchor), "route"))


def wait_unused(
    fleet: SpanThreads, control: redis.Redis, workers: list[WorkerId | None]
) -> list[WorkerId]:
    """Wait until two of the workers serve an anchor; return the other workers."""

    def unused() -> list[WorkerId]:
        return [
            worker for worker in workers if worker is not None and not anchor_of(control, worker)
        ]

    wait_until(lambda: len(unused()) == len(workers) - 2, "a route of two span workers")
    return unused()
