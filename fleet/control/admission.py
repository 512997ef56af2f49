"""Admission of requests at a gateway, and the errors of refused requests. Holds no stream."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import cast

from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import answer_of, run_async
from fleet.control.membership import Membership, Run
from fleet.control.redis_status import RedisStatus
from fleet.core.errors import AlreadySubmitted, FleetError, NoWorker, Overloaded, RedisUnreachable
from fleet.core.ids import RequestId, WorkerId

log = logging.getLogger("fleet.control.client")

REFUSAL_PAUSE_S = 10.0

MAX_RETRY_AFTER_S = 60
"""Largest `Retry-After` in seconds: OpenAI's older SDKs ignore a longer time."""


def refusal_of(answer: Sequence[str], max_requests: int) -> FleetError:
    """Return the error for a refusal by the script `submit` or `admission`. `answer`: the script's
    answer, which is not "ok". `max_requests`: the fleet's limit of live requests.
    """
    match answer:
        case ["no_worker", retry_us, *roles]:
            retry_s = min(max(math.ceil(int(retry_us) / 1e6), 1), MAX_RETRY_AFTER_S)
            message = (
                f"no worker serves the role {', '.join(roles)}; start one with `fleet "
                f"worker {roles[0]}` or resume one"
            )
            return NoWorker(f"{message}, then try again in {retry_s} s", retry_after_s=retry_s)
        case ["full", *_]:
            return Overloaded(
                f"{max_requests} requests are running or waiting already; try again shortly"
            )
        case ["exists", *_]:
            return AlreadySubmitted("a request of this id was submitted before; resume it")
        case _:
            return RedisUnreachable(f"the request was not admitted ({answer[0]}); try again")


class RequestAdmission:
    """Admission of requests at one gateway: runs the scripts `submit` and `admission`, and raises
    the errors of refused requests.

    Refusals for lack of a worker are logged once per `REFUSAL_PAUSE_S`, so that many requests do
    not fill the log.
    """

    def __init__(
        self,
        client: Redis,
        config: FleetConfig,
        membership: Membership,
        status: RedisStatus,
    ) -> None:
        self._redis = client
        self._config = config
        self._membership = membership
        self._status = status
        self._run_id = ""
        self._unlogged_until_s = 0.0

    async def start(self) -> None:
        """Record the id of the Redis process, by which a later restart of Redis is recognised.
        Raises: redis's errors.
        """
        self._run_id, _ = await self._server()

    async def admit(
        self, request: RequestId, call: Callable[[WorkerId], scripts.Call], run: Run | None = None
    ) -> tuple[WorkerId, list[str]]:
        """Run the script `submit` or `admission` as `Membership.call` does; return the gateway's id
        and the answer. Raises: NoWorker, Overloaded, AlreadySubmitted, RedisUnreachable, and the
        errors of `run`.
        """
        self._status.check_memory()
        gateway, answer = await self._membership.call(call, unlisted="stale", run=run)
        if answer[0] == "no_worker" and await self._assume_served():
            gateway, answer = await self._membership.call(call, unlisted="stale", run=run)
        if answer[0] != "ok":
            error = refusal_of(answer, self._config.limits.max_requests)
            if isinstance(error, NoWorker):
                self._log(request, error)
            raise error
        return gateway, answer

    async def _assume_served(self) -> bool:
        """Treat every role as served at Redis's start, if Redis restarted recently: the workers'
        registrations may have been lost.

        Return True if Redis restarted since this gateway joined.
        """
        run_id, up_s = await answer_of(self._server())
        if run_id == self._run_id or up_s > self._config.lease.no_worker_timeout_s:
            return False
        seconds, _ = await answer_of(self._redis.time())
        roles = [role.name for role in self._config.roles()]
        call = scripts.assume_served((seconds - up_s) * 1_000_000, roles)
        await answer_of(run_async(self._redis, call))
        return True

    async def _server(self) -> tuple[str, int]:
        """Return the run id of the Redis process and its uptime in seconds."""
        info = cast("dict[str, str | int]", await self._redis.info("server"))
        return str(info["run_id"]), int(info["uptime_in_seconds"])

    def _log(self, request: RequestId, error: NoWorker) -> None:
        if time.monotonic() < self._unlogged_until_s:
            return
        self._unlogged_until_s = time.monotonic() + REFUSAL_PAUSE_S
        log.warning(
            "request %s is refused: %s; more such refusals at this gateway within %.0f s are "
            "not logged",
            request,
            error.message,
            REFUSAL_PAUSE_S,
            extra={"request_id": request},
        )
