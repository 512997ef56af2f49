"""Requests held by a gateway: submitted, resumed, reattached after a lapsed lease, aborted. Their chunks arrive by notices."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import redis.asyncio
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.admission import NoWorkerLog, refusal_of
from fleet.control.connect import answer_of, run_async, text, texts
from fleet.control.membership import Membership
from fleet.control.notices import AnyNotice, ChunkNotice, EndNotice
from fleet.control.outage import is_away
from fleet.control.redis_status import RedisStatus
from fleet.control.stream import ClientStream
from fleet.core.errors import FleetError, GatewayStopping, NoWorker, RedisUnreachable
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, WorkerId
from fleet.core.request import RequestSpec, decode_request

log = logging.getLogger(__name__)


class GatewayRequests:
    """Requests whose client edges this gateway consumes. Any public method may raise RedisUnreachable."""

    def __init__(self, client: redis.asyncio.Redis, config: FleetConfig, membership: Membership, status: RedisStatus) -> None:
        self._redis, self._config, self._membership, self._status = client, config, membership, status
        self._grace_us = int(config.lease.no_worker_timeout_s * 1e6)
        self._streams: dict[RequestId, ClientStream] = {}
        self._draining: dict[RequestId, asyncio.Task[None]] = {}
        """Tasks that read the answers of requests without a client."""
        self._strays: set[RequestId] = set()
        """Requests that Redis may list as this gateway's although none of its streams reads them."""
        self._refusals = NoWorkerLog()
        self._run_id = ""
        membership.rejoined = self.reattach

    async def start(self) -> None:
        """Raises: redis's errors."""
        self._run_id, _ = await self._server()

    async def stop(self) -> None:
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_held(self) -> int:
        return len(self._streams)

    async def submit(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        """Admit a request and hold its client edges.

        Requests wait for a role without a worker if one is starting, or was lost less than `lease.no_worker_timeout_s` ago.

        Raises: NoWorker naming the role, Overloaded when the queue bound is reached, RedisUnreachable.
        """
        stream = ClientStream(spec, blob, self._config, self._redis)
        self._hold(stream)
        stream.on_lost = lambda: self._resubmit(stream)
        try:
            gateway, answer = await self._admit(spec.id, lambda me: self._submission(spec, blob, me, checked=True))
        except FleetError as error:
            self._streams.pop(spec.id, None)
            if isinstance(error, RedisUnreachable):
                # The script may have run although its answer was lost, and a request without a reader never ends.
                self._strays.add(spec.id)
            raise
        stream.held_by(gateway, Epoch(int(answer[1])))
        return stream

    async def submit_without_client(self, spec: RequestSpec, blob: bytes | None) -> None:
        """Submit a request and drain its answer until a client resumes it. Raises: as `submit`."""
        self._drain(await self.submit(spec, blob))

    async def check_admission(self, request: RequestId, outputs: tuple[EdgeName, ...]) -> int:
        """Return the number of further requests that `submit` would admit now, this one included. Raises: as `submit`."""
        bound, roles = self._config.limits.max_requests, self._roles_of(outputs)

        def admission(me: WorkerId) -> scripts.Call:
            return scripts.admission(request, bound=bound, gateway=me, roles=roles, grace_us=self._grace_us)

        _, answer = await self._admit(request, admission)
        return int(answer[1])

    async def resume(self, request: RequestId) -> tuple[RequestSpec, ClientStream] | None:
        """Take over the client edges of a request from the gateway that held them, to read from the first chunk on.

        Returns None if the request is unknown. One that has ended can be read while its client edges are retained.
        Raises: RedisUnreachable; NotFound if the request is retained and its client edges are not.
        """
        raw = await answer_of(self._redis.hget(keys.request(request), "spec"))
        if raw is None:
            return None
        spec = decode_request(cast(bytes, raw))
        draining = self._draining.pop(request, None)
        if draining is not None:
            draining.cancel()
        stream = ClientStream(spec, None, self._config, self._redis)
        self._hold(stream)
        try:
            gateway, answer = await self._membership.call(lambda me: scripts.attach(request, me), unlisted="unlisted")
            if answer[0] == "ok":
                stream.held_by(gateway, Epoch(int(answer[1])))
            elif answer[0] != "ended":
                raise RedisUnreachable(f"the request could not be taken over from its gateway ({answer[0]}); try again")
            await answer_of(stream.catch_up())
            stream.raise_if_gone()
        except FleetError:
            self._streams.pop(request, None)
            raise
        return spec, stream

    async def abort(self, request: RequestId) -> bool:
        """End any request of the fleet. Return True if it was live."""
        call = scripts.abort(request, scripts.API_RIGHT, "cancelled through the API", self._config.retention_s)
        return text(await answer_of(run_async(self._redis, call))) == "ok"

    def detach_all(self) -> None:
        """End every stream with GatewayStopping; the requests continue, and wait for another gateway after `FleetClient.stop`."""
        for stream in list(self._streams.values()):
            stream.fail(GatewayStopping("this gateway stops; another continues the answer (Last-Event-ID)"))

    def deliver(self, notice: AnyNotice | None) -> None:
        """Pass a notice of the inbox to the stream of its request."""
        match notice:
            case ChunkNotice(chunk=chunk):
                stream = self._streams.get(chunk.request)
                if stream is not None:
                    stream.put(chunk)
            case EndNotice(request=request):
                stream = self._streams.get(request)
                if stream is not None:
                    stream.ended(notice)
            case _:
                return

    async def catch_up(self) -> None:
        """Read the edge logs of the streams that received no chunk since the last call, in case a notice was lost.

        Raises: redis-py's errors while Redis is away.
        """
        for stream in [stream for stream in self._streams.values() if not stream.moved()]:
            try:
                await stream.catch_up()
            except RedisError as error:
                if is_away(error):
                    raise
                log.warning("the log of %s could not be read: %s", stream.request_id, error)

    async def reconcile(self) -> None:
        """Reattach or abort requests after a lapsed lease or a Redis restart. Raises: redis-py's errors; call it again."""
        await self.reattach()
        await self._find_strays()
        await self._abort_strays()

    async def reattach(self) -> None:
        """Attach each stream of a former id to the present one. Raises: redis-py's errors; the next renewal tries again."""
        async with self._membership.lock:
            for stream in list(self._streams.values()):
                if stream.is_detached(self._membership.id):
                    await self._reattach(stream)

    async def _reattach(self, stream: ClientStream) -> None:
        if not await self._redis.exists(keys.request(stream.request_id)):
            await self._resubmit(stream)
            return
        gateway = self._membership.id
        call = scripts.attach(stream.request_id, gateway, instead_of=stream.gateway)
        answer = texts(await run_async(self._redis, call))
        if answer[0] in ("ok", "ended"):
            stream.held_by(gateway, Epoch(int(answer[1])) if answer[0] == "ok" else stream.epoch)
        elif answer[0] != "unlisted":
            stream.fail(RedisUnreachable(f"the gateway lost the request ({answer[0]}); try again"))

    async def _resubmit(self, stream: ClientStream) -> None:
        """Submit again a request that Redis lost, unless its client has received chunks that may now differ.

        With invariant numerics they cannot differ, and the stream leaves out the rows that the client has.
        """
        if not (stream.is_undelivered or self._config.numerics == "invariant"):
            stream.fail(RedisUnreachable("Redis lost the request in mid-answer; try again"))
            return
        log.warning("Redis lost request %s; it is submitted again", stream.request_id)
        gateway = self._membership.id
        call = self._submission(stream.spec, stream.blob, gateway)
        answer = texts(await run_async(self._redis, call))
        if answer[0] == "ok":
            stream.held_by(gateway, Epoch(int(answer[1])))
        elif answer[0] != "exists":
            stream.fail(RedisUnreachable(f"Redis lost the request, and did not accept it again ({answer[0]}); try again"))

    async def _find_strays(self) -> None:
        """Find requests that Redis lists as this gateway's although they were delivered: it may have lost its last writes."""
        before = set(self._streams)  # One of them may be delivered to its end during the call.
        for pair in cast("set[bytes]", await self._redis.smembers(keys.worker_tasks(self._membership.id))):
            request = RequestId(text(pair).partition("|")[0])
            if request not in self._streams and request not in before:
                self._strays.add(request)

    async def _abort_strays(self) -> None:
        for request in list(self._strays):
            reason = "no gateway reads its answer: its submission was not acknowledged, or Redis lost writes"
            await run_async(self._redis, scripts.abort(request, scripts.API_RIGHT, reason, self._config.retention_s))
            self._strays.discard(request)

    def _hold(self, stream: ClientStream) -> None:
        """Deliver the request's notices to this stream, in place of an earlier one."""
        request = stream.request_id

        def forget() -> None:
            if self._streams.get(request) is stream:
                del self._streams[request]

        stream.on_close = forget
        stream.on_unread = lambda: self._drain(stream, self._config.web.send_timeout_s)
        self._streams[request] = stream

    def _drain(self, stream: ClientStream, patience_s: float | None = None) -> None:
        """Acknowledge the rest of an answer without a client, so that its workers do not wait, unless a newer stream reads it."""
        request = stream.request_id
        if self._streams.get(request) is not stream:
            return
        draining = asyncio.create_task(stream.discard_rest(patience_s))
        self._draining[request] = draining
        draining.add_done_callback(lambda _: self._draining.pop(request, None))

    def _submission(self, spec: RequestSpec, blob: bytes | None, gateway: WorkerId, *, checked: bool = False) -> scripts.Call:
        """`checked`: refuse the request if one of its roles neither has nor expects a worker; not if it was admitted before."""
        graph = self._config.graph_declaration()
        stages = graph.stages_for(spec.outputs)
        return scripts.submit(
            spec,
            blob,
            bound=self._config.limits.max_requests,
            stages=stages,
            roles=self._roles_of(spec.outputs) if checked else (),
            grace_us=self._grace_us,
            edges=[edge.name for edge in graph.edges_for(spec.outputs)],
            gateway=gateway,
            audio=[edge for edge in spec.outputs if graph.media[edge] != "text"],
        )

    def _roles_of(self, outputs: tuple[EdgeName, ...]) -> list[RoleName]:
        stages = self._config.graph_declaration().stages_for(outputs)
        return [role.name for role in self._config.roles() if role.stage in stages]

    async def _admit(self, request: RequestId, call: Callable[[WorkerId], scripts.Call]) -> tuple[WorkerId, list[str]]:
        """Run `submit` or `admission`, as `Membership.call`. Raises: NoWorker, Overloaded, RedisUnreachable."""
        self._status.check_memory()
        gateway, answer = await self._membership.call(call, unlisted="stale")
        if answer[0] == "no_worker" and await self._assume_served():
            gateway, answer = await self._membership.call(call, unlisted="stale")
        if answer[0] != "ok":
            error = refusal_of(answer, self._config.limits.max_requests)
            if isinstance(error, NoWorker):
                self._refusals.note(request, error)
            raise error
        return gateway, answer

    async def _assume_served(self) -> bool:
        """If Redis restarted recently, treat every role as served until then: it may have lost the workers' registrations.

        Return True if it restarted since this gateway joined.
        """
        run_id, up_s = await answer_of(self._server())
        if run_id == self._run_id or up_s > self._config.lease.no_worker_timeout_s:
            return False
        seconds, _ = await answer_of(self._redis.time())
        roles = [role.name for role in self._config.roles()]
        await answer_of(run_async(self._redis, scripts.assume_served((seconds - up_s) * 1_000_000, roles)))
        return True

    async def _server(self) -> tuple[str, int]:
        """Return the run id of the Redis process and its uptime in seconds."""
        info = cast("dict[str, str | int]", await self._redis.info("server"))
        return str(info["run_id"]), int(info["uptime_in_seconds"])
