"""Requests held by a gateway: submitted, resumed, reattached after a lapsed lease, aborted. Chunks
of their answers arrive as notices.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.admission import RequestAdmission
from fleet.control.connect import (
    Reply,
    answer_of,
    first_text,
    run_and_read,
    run_async,
    text,
)
from fleet.control.endings import BELOW_ALL, Abort, EndingsOwed
from fleet.control.held_streams import HeldStreams
from fleet.control.membership import Membership
from fleet.control.notices import (
    AnyNotice,
    ChunkNotice,
    EndNotice,
    LoggedNotice,
    MovedNotice,
    UnreadableNotice,
)
from fleet.control.redis_status import RedisStatus
from fleet.control.replication import Replication
from fleet.control.stream import ClientStream
from fleet.control.stream_recovery import StreamRecovery
from fleet.control.submission import SubmissionCalls
from fleet.control.waiting import Applicant, client_key, limits_of
from fleet.core.errors import (
    FleetError,
    GatewayStopping,
    NotReplicated,
    RedisUnreachable,
    ResumedElsewhere,
)
from fleet.core.ids import EdgeName, Epoch, RequestId, WorkerId
from fleet.core.request import RequestSpec, decode_request

log = logging.getLogger(__name__)

RESUME_PAUSE_S = 0.1
"""Seconds between two tries to resume a request that is about to be restored."""


class GatewayRequests:
    """Requests whose client edges this gateway reads, each with its `ClientStream`. Any public
    method may raise RedisUnreachable. `on_refusal`: function that is called with the error of each
    request that is not admitted.
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
        self._admission = RequestAdmission(client, config, membership, status, on_refusal)
        self._calls = SubmissionCalls(config)
        self._held = HeldStreams()
        self._held.on_end = self._admission.waiting.wake
        self._replicate = Replication(config.redis).run
        self.endings = EndingsOwed(
            client, membership, is_read=self._held.reads, bound=config.limits.max_requests
        )
        self.recovery = StreamRecovery(client, config, membership, self._held, self.endings)
        self._draining: dict[RequestId, asyncio.Task[None]] = {}
        """Tasks that read the answers of requests without a client, by request."""

    async def start(self) -> None:
        """Start the admission of requests. Raises: redis's errors."""
        await self._admission.start()

    async def stop(self) -> None:
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a place at this gateway."""
        return self._admission.waiting.num_waiting

    async def submit(
        self,
        spec: RequestSpec,
        blob: bytes | None,
        applicant: Applicant | None = None,
        ordered_by: str | None = None,
    ) -> ClientStream:
        """Admit a request and return the stream of its answer. `blob`: samples of its audio prompt,
        if any. At the limit of requests, a request with an `applicant` waits for its turn.
        `ordered_by`: name of the API key of the operator who ordered a retry, for the journal; None
        for other requests.

        A request whose role has no worker waits if a worker is starting, or if the last one was
        lost less than `lease.no_worker_timeout_s` ago.

        Raises: NoWorker naming the role, Overloaded at the limit of requests, KeyAtLimit at a limit
        of the API key, AlreadySubmitted, GatewayStopping, RedisUnreachable, NotReplicated.
        """
        await answer_of(self.endings.send_overdue())
        stream = self._stream(spec, blob)
        stream.client_key = client_key(applicant)
        may_have_run = False

        def submission(me: WorkerId, *, waits: scripts.Waits) -> scripts.Call:
            limits = limits_of(applicant)
            return self._calls.submit(spec, blob, me, stream.client_key, waits, limits, ordered_by)

        async def submit(client: Redis, call: scripts.Call) -> Reply:
            nonlocal may_have_run
            may_have_run = True
            with self._held.submission(stream) as refuse:
                reply = await self._replicate(client, call)
                if first_text(reply) != "ok":
                    may_have_run = False
                    refuse()
                return reply

        roles = self._calls.roles_of_request(spec)
        try:
            gateway, answer = await self._admission.admit(
                spec.id, roles, submission, submit, applicant
            )
        except BaseException as error:  # a cancellation too
            if may_have_run:
                self._held.remove(stream)
                await self._withdraw(spec.id, error)
            raise
        stream.held_by(gateway, Epoch(int(answer[1])))
        return stream

    async def _withdraw(self, request: RequestId, error: BaseException) -> None:
        """Abort a request whose submission has failed, although the script may have run."""
        reason = error.message if isinstance(error, FleetError) else "its submission was cancelled"
        abort = Abort(request=request, epoch=BELOW_ALL, reason=reason)
        if isinstance(error, NotReplicated):
            await self.endings.settle(abort)
        else:
            self.endings.owe(abort)

    async def submit_without_client(
        self, spec: RequestSpec, blob: bytes | None, ordered_by: str | None
    ) -> None:
        """Submit a request without a client. This gateway reads and acknowledges the answer until a
        client resumes the request. Raises: as `submit`.
        """
        self._drain(await self.submit(spec, blob, ordered_by=ordered_by))

    async def check_admission(
        self,
        request: RequestId,
        outputs: tuple[EdgeName, ...],
        applicant: Applicant | None = None,
    ) -> int:
        """Return the number of further requests with audio in their prompts that `submit` would
        admit now, this request included; no place is reserved. With an `applicant`, this call waits
        as `submit` does. Raises: as `submit`.
        """
        await answer_of(self.endings.send_overdue())
        roles = self._calls.roles_for(outputs)

        def admission(me: WorkerId, *, waits: scripts.Waits) -> scripts.Call:
            return self._calls.admission(request, roles, me, applicant, waits)

        _, answer = await self._admission.admit(request, roles, admission, applicant=applicant)
        return int(answer[1])

    async def wait_for_turn(self, request: RequestId, applicant: Applicant, cause: str) -> None:
        """Wait until it may be the turn of `applicant`; the caller then tries again. Raises:
        Overloaded with the reason `cause`, GatewayStopping, the error of `Applicant.refuse`.
        """
        await self._admission.wait_for_turn(request, applicant, cause)

    def count_preparing(self, by: int) -> None:
        """Add `by`, perhaps negative, to the number of requests in preparation for admission."""
        self._admission.waiting.count_preparing(by)

    async def resume(
        self, request: RequestId, voice: scripts.VoiceHold | None = None
    ) -> tuple[RequestSpec, ClientStream] | None:
        """Take over a request's client edges, to read the answer again from its first chunk. The
        stream that held them, at this gateway or another, ends with ResumedElsewhere.

        Returns None if the request is unknown. A request that has ended can be read while its
        client edges are retained. `voice`: the voice session of which this is the answer.
        Raises: RedisUnreachable; NotFound if the client edges are no longer retained;
        ResumedElsewhere if a later resumption has overtaken this call, or another gateway holds
        the voice session now.
        """
        await answer_of(self.endings.send_overdue())
        with self._held.resumption(request):
            found = await self._attach(request, voice)
            if found is None:
                return None
            spec, stream = found
            self._supersede(stream)
        try:
            await answer_of(stream.read_from_start())
            stream.raise_if_gone()
        except RedisUnreachable:
            # If Redis comes back without the request, only this stream can restore it.
            self._drain(stream, self._config.lease.gateway_timeout_s)
            raise
        except BaseException:  # a cancellation too
            self._held.remove(stream)
            raise
        return spec, stream

    async def _attach(
        self, request: RequestId, voice: scripts.VoiceHold | None
    ) -> tuple[RequestSpec, ClientStream] | None:
        """Attach this gateway as the reader of an answer; return the request and a new stream, or
        None if the request is unknown and no gateway is about to restore it.

        The request and its audio are read with the attachment: from then on only this gateway can
        restore them.
        """
        reads = (("HGET", keys.request(request), "spec"), ("GET", keys.blob(request)))
        raw: Reply = None
        blob: Reply = None

        async def attach(client: Redis, call: scripts.Call) -> Reply:
            nonlocal raw, blob
            reply, raw, blob = await run_and_read(client, call, *reads)
            return reply

        while True:
            gateway, answer = await self._membership.call(
                lambda me: scripts.attach(request, me, voice=voice),
                unlisted="unlisted",
                run=attach,
            )
            if raw is not None:
                break
            if not self._membership.may_miss_requests:
                return None
            await asyncio.sleep(RESUME_PAUSE_S)
        spec = decode_request(cast(bytes, raw))
        stream = self._stream(spec, cast("bytes | None", blob))
        stream.was_read = True
        if answer[0] == "ok":
            stream.held_by(gateway, Epoch(int(answer[1])))
        elif answer[0] == "stale":
            raise ResumedElsewhere.of(request)
        elif answer[0] not in ("ended", "unknown"):
            raise RedisUnreachable(
                f"the request could not be taken over from its gateway ({answer[0]}); try again"
            )
        return spec, stream

    def _stream(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        stream = ClientStream(spec, blob, self._config, self._redis, self.endings)
        stream.on_stale = lambda: self.recovery.reattach_one(stream)
        stream.on_unread = lambda: self._drain(stream, self._config.web.send_timeout_s)
        return stream

    def _supersede(self, stream: ClientStream) -> None:
        """Hold `stream` in place of this gateway's earlier stream of the same request. Raises:
        ResumedElsewhere if the earlier stream has the higher epoch.
        """
        request = stream.request_id
        earlier = self._held.streams.get(request)
        if earlier is not None and stream.epoch and earlier.epoch > stream.epoch:
            raise ResumedElsewhere.of(request)
        draining = self._draining.pop(request, None)
        if draining is not None:
            draining.cancel()
        if earlier is not None:
            earlier.supersede()
        self._held.add(stream)

    async def abort(self, request: RequestId, *, ordered_by: str | None = None) -> bool:
        """Abort any request of the fleet. Return True if the request was live. `ordered_by`: name
        of the API key of the operator who ordered the abort, for the journal; None if the request's
        own client did.
        """
        right = scripts.API_RIGHT if ordered_by is None else scripts.OPERATOR_RIGHT
        call = scripts.abort(request, right, "cancelled through the API", ordered_by or "")
        return text(await answer_of(run_async(self._redis, call))) == "ok"

    def detach_all(self) -> None:
        """End every stream with GatewayStopping. The requests continue, and wait for another
        gateway after `FleetClient.stop`. Requests that wait for a place are refused.
        """
        self._admission.waiting.close()
        for stream in list(self._held.streams.values()):
            stream.fail(
                GatewayStopping("this gateway stops; another continues the answer (Last-Event-ID)")
            )

    def wants(self, notice: AnyNotice) -> bool:
        """Return False if `notice` is about a chunk that need not be read from its log: the gateway
        has the chunk, or does not read that answer.
        """
        if not isinstance(notice, LoggedNotice):
            return True
        stream = self._held.streams.get(notice.request)
        return stream is not None and stream.wants(notice.edge, notice.index)

    def deliver(self, notice: AnyNotice) -> None:
        """Pass a notice of the inbox to the stream of its request. Log an unreadable notice."""
        match notice:
            case ChunkNotice(chunk=chunk):
                stream = self._held.streams.get(chunk.request)
                if stream is not None:
                    stream.put(chunk)
            case UnreadableNotice(error=error):
                log.error("a notice of this gateway's inbox could not be read: %s", error)
            case EndNotice(request=request):
                stream = self._held.streams.get(request)
                if stream is not None:
                    stream.ended(notice)
            case MovedNotice(request=request, epoch=epoch):
                stream = self._held.streams.get(request)
                # one that is not attached yet is the newer one
                if stream is not None and 0 < stream.epoch < epoch:
                    stream.supersede()
            case _:
                return

    def _drain(self, stream: ClientStream, patience_s: float | None = None) -> None:
        """Read and acknowledge the rest of an answer without a client, so that its workers do not
        wait. Does nothing if a newer stream reads the answer. `patience_s`: seconds until the
        request is aborted; None: never.
        """
        request = stream.request_id
        if not self._held.holds(stream):
            return
        draining = asyncio.create_task(stream.discard_rest(patience_s))
        self._draining[request] = draining
        draining.add_done_callback(lambda _: self._draining.pop(request, None))
