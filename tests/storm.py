"""Abort storm: many requests, each aborted at a random Redis write of a worker (from a seeded
generator), after which no state may be left.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import cast

import redis

from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, run, text
from fleet.core.errors import Aborted
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec
from fleet.worker.loop.loop import WorkerLoop
from fleet.worker.process.redis_link import TurnResult
from tests.harness import ThreadFleet, held
from tests.support import NEVER_EXPIRES, wait_until

STORM_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Countdown:
    """Number of worker turns with writes about a request until the request is aborted. `before`:
    whether the abort precedes the last of these writes.
    """

    turns: int
    before: bool


@dataclass(slots=True)
class Storm:
    """Aborts requests between the Redis writes of workers, by intercepting their calls. `met`:
    number of aborts that struck a call, by script.
    """

    fleet: ThreadFleet
    rng: random.Random
    met: Counter[str] = field(default_factory=Counter[str])
    _due: dict[RequestId, _Countdown] = field(default_factory=dict[RequestId, _Countdown])
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        for loop in self.fleet.loops:
            self._intercept(loop)

    def draw(self, request: RequestId, most_turns: int) -> None:
        self._due[request] = _Countdown(self.rng.randrange(1, most_turns), self.rng.random() < 0.5)

    def _intercept(self, loop: WorkerLoop) -> None:
        send, client = loop.link.exchange, connect(self.fleet.url)
        self.fleet.clients.append(client)

        def exchange(
            calls: Sequence[scripts.Call],
            *,
            free_slots: int,
            block_ms: int,
            ask_live: Sequence[RequestId] = (),
        ) -> TurnResult:
            before, after = self._struck(calls)
            self._abort(client, before)
            result = send(calls, free_slots=free_slots, block_ms=block_ms, ask_live=ask_live)
            self._abort(client, after)
            return result

        loop.link.exchange = exchange

    def _struck(self, calls: Sequence[scripts.Call]) -> tuple[list[RequestId], list[RequestId]]:
        """Count down for the requests that `calls` are about. Return the requests to abort before
        these calls are sent, and the requests to abort afterwards.
        """
        struck: tuple[list[RequestId], list[RequestId]] = ([], [])
        with self._lock:
            named = {
                arg for call in calls for arg in call.args if isinstance(arg, str)
            } & self._due.keys()
            for request in cast("set[RequestId]", named):
                self._due[request].turns -= 1
                if self._due[request].turns == 0:
                    struck[not self._due.pop(request).before].append(request)
                    self.met.update(call.script for call in calls if request in call.args)
        return struck

    def _abort(self, client: redis.Redis, requests: Sequence[RequestId]) -> None:
        for request in requests:
            run(client, scripts.abort(request, scripts.API_RIGHT, "the storm"))

    async def run(
        self,
        client: FleetClient,
        requests: Sequence[tuple[RequestSpec, bytes | None]],
        *,
        concurrency: int,
        most_turns: int,
    ) -> int:
        """Send every request, `concurrency` at a time, and abort each within `most_turns` worker
        turns; return the number of requests that ended as aborted.
        """
        gate = asyncio.Semaphore(concurrency)

        async def one(spec: RequestSpec, blob: bytes | None) -> bool:
            async with gate, asyncio.timeout(STORM_TIMEOUT_S):
                self.draw(spec.id, most_turns)
                return await _is_aborted(client, spec, blob)

        return sum(await asyncio.gather(*(one(spec, blob) for spec, blob in requests)))


async def _is_aborted(client: FleetClient, spec: RequestSpec, blob: bytes | None) -> bool:
    """Run a request, and return True if it was aborted before its end."""
    try:
        async for _ in await client.requests.submit(spec, blob):
            pass
    except Aborted:
        return True
    return False


def assert_nothing_left(fleet: ThreadFleet) -> None:
    """Wait until workers and Redis hold nothing for any request."""
    client = fleet.clients[0]
    living = [loop for loop in fleet.loops if loop.worker not in fleet.killed]
    before = [loop.maintenance.vitals for loop in living]

    def left() -> list[str]:
        # Counts from before this call do not count: each loop must report once more.
        stale = [
            f"{loop.role} has not reported"
            for loop, old in zip(living, before, strict=True)
            if loop.maintenance.vitals is old
        ]
        return stale or _held_by_workers(fleet, living) or left_in_redis(client)

    try:
        wait_until(lambda: not left(), "nothing to be left", timeout_s=20.0)
    except AssertionError as error:
        raise AssertionError(f"{error}; left: {left()}") from None
    for loop in fleet.loops:
        stats = loop.engine.stats()
        assert (stats.running, stats.kv.pages_used, loop.transfer.used_slots()) == (0, 0, 0), (
            loop.role
        )


def _held_by_workers(fleet: ThreadFleet, living: Sequence[WorkerLoop]) -> list[str]:
    """Return what the workers' loops last reported to hold, since only their own threads may use
    engine and transfer.
    """
    busy = [f"{loop.role} counts {loop.maintenance.vitals}" for loop in living if _counts(loop)]
    offering = [
        f"{loop.role} offers {loop.parts.offers.open_requests()}"
        for loop in living
        if loop.parts.offers.open_requests()
    ]
    pulling = [f"{loop.role} pulls" for loop in living if loop.parts.receiver.pulling()]
    return [*busy, *offering, *pulling, *(f"a worker holds {request}" for request in held(fleet))]


def _counts(loop: WorkerLoop) -> int:
    return sum(
        int(loop.maintenance.vitals[name]) for name in ("running", "pages_used", "slots_used")
    )


def left_in_redis(client: redis.Redis) -> list[str]:
    """List keys of live requests, unread entries, and keys without an expiry."""
    found = sorted(map(text, cast("list[bytes]", list(client.scan_iter()))))
    rows = {key: keys.row_of(key) for key in found}
    left = [f"{key}, which has no row in the key table" for key, row in rows.items() if row is None]
    for key, row in rows.items():
        if row is None:
            continue
        if row.life == "live" or row.pattern in ("live", "worker:{id}:tasks"):
            left.append(f"{key}, which lives as long as a request")
        elif row.pattern.startswith(("inbox:", "role:")) and client.xlen(key):
            left.append(f"{client.xlen(key)} entries in {key}")
    retained = [key for key, row in rows.items() if row is not None and row.life == "retention"]
    pipe = client.pipeline(transaction=False)
    for key in retained:
        pipe.ttl(key)
    lives = zip(retained, pipe.execute(), strict=True)
    return left + [f"{key}, which never expires" for key, ttl in lives if ttl == NEVER_EXPIRES]
