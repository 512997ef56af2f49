"""Admission of requests at a gateway, and the errors of refused requests. Holds no stream."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, cast

from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.config.api_keys import KeyLimits
from fleet.control import scripts
from fleet.control.connect import answer_of, run_async
from fleet.control.membership import Membership, Run
from fleet.control.redis_status import RedisStatus
from fleet.control.retry_times import MAX_RETRY_AFTER_S
from fleet.control.waiting import Applicant, WaitingRequests
from fleet.core.errors import (
    AlreadySubmitted,
    FleetError,
    GatewayStopping,
    KeyAtLimit,
    NoWorker,
    Overloaded,
    RedisUnreachable,
    quoted,
)
from fleet.core.ids import RequestId, RoleName, WorkerId

log = logging.getLogger("fleet.control.client")

REFUSAL_PAUSE_S = 10.0
REFUSALS = (Overloaded, NoWorker, GatewayStopping, RedisUnreachable)
"""Errors that refuse a valid request, for example because a limit is reached."""


class MakeCall(Protocol):
    """Function that builds a call of the script `submit` or `admission` for a gateway's id.
    `waits`: what the request waits for if it is refused.
    """

    def __call__(self, me: WorkerId, *, waits: scripts.Waits) -> scripts.Call: ...


def full_cause(max_requests: int) -> str:
    return f"{max_requests} requests are running or waiting already"


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
            return Overloaded(f"{full_cause(max_requests)}; try again shortly")
        case ["exists", *_]:
            return AlreadySubmitted("a request of this id was submitted before; resume it")
        case _:
            return RedisUnreachable(f"the request was not admitted ({answer[0]}); try again")


_CAUSES = {
    "max_requests": "{} requests of the API key {} are running",
    "max_sessions": "{} voice sessions of the API key {} are open or queued",
    "audio_s_per_day": "{} seconds of audio of the API key {} were used today (UTC)",
}
"""Reason of a refusal by the name of the limit that an API key has reached. Placeholders: the value
of the limit, and the name of the key.
"""


def key_refusal(answer: Sequence[str], key: str, limits: KeyLimits) -> KeyAtLimit:
    """Return the error for the answer "key_limit" of a script, which names the limit of `limits`
    that the API key has reached, and the seconds until it may go on.
    """
    _, limit, retry_s = answer
    bound = {name: getattr(limits, name) for name in _CAUSES}[limit]
    cause = _CAUSES[limit].format(bound, quoted(key))
    return KeyAtLimit(
        f"{limit}: {cause}, which is its limit; try again in {retry_s} s",
        param=limit,
        retry_after_s=int(retry_s),
    )


class RequestAdmission:
    """Admission of requests at one gateway: runs the scripts `submit` and `admission`, and raises
    the errors of refused requests. `waiting`: the requests that wait for a place. `on_refusal`:
    function that is called with each of these errors.

    Refusals of one kind are logged once per `REFUSAL_PAUSE_S`, so that many requests do not fill
    the log.
    """

    def __init__(
        self,
        client: Redis,
        config: FleetConfig,
        membership: Membership,
        status: RedisStatus,
        on_refusal: Callable[[FleetError, RequestId], None],
    ) -> None:
        self._redis = client
        self._config = config
        self._membership = membership
        self._status = status
        self._on_refusal = on_refusal
        self.waiting = WaitingRequests(client, config, membership)
        self._run_id = ""
        self._unlogged_until_s: dict[str, float] = {}

    async def start(self) -> None:
        """Record the id of the Redis process, by which a later restart of Redis is recognised.
        Raises: redis's errors.
        """
        self._run_id, _ = await self._server()

    async def admit(
        self,
        request: RequestId,
        roles: Sequence[RoleName],
        call: MakeCall,
        run: Run | None = None,
        applicant: Applicant | None = None,
    ) -> tuple[WorkerId, list[str]]:
        """Run the script `submit` or `admission` as `Membership.call` does, again and again while
        `applicant` waits for its turn; return the gateway's id and the answer. If `applicant` is
        None, the request does not wait.

        Raises: NoWorker, Overloaded, KeyAtLimit, AlreadySubmitted, RedisUnreachable, and the errors
        of `run`.
        """
        with self._counting_refusals(request):
            if applicant is None:
                gateway, answer = await self._call(partial(call, waits=""), run)
            else:
                applicant.roles = tuple(roles)
                try:
                    gateway, answer = await self._call_in_turn(request, applicant, call, run)
                finally:
                    self.waiting.leave(applicant)
            if answer[0] == "key_limit":
                assert applicant is not None, "only a client's requests count towards a key"
                raise key_refusal(answer, applicant.key, applicant.limits)
            if answer[0] != "ok":
                error = refusal_of(answer, self._config.limits.max_requests)
                if isinstance(error, NoWorker):
                    self._log(request, error)
                raise error
            return gateway, answer

    @contextmanager
    def _counting_refusals(self, request: RequestId) -> Iterator[None]:
        """Report a refusal that is raised in the block to `on_refusal`."""
        try:
            yield
        except REFUSALS as error:
            if not isinstance(error, AlreadySubmitted):  # it was admitted before
                self._on_refusal(error, request)
            raise

    async def _call_in_turn(
        self,
        request: RequestId,
        applicant: Applicant,
        call: MakeCall,
        run: Run | None,
    ) -> tuple[WorkerId, list[str]]:
        """Run a script when it is the turn of `applicant`, until the answer is not "full"."""
        may_wait = self._config.limits.max_wait_s > 0
        while may_wait:
            if not self.waiting.is_behind(applicant):
                gateway, answer = await self._call(partial(call, waits="soon"), run)
                if answer[0] != "full":
                    return gateway, answer
            may_wait = await self.waiting.wait(applicant)
        # It may not wait, or no longer, and takes a place that is free for its client.
        gateway, answer = await self._call(partial(call, waits="turn"), run)
        if answer[0] == "full":
            raise await self._refusal(request, full_cause(self._config.limits.max_requests))
        return gateway, answer

    async def wait_for_turn(self, request: RequestId, applicant: Applicant, cause: str) -> None:
        """Wait until it may be the turn of `applicant`, which stays queued when this call returns.
        Raises: Overloaded with `cause`, if the queue has no room or the time limit has passed;
        GatewayStopping; the error of `Applicant.refuse`.
        """
        with self._counting_refusals(request):
            if not await self.waiting.wait(applicant):
                raise await self._refusal(request, cause)

    async def _refusal(self, request: RequestId, cause: str) -> Overloaded:
        error = await self.waiting.refusal(cause)
        self._log(request, error)
        return error

    async def _call(
        self, call: Callable[[WorkerId], scripts.Call], run: Run | None
    ) -> tuple[WorkerId, list[str]]:
        self._status.check_memory()
        gateway, answer = await self._membership.call(call, unlisted="stale", run=run)
        if answer[0] == "no_worker" and await self._assume_served():
            gateway, answer = await self._membership.call(call, unlisted="stale", run=run)
        return gateway, answer

    async def _assume_served(self) -> bool:
        """Treat every role as served at Redis's start, if Redis restarted recently: the workers'
        registrations may have been lost.

        Return False, without a write, if Redis has not restarted since this gateway joined, or
        restarted more than `lease.no_worker_timeout_s` ago.
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

    def _log(self, request: RequestId, error: FleetError) -> None:
        if time.monotonic() < self._unlogged_until_s.get(error.code, 0.0):
            return
        self._unlogged_until_s[error.code] = time.monotonic() + REFUSAL_PAUSE_S
        log.warning(
            "request %s is refused: %s; more such refusals at this gateway within %.0f s are "
            "not logged",
            request,
            error.message,
            REFUSAL_PAUSE_S,
            extra={"request_id": request},
        )
