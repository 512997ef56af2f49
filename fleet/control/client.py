"""The gateway's end: submits requests, receives their client edges, returns credit, aborts. Holds a lease like any worker."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self, TypeVar, cast

from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.config.schema import RENEWALS
from fleet.control import keys, scripts, voice
from fleet.control.admission import RefusalLog, refusal_of
from fleet.control.connect import connect_async, pairs, run_async, text
from fleet.control.logins import LoginStore
from fleet.control.notices import AnyNotice, ChunkNotice, EndNotice, parse_notice
from fleet.control.stream import ClientStream
from fleet.control.telemetry.board import Telemetry
from fleet.control.views import RequestView, RoleView, WorkerView, read_request, read_roles, read_workers
from fleet.core.errors import FleetError, GatewayStopping, NoWorker, RedisUnreachable, UnknownWireVersion
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, WorkerId, new_worker_id
from fleet.core.request import RequestSpec, decode_request
from fleet.core.telemetry import SERIES_STEP_S

log = logging.getLogger(__name__)

T = TypeVar("T")

INBOX_BLOCK_MS = 500
INBOX_COUNT = 512
SLOW_POLL_S = 1.0


class FleetClient:
    """One gateway incarnation. `start()` before use, `stop()` after; all on one event loop."""

    def __init__(self, url: str, config: FleetConfig) -> None:
        self._redis, self._reader, self.config = connect_async(url), connect_async(url), config
        self.telemetry = Telemetry(url, self._redis, self._reader, config, self._send_unheard)
        """What people look at and order."""
        self.logins = LoginStore(self._redis)
        self.id: WorkerId = new_worker_id("gateway", socket.gethostname(), os.getpid())
        self._keep = scripts.Retention(request_s=config.retention_s)
        self._streams: dict[RequestId, ClientStream] = {}
        self._jobs: list[asyncio.Task[None]] = []
        self._unheard: dict[RequestId, asyncio.Task[None]] = {}
        self._stopping = False
        self._run_id = ""
        self._refusals = RefusalLog()
        self._strays: set[RequestId] = set()
        self._joining = asyncio.Lock()
        self._rejoins: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, redis_url: str, config: FleetConfig) -> Self:
        """Nothing is sent yet; an unreachable Redis shows at `start()` or at the first call."""
        return cls(redis_url, config)

    async def start(self) -> None:
        """Join as a gateway. Raises: RedisUnreachable after 10 s."""
        for attempt in range(100):
            try:
                await self._register()
                self._run_id, _ = await self._server()
                break
            except RedisError as error:
                if attempt == 99:
                    raise RedisUnreachable(f"no Redis answers ({error}); start one with `fleet redis`") from error
                await asyncio.sleep(0.1)
        jobs = (self._renew(), self._read(), self._poll_slowly(), self._tell())
        self._jobs = [asyncio.create_task(job) for job in jobs]

    def detach_all(self) -> None:
        """End every stream with GatewayStopping; the requests go on, and wait for another gateway once `stop` was called."""
        for stream in list(self._streams.values()):
            stream.fail(GatewayStopping("this gateway stops; another goes on with the answer (Last-Event-ID)"))

    async def stop(self) -> None:
        """Leave: what is still held waits `lease.gateway_timeout_s` for another gateway, and is then abandoned."""
        # The flag as well: a cancellation that meets a read's own time-out can be swallowed inside the Redis client.
        self._stopping = True
        jobs = [*self._jobs, *self._unheard.values(), *self._rejoins]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await self.telemetry.stop()
        if self._jobs:
            with contextlib.suppress(RedisError):
                await run_async(self._redis, scripts.fence_worker("", self.id))
        await self._redis.aclose()
        await self._reader.aclose()

    async def _register(self) -> None:
        fields: dict[str, str | bytes] = {
            "kind": "gateway",
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "capacity": str(self.config.limits.max_requests),
        }
        await run_async(self._redis, scripts.register(self.id, "", self._lease_us(), fields))

    def _lease_us(self) -> int:
        return int(self.config.lease.worker_ttl_s * 1e6)

    async def _renew(self) -> None:
        while not self._stopping:
            await asyncio.sleep(self.config.lease.worker_ttl_s / RENEWALS)
            try:
                call = scripts.renew(self.id, self._lease_us(), {"running": len(self._streams)})
                answer = text(await run_async(self._reader, call))  # not behind a burst of requests
                if answer != "ok":
                    await self._rejoin(self.id)
                await self._take_back_strayed()
                await self._disown_unknown()
                await self._end_strays()
            except RedisError as error:
                log.warning("the lease could not be renewed: %s", error)

    async def _rejoin(self, former: WorkerId) -> None:
        """This incarnation was fenced, or Redis lost it: go on under a new id with what nobody else has taken over.

        Whoever finds out first does it, the others wait.
        """
        async with self._joining:
            if self.id != former:
                return
            log.warning("gateway %s was fenced; joining anew", former)
            self.id = new_worker_id("gateway", socket.gethostname(), os.getpid())
            await self._register()
        await self._take_back_strayed()

    async def _take_back_strayed(self) -> None:
        """Raises: redis's errors; what was not taken back is still astray at the next renewal, which asks for it again."""
        async with self._joining:
            for stream in list(self._streams.values()):
                if stream.is_detached(self.id):
                    await self._take_back(stream)

    async def _take_back(self, stream: ClientStream) -> None:
        if not await self._redis.exists(keys.request(stream.request_id)):
            await self._send_again(stream)
            return
        gateway = self.id
        call = scripts.attach(stream.request_id, gateway, instead_of=stream.gateway)
        answer = [text(part) for part in cast("list[object]", await run_async(self._redis, call))]
        if answer[0] in ("ok", "ended"):
            stream.held_by(gateway, Epoch(int(answer[1])) if answer[0] == "ok" else stream.epoch)
        elif answer[0] != "unlisted":
            stream.fail(RedisUnreachable(f"the gateway lost the request ({answer[0]}); try again"))

    async def _send_again(self, stream: ClientStream) -> None:
        """Redis came back without a request: submit it anew, unless the client has begun to get an answer that may differ now.

        Where numerics are invariant it cannot differ, and what the client has already is not told again.
        """
        if not (stream.told_nothing or self.config.numerics == "invariant"):
            stream.fail(RedisUnreachable("Redis lost the request in mid-answer; try again"))
            return
        log.warning("redis lost %s; it is submitted again", stream.request_id)
        gateway = self.id
        call = self._submission(stream.spec, stream.blob, gateway)
        answer = [text(part) for part in cast("list[object]", await run_async(self._redis, call))]
        if answer[0] == "ok":
            stream.held_by(gateway, Epoch(int(answer[1])))
        elif answer[0] != "exists":
            stream.fail(RedisUnreachable(f"Redis lost the request, and did not take it again ({answer[0]}); try again"))

    def _submission(self, spec: RequestSpec, blob: bytes | None, gateway: WorkerId, *, checked: bool = False) -> scripts.Call:
        """`checked`: its roles must have or expect workers; a request that was admitted before is not refused for that."""
        graph = self.config.graph_declaration()
        stages = graph.stages_for(spec.outputs)
        return scripts.submit(
            spec,
            blob,
            bound=self.config.limits.max_requests,
            stages=stages,
            roles=self._roles_of(spec.outputs) if checked else (),
            grace_us=self._grace_us(),
            edges=[edge.name for edge in graph.edges_for(spec.outputs)],
            gateway=gateway,
            brief=[edge for edge in spec.outputs if graph.media[edge] != "text"],
        )

    def _roles_of(self, outputs: tuple[EdgeName, ...]) -> list[RoleName]:
        stages = self.config.graph_declaration().stages_for(outputs)
        return [role.name for role in self.config.roles() if role.stage in stages]

    def _grace_us(self) -> int:
        return int(self.config.lease.no_worker_timeout_s * 1e6)

    async def _read(self) -> None:
        """Carry the inbox to the streams. The last id read is kept, so a dropped connection loses nothing."""
        last, inbox, untrimmed = "0-0", keys.inbox(self.id), 0
        while not self._stopping:
            if inbox != keys.inbox(self.id):
                last, inbox = "0-0", keys.inbox(self.id)
            try:
                reply = await self._reader.xread({inbox: last}, count=INBOX_COUNT, block=INBOX_BLOCK_MS)
            except RedisError as error:
                log.warning("the inbox could not be read: %s", error)
                await asyncio.sleep(0.2)
                continue
            for _, entries in cast("list[tuple[bytes, list[tuple[bytes, object]]]]", reply or []):
                for entry, raw in entries:
                    last = text(entry)
                    self._receive(raw)
                untrimmed += len(entries)
            if untrimmed and (untrimmed >= INBOX_COUNT or not reply):
                untrimmed = 0
                with contextlib.suppress(RedisError):
                    await self._redis.xtrim(inbox, minid=last, approximate=False)

    def _receive(self, raw: object) -> None:
        """One entry nobody can read (a newer peer's) is that request's loss; the reader goes on."""
        try:
            self._deliver(parse_notice(pairs(raw)))
        except UnknownWireVersion as error:
            log.error("a notice could not be read: %s", error)

    def _deliver(self, notice: AnyNotice | None) -> None:
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

    async def _poll_slowly(self) -> None:
        """Covers a lost notice: streams that wait read their edge logs from the next index. No arriving chunk waits for this."""
        while not self._stopping:
            await asyncio.sleep(SLOW_POLL_S)
            for stream in [stream for stream in self._streams.values() if not stream.moved()]:
                try:
                    await stream.catch_up()
                except RedisError as error:
                    log.warning("the log of %s could not be read: %s", stream.request_id, error)

    async def _tell(self) -> None:
        """Keep the fleet's time series: what was counted here, and what there is to see."""
        while not self._stopping:
            await asyncio.sleep(SERIES_STEP_S)
            try:
                await self.telemetry.tell()
            except RedisError as error:
                log.info("the time series could not be told: %s", error)

    async def submit(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        """Admit a request and hold its client edges.

        A role admits requests, which wait, if a worker of it is starting or was lost less than `lease.no_worker_timeout_s` ago.

        Raises: NoWorker naming the role, Overloaded when the queue bound is reached, RedisUnreachable.
        """

        stream = ClientStream(spec, blob, self.config, self._redis, self._keep)
        self._hold(stream)
        stream.on_lost = lambda: self._send_again(stream)
        try:
            gateway, answer = await self._admitted(spec.id, lambda me: self._submission(spec, blob, me, checked=True))
        except FleetError as error:
            self._streams.pop(spec.id, None)
            if isinstance(error, RedisUnreachable):
                self._disown(spec.id)
            raise
        stream.held_by(gateway, Epoch(int(text(answer[1]))))
        return stream

    async def check_admission(self, request: RequestId, outputs: tuple[EdgeName, ...]) -> int:
        """Return how many more requests `submit` would admit now, for a request that is still to be prepared.

        Raises: as `submit`.
        """
        bound, roles = self.config.limits.max_requests, self._roles_of(outputs)

        def admission(me: WorkerId) -> scripts.Call:
            return scripts.admission(request, bound=bound, gateway=me, roles=roles, grace_us=self._grace_us())

        _, answer = await self._admitted(request, admission)
        return int(text(answer[1]))

    async def _admitted(self, request: RequestId, call: Callable[[WorkerId], scripts.Call]) -> tuple[WorkerId, list[object]]:
        """Return the name that asked, and the answer of the script. Raises: NoWorker, Overloaded, RedisUnreachable."""
        gateway, answer = await self._as_listed(call, unless="stale")
        if text(answer[0]) == "no_worker" and await self._assume_served():
            gateway, answer = await self._as_listed(call, unless="stale")
        if text(answer[0]) != "ok":
            error = refusal_of([text(part) for part in answer], self.config.limits.max_requests)
            if isinstance(error, NoWorker):
                self._refusals.note(request, error)
            raise error
        return gateway, answer

    async def _send_unheard(self, spec: RequestSpec, blob: bytes | None) -> None:
        """Submit a request whose answer nobody waits for: it is taken here, until somebody does (`resume`).

        Raises: as `submit`.
        """
        self._take_unheard(await self.submit(spec, blob))

    def _take_unheard(self, stream: ClientStream, patience_s: float | None = None) -> None:
        """Acknowledge the rest of an answer as it comes, so that workers wait for no listener; unless a newer one has it."""
        request = stream.request_id
        if self._streams.get(request) is not stream:
            return
        taking = asyncio.create_task(stream.discard_rest(patience_s))
        self._unheard[request] = taking
        taking.add_done_callback(lambda _: self._unheard.pop(request, None))

    async def resume(self, request: RequestId) -> tuple[RequestSpec, ClientStream] | None:
        """Take over the client edges of a request from whoever held them, to read from the first chunk on.

        None if it is not known. One that has ended can still be read for as long as its client edges are kept.
        Raises: RedisUnreachable; NotFound if it is known and they are not kept any more.
        """
        raw = await self._ask(self._redis.hget(keys.request(request), "spec"))
        if raw is None:
            return None
        spec = decode_request(cast(bytes, raw))
        unheard = self._unheard.pop(request, None)
        if unheard is not None:
            unheard.cancel()
        stream = ClientStream(spec, None, self.config, self._redis, self._keep)
        self._hold(stream)
        try:
            gateway, answer = await self._as_listed(lambda me: scripts.attach(request, me), unless="unlisted")
            if text(answer[0]) == "ok":
                stream.held_by(gateway, Epoch(int(text(answer[1]))))
            elif text(answer[0]) != "ended":
                raise RedisUnreachable(f"the request could not be taken over ({text(answer[0])}); try again")
            await self._ask(stream.catch_up())
            stream.raise_if_gone()
        except FleetError:
            self._streams.pop(request, None)
            raise
        return spec, stream

    async def _as_listed(self, call: Callable[[WorkerId], scripts.Call], *, unless: str) -> tuple[WorkerId, list[object]]:
        """A call in our name; if the answer is that nobody of that name is listed (a lapse of ours), once more in a new one.

        With the name of which the answer is. Whoever asks may give up: joining anew is everybody's, and goes on.
        """
        me = self.id
        answer = cast("list[object]", await self._ask(run_async(self._redis, call(me))))
        if text(answer[0]) == unless:
            rejoining = asyncio.create_task(self._rejoin(me))
            self._rejoins.add(rejoining)
            rejoining.add_done_callback(self._rejoins.discard)
            await self._ask(asyncio.shield(rejoining))
            me = self.id
            answer = cast("list[object]", await self._ask(run_async(self._redis, call(me))))
        return me, answer

    def _hold(self, stream: ClientStream) -> None:
        """Notices of the request go to this stream from now on; that of an older connection, which may close later, gets none."""
        request = stream.request_id

        def let_go() -> None:
            if self._streams.get(request) is stream:
                del self._streams[request]

        stream.on_close = let_go
        stream.on_unheard = lambda: self._take_unheard(stream, self.config.web.send_timeout_s)
        self._streams[request] = stream

    def _disown(self, request: RequestId) -> None:
        """The script may have run although its answer was lost; a request nobody reads would never end."""
        self._strays.add(request)

    async def _disown_unknown(self) -> None:
        """A Redis that lost its last writes may hold an answer as ours which was delivered long ago."""
        before = set(self._streams)  # An answer may be delivered to its end while this is asked.
        for pair in cast("set[bytes]", await self._redis.smembers(keys.worker_tasks(self.id))):
            request = RequestId(text(pair).partition("|")[0])
            if request not in self._streams and request not in before:
                self._disown(request)

    async def _end_strays(self) -> None:
        for request in list(self._strays):
            await run_async(self._redis, scripts.abort(request, scripts.API_RIGHT, "its submission was not answered", self._keep))
            self._strays.discard(request)

    async def _assume_served(self) -> bool:
        """Let a Redis that restarted just now, and may have lost who served what, count every role as served until then.

        Return True if it did restart since this gateway joined.
        """
        run_id, up_s = await self._ask(self._server())
        if run_id == self._run_id or up_s > self.config.lease.no_worker_timeout_s:
            return False
        seconds, _ = await self._ask(self._redis.time())
        roles = [role.name for role in self.config.roles()]
        await self._ask(run_async(self._redis, scripts.assume_served((seconds - up_s) * 1_000_000, roles)))
        return True

    async def _server(self) -> tuple[str, int]:
        """Return the run id of the Redis process, and for how many seconds it has run."""
        info = cast("dict[str, str | int]", await self._redis.info("server"))
        return str(info["run_id"]), int(info["uptime_in_seconds"])

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RedisError as error:
            raise RedisUnreachable(f"Redis does not answer ({error})") from error

    async def workers(self) -> list[WorkerView]:
        return await self._ask(read_workers(self._redis))

    async def roles(self) -> list[RoleView]:
        """Queue and capacity of each role of the deployment, and of any other that is served."""
        return await self._ask(read_roles(self._redis, [role.name for role in self.config.roles()]))

    async def refused(self) -> dict[str, str]:
        """Workers of the last hour that were not let in, and why."""
        raw = cast("dict[bytes, bytes]", await self._ask(self._redis.hgetall(keys.REFUSED)))
        return {text(worker): text(said).partition(" ")[2] for worker, said in raw.items()}

    async def missing_roles(self) -> list[str]:
        """Roles of the graph without a live worker that takes tasks, whether one is starting or not."""
        wanted = self.config.roles()
        served = {view.role for view in await self.workers() if view.takes_tasks}
        return [role.name for role in wanted if role.name not in served]

    async def request_view(self, request: RequestId) -> RequestView | None:
        return await self._ask(read_request(self._redis, request))

    async def abort_request(self, request: RequestId) -> bool:
        """End any request by the API's right; whether it was live."""
        call = scripts.abort(request, scripts.API_RIGHT, "cancelled through the API", self._keep)
        return text(await self._ask(run_async(self._redis, call))) == "ok"

    async def keep_transcript(self, audio_id: str, transcript: str, keep_s: int) -> None:
        """Remember what a spoken answer said, for follow-up turns through any gateway."""
        await self._ask(self._redis.set(keys.transcript(audio_id), transcript, ex=keep_s))

    async def transcript(self, audio_id: str) -> str | None:
        """None once it has expired."""
        raw = await self._ask(self._redis.get(keys.transcript(audio_id)))
        return None if raw is None else text(raw)

    async def first_outputs(self, request: RequestId) -> voice.FirstOutputs:
        """When a worker took the request, and when each stage made its first output."""
        return await self._ask(voice.read_first_outputs(self._redis, self.config.graph_declaration(), request))

    async def hold_voice(self, session: str, keep_s: float, owner: str, *, new: bool = False) -> voice.HeldVoice | None:
        """Take a voice session of `owner`: its former holder may write to it no more. See `FleetPort`. Raises: SecretInUse."""
        return await self._ask(voice.hold(self._redis, self.config.voice, session, self.id, keep_s, owner, new=new))

    async def keep_voice(
        self, session: str, epoch: int, keep_s: float, fields: Mapping[str, bytes], gone: Sequence[str] = ()
    ) -> bool:
        """Write fields of a held session, delete `gone`, and let it live so long again. False: it is held no more."""
        return await self._ask(voice.keep(self._redis, session, epoch, self.id, keep_s, fields, gone))

    async def end_voice(self, session: str, epoch: int | None = None) -> bool:
        """Delete a session, where `epoch` is given only if it is still held. Whether there was one."""
        return await self._ask(voice.end(self._redis, session, epoch))

    async def voice_ended(self, session: str, owner: str) -> bool:
        """Return True if an operator ended the voice session of this owner within the last minutes."""
        return await self._ask(voice.was_ended(self._redis, session, owner))

    async def voices(self) -> dict[str, bytes]:
        """What their holders say of the voice sessions there are, by name."""
        return await self._ask(voice.read_views(self._redis))

    async def keep_secret(self, name: str, value: bytes, keep_s: int) -> None:
        await self._ask(self._redis.set(keys.secret(name), value, ex=keep_s))

    async def secret(self, name: str) -> bytes | None:
        """None once it has expired."""
        return cast("bytes | None", await self._ask(self._redis.get(keys.secret(name))))

    async def ping(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except RedisError:
            return False

    async def live_count(self) -> int:
        return int(await self._ask(self._redis.scard(keys.LIVE)))
