"""Requests held by a gateway: submitted, resumed, reattached after a lapsed lease, aborted. Chunks
of their answers arrive as notices.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.admission import RequestAdmission, client_key
from fleet.control.connect import (
    Reply,
    answer_of,
    first_text,
    run_async,
    run_with,
    slices,
    text,
    texts,
)
from fleet.control.membership import Membership
from fleet.control.notices import (
    AnyNotice,
    ChunkNotice,
    EndNotice,
    LoggedNotice,
    MovedNotice,
    UnreadableNotice,
)
from fleet.control.outage import is_away
from fleet.control.redis_status import RedisStatus
from fleet.control.replication import Replication
from fleet.control.stream import ClientStream
from fleet.control.waiting import Applicant
from fleet.core.errors import GatewayStopping, NotReplicated, RedisUnreachable, ResumedElsewhere
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, RoleName, WorkerId
from fleet.core.request import RequestSpec, decode_request

log = logging.getLogger(__name__)

SLICE = 100
"""Number of streams per Redis call. The limit keeps other calls, such as lease renewals, from
waiting longer than a few milliseconds.
"""
MAX_DELIVERED = 4096
"""Number of delivered answers that are remembered: more than a gateway delivers in a second, the
period whose writes Redis may lose.
"""


class GatewayRequests:
    """Requests whose client edges this gateway reads, each with its `ClientStream`. Any public
    method may raise RedisUnreachable.
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
        self._admission = RequestAdmission(client, config, membership, status)
        self._streams: dict[RequestId, ClientStream] = {}
        self._submitting: set[RequestId] = set()
        """Requests whose submission Redis has not confirmed. Their streams exist already, since
        notices may arrive before the reply.
        """
        self._draining: dict[RequestId, asyncio.Task[None]] = {}
        """Tasks that read the answers of requests without a client, by request."""
        self._unread: set[RequestId] = set()
        """Requests that Redis listed as this gateway's at the last check although no stream read
        their answers.
        """
        self._delivered: dict[RequestId, dict[EdgeName, int]] = {}
        """Number of chunks by edge of answers that clients have received whole, latest last. Redis
        may lose the last acknowledgement of such an answer.
        """
        self._replicate = Replication(config.redis).run
        membership.rejoined = self.reattach

    async def start(self) -> None:
        """Start the admission of requests. Raises: redis's errors."""
        await self._admission.start()

    async def stop(self) -> None:
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._admission.waiting.stop()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait at this gateway for a place."""
        return self._admission.waiting.num_waiting

    @property
    def num_held(self) -> int:
        return len(self._streams)

    async def submit(
        self, spec: RequestSpec, blob: bytes | None, applicant: Applicant | None = None
    ) -> ClientStream:
        """Admit a request and return the stream of its answer. `blob`: samples of its audio prompt.
        At the limit of requests, one with an `applicant` waits for its turn.

        A request whose role has no worker waits if a worker is starting, or if the last one was
        lost less than `lease.no_worker_timeout_s` ago.

        Raises: NoWorker naming the role, Overloaded at the limit of requests, RedisUnreachable,
        NotReplicated.
        """
        stream = ClientStream(spec, blob, self._config, self._redis)
        stream.client_key = client_key(applicant)
        stream.on_lost = lambda: self._resubmit(stream)
        try:
            gateway, answer = await self._admission.admit(
                spec.id,
                self._roles_of(spec.outputs),
                partial(self._submission, stream, checked=True),
                partial(self._run_held, stream),
                applicant,
            )
        # a cancellation too: a stream without a reader would be held indefinitely
        except BaseException as error:
            # The script may have run although its answer was lost: then `_release_unread` finds the
            # request.
            self._streams.pop(spec.id, None)
            if isinstance(error, NotReplicated):
                await self.abort(spec.id)
            raise
        finally:
            self._submitting.discard(spec.id)
        stream.held_by(gateway, Epoch(int(answer[1])))
        return stream

    async def _run_held(self, stream: ClientStream, client: Redis, call: scripts.Call) -> Reply:
        """Run a submission, with its stream held unless the request is refused."""
        self._hold(stream)
        self._submitting.add(stream.request_id)
        reply = await self._replicate(client, call)
        if first_text(reply) != "ok":
            self._streams.pop(stream.request_id, None)
        return reply

    async def submit_without_client(self, spec: RequestSpec, blob: bytes | None) -> None:
        """Submit a request without a client: its answer is read and acknowledged until a client
        resumes it. Raises: as `submit`.
        """
        self._drain(await self.submit(spec, blob))

    async def check_admission(
        self,
        request: RequestId,
        outputs: tuple[EdgeName, ...],
        applicant: Applicant | None = None,
    ) -> int:
        """Return the number of further requests that `submit` would admit now, this request
        included. One with an `applicant` waits as in `submit`. Raises: as `submit`.
        """
        return await self._admission.check(request, self._roles_of(outputs), applicant)

    async def wait_for_turn(self, request: RequestId, applicant: Applicant, cause: str) -> None:
        """Wait until it may be the turn of `applicant`, which then tries again. `cause`: reason of
        the refusal. Raises: Overloaded with `cause`, GatewayStopping.
        """
        await self._admission.wait_for_turn(request, applicant, cause)

    def count_preparing(self, by: int) -> None:
        """Add to the number of requests that are prepared for a place that they do not hold yet."""
        self._admission.waiting.count_preparing(by)

    async def resume(self, request: RequestId) -> tuple[RequestSpec, ClientStream] | None:
        """Take over a request's client edges, to read the answer again from its first chunk. The
        stream that held them, at this gateway or another, ends with ResumedElsewhere.

        Returns None if the request is unknown. A request that has ended can be read while its
        client edges are retained.
        Raises: RedisUnreachable; NotFound if the client edges are no longer retained;
        ResumedElsewhere if a later resumption has overtaken this call.
        """
        raw: Reply = None

        async def attach(client: Redis, call: scripts.Call) -> Reply:
            nonlocal raw
            reply, raw = await run_with(client, call, "HGET", keys.request(request), "spec")
            return reply

        gateway, answer = await self._membership.call(
            lambda me: scripts.attach(request, me), unlisted="unlisted", run=attach
        )
        if raw is None:
            return None
        spec = decode_request(cast(bytes, raw))
        stream = ClientStream(spec, None, self._config, self._redis)
        if answer[0] == "ok":
            stream.held_by(gateway, Epoch(int(answer[1])))
        elif answer[0] not in ("ended", "unknown"):
            raise RedisUnreachable(
                f"the request could not be taken over from its gateway ({answer[0]}); try again"
            )
        self._supersede(stream)
        try:
            await answer_of(stream.read_from_start())
            stream.raise_if_gone()
        except BaseException:  # a cancellation too
            if self._streams.get(request) is stream:
                del self._streams[request]
            raise
        return spec, stream

    def _supersede(self, stream: ClientStream) -> None:
        """Hold `stream` in place of this gateway's earlier stream of the same request. Raises:
        ResumedElsewhere if the earlier stream has the higher epoch.
        """
        request = stream.request_id
        earlier = self._streams.get(request)
        if earlier is not None and stream.epoch and earlier.epoch > stream.epoch:
            raise ResumedElsewhere.of(request)
        draining = self._draining.pop(request, None)
        if draining is not None:
            draining.cancel()
        if earlier is not None:
            earlier.supersede()
        self._hold(stream)

    async def abort(self, request: RequestId) -> bool:
        """Abort any request of the fleet. Return True if it was live."""
        call = scripts.abort(request, scripts.API_RIGHT, "cancelled through the API")
        return text(await answer_of(run_async(self._redis, call))) == "ok"

    def detach_all(self) -> None:
        """End every stream with GatewayStopping. The requests continue, and wait for another
        gateway after `FleetClient.stop`. Those that wait for a place are refused.
        """
        self._admission.waiting.close()
        for stream in list(self._streams.values()):
            stream.fail(
                GatewayStopping("this gateway stops; another continues the answer (Last-Event-ID)")
            )

    def wants(self, notice: AnyNotice) -> bool:
        """Return False if `notice` is about a chunk that need not be read from its log: the gateway
        has the chunk, or does not read that answer.
        """
        if not isinstance(notice, LoggedNotice):
            return True
        stream = self._streams.get(notice.request)
        return stream is not None and stream.wants(notice.edge, notice.index)

    def deliver(self, notice: AnyNotice) -> None:
        """Pass a notice of the inbox to the stream of its request. Log an unreadable notice."""
        match notice:
            case ChunkNotice(chunk=chunk):
                stream = self._streams.get(chunk.request)
                if stream is not None:
                    stream.put(chunk)
            case UnreadableNotice(error=error):
                log.error("a notice of this gateway's inbox could not be read: %s", error)
            case EndNotice(request=request):
                stream = self._streams.get(request)
                if stream is not None:
                    stream.ended(notice)
            case MovedNotice(request=request, epoch=epoch):
                stream = self._streams.get(request)
                # one that is not attached yet is the newer one
                if stream is not None and 0 < stream.epoch < epoch:
                    stream.supersede()
            case _:
                return

    async def catch_up(self) -> None:
        """Find chunks whose notices were lost: read the logs of streams that have received nothing
        since the last call although Redis has something new.

        Raises: redis-py's errors while Redis is away.
        """
        submitted = [
            stream for request, stream in self._streams.items() if request not in self._submitting
        ]
        for streams in slices([stream for stream in submitted if not stream.moved()], SLICE):
            for stream in await self._stale(streams):
                await self._catch_up(stream)

    async def _catch_up(self, stream: ClientStream) -> None:
        try:
            await stream.catch_up()
        except RedisError as error:
            if is_away(error):
                raise
            log.warning("the log of %s could not be read: %s", stream.request_id, error)

    async def _stale(self, streams: Sequence[ClientStream]) -> list[ClientStream]:
        """Return the streams for which Redis has something new. A single script call compares all
        of them, since most are idle and reading a stream costs four calls.
        """
        positions = [(stream, stream.position()) for stream in streams]
        known = [(stream, position) for stream, position in positions if position is not None]
        stale = [stream for stream, position in positions if position is None]
        if not known:
            return stale
        call = scripts.stale_streams([position for _, position in known])
        try:
            found = cast("list[int]", await run_async(self._redis, call))
        except RedisError as error:
            if is_away(error):
                raise
            log.warning("the streams of this gateway could not be compared with Redis: %s", error)
            return stale
        return [*stale, *(known[number][0] for number in found)]

    async def reconcile(self) -> None:
        """Compare this gateway's streams with Redis after a lapsed lease or a Redis restart:
        reattach streams, and release requests without a stream. Raises: redis-py's errors; then
        call it again.
        """
        await self.reattach()
        await self._release_unread()

    async def reattach(self) -> None:
        """Attach the streams that are held under a former id of this gateway to its present id.
        Raises: redis-py's errors; the next lease renewal tries again.
        """
        async with self._membership.lock:
            gateway = self._membership.id
            for streams in slices(
                [stream for stream in self._streams.values() if stream.is_detached(gateway)], SLICE
            ):
                await self._reattach(gateway, streams)

    async def _reattach(self, gateway: WorkerId, streams: Sequence[ClientStream]) -> None:
        held = {stream.request_id: stream.epoch for stream in streams}
        answers = texts(await run_async(self._redis, scripts.reattach(gateway, held)))
        if answers[0] == "unlisted":
            return
        for stream, answer, epoch in zip(streams, answers[::2], answers[1::2], strict=True):
            if answer == "ok":
                stream.held_by(gateway, Epoch(int(epoch)))
            elif answer == "ended":
                stream.held_by(gateway, stream.epoch)
                stream.stop_acks()
            elif answer == "unknown":
                await self._resubmit(stream)
            else:
                stream.supersede()

    async def _reattach_one(self, stream: ClientStream) -> None:
        """Attach a stream again that Redis no longer lists as its answer's reader, or end it if a
        newer stream reads the answer. Raises: redis errors.
        """
        async with self._membership.lock:
            if self._streams.get(stream.request_id) is stream:
                await self._reattach(self._membership.id, [stream])
            else:
                stream.supersede()

    async def _resubmit(self, stream: ClientStream) -> None:
        """Submit a request again that Redis lost, unless its client has received chunks that may
        come out differently: then the stream fails.

        With invariant numerics the recomputed rows are equal, and the stream leaves out the rows
        that the client has.
        """
        if not (stream.is_undelivered or self._config.numerics == "invariant"):
            stream.fail(RedisUnreachable("Redis lost the request in mid-answer; try again"))
            return
        log.warning("Redis lost request %s; it is submitted again", stream.request_id)
        gateway = self._membership.id
        call = self._submission(stream, gateway)
        answer = texts(await run_async(self._redis, call))
        if answer[0] == "ok":
            stream.held_by(gateway, Epoch(int(answer[1])))
        elif answer[0] != "exists":
            stream.fail(
                RedisUnreachable(
                    f"Redis lost the request, and did not accept it again ({answer[0]}); try again"
                )
            )

    async def _release_unread(self) -> None:
        """Release requests that Redis lists as this gateway's although no stream reads them: the
        reply to a submission was lost, or Redis lost writes. A request must be found by two calls
        in a row, since its stream may just be beginning or ending.
        """
        me, before = self._membership.id, set(self._streams)
        pairs = cast("set[bytes]", await self._redis.smembers(keys.worker_tasks(me)))
        listed = {RequestId(text(pair).partition("|")[0]) for pair in pairs}
        unread = listed - before - set(self._streams)
        for request in unread & self._unread:
            epoch = Epoch(
                int(text(await self._redis.hget(keys.task(request, CLIENT), "epoch")) or 0)
            )
            if counts := self._delivered.get(request):
                log.warning(
                    "request %s: Redis lost the acknowledgement of its answer, which is sent again",
                    request,
                )
                await run_async(self._redis, scripts.ack(self._final_acks(request, epoch, counts)))
            else:
                log.warning(
                    "request %s: no stream of this gateway reads its answer; it is detached",
                    request,
                )
                await run_async(self._redis, scripts.detach(request, me, epoch))
        self._unread = unread

    def _final_acks(
        self, request: RequestId, epoch: Epoch, counts: Mapping[EdgeName, int]
    ) -> list[scripts.Ack]:
        """Return the acknowledgements of a whole answer. Any part that Redis has lost is then
        computed again without a reader. `counts`: number of chunks by edge.
        """
        graph, last = self._config.graph_declaration(), list(counts)[-1]
        return [
            scripts.Ack(
                request=request,
                stage=CLIENT,
                epoch=epoch,
                edge=edge,
                consumed=count,
                producer=graph.edge(edge).source,
                delivered=edge == last,
                closed=True,
            )
            for edge, count in counts.items()
        ]

    def _hold(self, stream: ClientStream) -> None:
        """Deliver the request's notices to `stream` from now on, not to an earlier stream."""
        request = stream.request_id

        def forget() -> None:
            if self._streams.get(request) is stream:
                del self._streams[request]
                if counts := stream.delivered():
                    self._delivered[request] = counts
                if len(self._delivered) > MAX_DELIVERED:
                    del self._delivered[next(iter(self._delivered))]
                self._admission.waiting.wake()

        stream.on_close = forget
        stream.on_stale = lambda: self._reattach_one(stream)
        stream.on_unread = lambda: self._drain(stream, self._config.web.send_timeout_s)
        self._streams[request] = stream

    def _drain(self, stream: ClientStream, patience_s: float | None = None) -> None:
        """Read and acknowledge the rest of an answer without a client, so that its workers do not
        wait. Does nothing if a newer stream reads the answer. `patience_s`: seconds until the
        request is aborted; None: never.
        """
        request = stream.request_id
        if self._streams.get(request) is not stream:
            return
        draining = asyncio.create_task(stream.discard_rest(patience_s))
        self._draining[request] = draining
        draining.add_done_callback(lambda _: self._draining.pop(request, None))

    def _submission(
        self,
        stream: ClientStream,
        me: WorkerId,
        *,
        checked: bool = False,
        waits: scripts.Waits = "",
    ) -> scripts.Call:
        """Return the call that submits a request. `checked`: refuse the request if one of its roles
        has no worker and expects none; False for a request that was admitted before.
        """
        spec = stream.spec
        graph = self._config.graph_declaration()
        stages = graph.stages_for(spec.outputs)
        return scripts.submit(
            spec,
            stream.blob,
            bound=self._config.limits.max_requests,
            stages=stages,
            roles=self._roles_of(spec.outputs) if checked else (),
            grace_us=self._admission.grace_us,
            edges=[edge.name for edge in graph.edges_for(spec.outputs)],
            gateway=me,
            audio=[edge for edge in spec.outputs if graph.media.get(edge) == "audio"],
            retention_s=self._config.retention_s,
            first_roles=[self._config.roles_of(stage)[0].name for stage in stages],
            client=stream.client_key,
            waits=waits,
        )

    def _roles_of(self, outputs: tuple[EdgeName, ...]) -> list[RoleName]:
        stages = self._config.graph_declaration().stages_for(outputs)
        return [role.name for role in self._config.roles() if role.stage in stages]
