"""Recovery of a gateway's streams: chunks whose notices were lost, a lapsed lease, and requests or
their ends that Redis has lost.
"""

import logging
from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import run_async, slices, text, texts
from fleet.control.endings import Detach, EndingsOwed
from fleet.control.held_streams import HeldStreams
from fleet.control.membership import Membership
from fleet.control.outage import is_away
from fleet.control.stream import ClientStream
from fleet.control.submission import SubmissionCalls
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import CLIENT, Epoch, RequestId, WorkerId

log = logging.getLogger(__name__)

SLICE = 100
"""Number of streams per Redis call. The limit keeps other calls, such as lease renewals, from
waiting longer than a few milliseconds.
"""


class StreamRecovery:
    """Recovery of the streams in `held`."""

    def __init__(
        self,
        client: Redis,
        config: FleetConfig,
        membership: Membership,
        held: HeldStreams,
        endings: EndingsOwed,
    ) -> None:
        self._redis = client
        self._config = config
        self._membership = membership
        self._held = held
        self._endings = endings
        self._calls = SubmissionCalls(config)
        membership.rejoined = self.reattach

    async def catch_up(self, *, also_moved: bool = False) -> None:
        """Find chunks whose notices were lost, and requests that Redis has lost: compare with Redis
        the streams on which an edge has received nothing since the last call, and read the logs of
        the streams that lag behind. `also_moved`: compare all other streams too.

        Raises: redis-py's errors while Redis is away.
        """
        submitted = [
            stream
            for request, stream in self._held.streams.items()
            if request not in self._held.submitting
        ]
        compared = [stream for stream in submitted if not stream.moved() or also_moved]
        for streams in slices(compared, SLICE):
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
        """Return the streams that lag behind Redis. A single script call compares all streams,
        since most are idle and reading a stream costs four calls.
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
        """Compare this gateway's streams with Redis after a lapsed lease or a Redis restart: send
        what is owed, reattach streams, and release requests without a stream. Raises: redis-py's
        errors; then call it again.
        """
        await self._endings.send_overdue()
        await self.reattach()
        await self.release_unread()

    async def reattach(self) -> None:
        """Attach the streams that are held under a former id of this gateway to its present id.
        Raises: redis-py's errors; the next lease renewal tries again.
        """
        async with self._membership.lock:
            gateway = self._membership.id
            for streams in slices(
                [stream for stream in self._held.streams.values() if stream.is_detached(gateway)],
                SLICE,
            ):
                if not await self._reattach(gateway, streams):
                    return

    async def _reattach(self, gateway: WorkerId, streams: Sequence[ClientStream]) -> bool:
        """Attach streams to this gateway, and restore the requests that Redis does not have. Return
        False if Redis does not list the gateway.
        """
        held = {stream.request_id: stream.epoch for stream in streams}
        answers = texts(await run_async(self._redis, scripts.reattach(gateway, held)))
        if answers[0] == "unlisted":
            return False
        for stream, answer, epoch in zip(streams, answers[::2], answers[1::2], strict=True):
            if answer == "ok":
                stream.held_by(gateway, Epoch(int(epoch)))
            elif answer == "ended" or (answer == "unknown" and not stream.epoch):
                stream.held_by(gateway, stream.epoch)
                stream.stop_acks()
            elif answer != "unknown":
                stream.supersede()
            elif not await self._restore(gateway, stream):
                return False
        return True

    async def reattach_one(self, stream: ClientStream) -> None:
        """Attach a stream again that Redis no longer lists as its answer's reader, or restore its
        request, or end the stream if a newer one reads the answer. Raises: redis errors.
        """
        async with self._membership.lock:
            gateway = self._membership.id
            if not self._held.holds(stream):
                stream.supersede()
                return
            is_listed = await self._reattach(gateway, [stream])
        if not is_listed:
            await self._membership.rejoin(gateway)

    async def _restore(self, gateway: WorkerId, stream: ClientStream) -> bool:
        """Restore a request that Redis lost, unless its client has received chunks that may come
        out differently: then the stream fails. Return False if Redis does not list the gateway.

        With invariant numerics the recomputed rows are equal, and the stream leaves out the rows
        that the client has.
        """
        request = stream.request_id
        if stream.has_failed:
            return True
        if not (stream.is_undelivered or self._config.numerics == "invariant"):
            stream.fail(RedisUnreachable("Redis lost the request in mid-answer; try again"))
            return True
        log.warning("Redis lost request %s; it is restored", request)
        call = self._calls.restore(
            stream.spec, stream.blob, gateway, stream.epoch, stream.client_key
        )
        try:
            answer = texts(await run_async(self._redis, call))
        finally:
            # Its client may have left meanwhile, and Redis have answered the abort before.
            if not self._held.holds(stream):
                self._endings.owe_again(request)
        if answer[0] == "ok":
            stream.restored_by(gateway, Epoch(int(answer[1])))
        # "exists": another gateway restored it, or the reply was lost; the next check attaches it.
        return answer[0] != "unlisted"

    async def release_unread(self) -> None:
        """End or detach requests that Redis lists as this gateway's although no stream reads them:
        Redis lost the request's end or its move to another gateway, or the reply to a resumption
        was lost.
        """
        me = self._membership.id
        known = self._held.requests | self._endings.owed
        pairs = cast("set[bytes]", await self._redis.smembers(keys.worker_tasks(me)))
        listed = {RequestId(text(pair).partition("|")[0]) for pair in pairs}
        for request in listed - known - self._held.requests:
            if self._endings.owe_again(request):
                log.warning("request %s: Redis lost its end, which is sent again", request)
                continue
            log.warning(
                "request %s: no stream of this gateway reads its answer; it is detached", request
            )
            epoch = text(await self._redis.hget(keys.task(request, CLIENT), "epoch"))
            self._endings.owe(Detach(request=request, epoch=Epoch(int(epoch or 0)), gateway=me))
        await self._endings.send()
