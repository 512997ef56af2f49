"""Source of captures in one process: limits their number, lets clients' requests go first, and
counts the outcomes.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from fleet.config import FleetConfig
from fleet.control.requests import GatewayRequests
from fleet.control.stream import ClientStream
from fleet.control.training import Outcome, TrainingClient
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.errors import FleetError, Overloaded, RedisUnreachable, SampleRefused, TransferError
from fleet.core.ids import RequestId, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.capture.room import CaptureSlots
from fleet.graphs.training import PUBLISH, TRAINED

log = logging.getLogger(__name__)
KIND = "capture"
T = TypeVar("T")
AWAY_S = 60.0
"""Longest time for which `patiently` repeats a call while Redis is unreachable."""
RETRY_S = 0.2
NO_ROOM_TRIES = 5
"""Number of tries as the only capture of this process after which a capture is refused; before,
captures of other processes may have taken the room.
"""
NO_ROOM_PAUSE_S = 1.0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, repeating it while Redis is unreachable.

    Raises: RedisUnreachable after `AWAY_S`.
    """
    deadline_s = time.monotonic() + AWAY_S
    while True:
        try:
            return await call()
        except RedisUnreachable:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPrompt:
    """A prompt as it was submitted, with its answer's token ids. `blob`: the prompt's audio."""

    spec: RequestSpec
    answer: Sequence[int]
    blob: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """The trainer's acknowledgement of a sample, which is then in a durable checkpoint.

    `request`: id of the capture request. `windows`: optimizer steps in the checkpoint. `version`:
    version of the draft head made of the checkpoint; 0 if none was made.
    """

    request: RequestId
    windows: int
    version: int


class CapturePort(Protocol):
    """The part of `FleetClient` that captures use."""

    @property
    def requests(self) -> GatewayRequests: ...
    @property
    def training(self) -> TrainingClient: ...


class CaptureSource:
    """Submits captures to the fleet, at most `training.max_in_flight` at a time, and fewer while
    their hidden states have no room in a worker's arena. Used on one event loop.
    """

    def __init__(self, client: CapturePort, config: FleetConfig) -> None:
        self._client, self._most = client, config.training.max_in_flight
        self._main = config.graph_declaration().main_stage.name
        self._slots = CaptureSlots(self._most)
        self._offered: set[asyncio.Task[None]] = set()

    async def capture(self, answered: AnsweredPrompt, *, publish: str = "") -> Acknowledged:
        """Wait for a free slot and until no other request waits, submit one sample, and wait for
        the trainer's acknowledgement.

        `publish`: see `graphs.training.PUBLISH`. If the caller is cancelled, the sample is aborted.
        The sample is submitted again if it was lost with Redis, or had no room beside other
        captures; its outcome is counted in Redis. Raises: SampleRefused if it has no room even
        alone; FleetError of the request, NoWorker.
        """
        try:
            done = await self._captured_in_room(answered, publish)
        except FleetError:
            await self._count("failed")
            raise
        await self._count("acknowledged")
        return done

    async def _captured_in_room(self, answered: AnsweredPrompt, publish: str) -> Acknowledged:
        num_alone = 0
        while True:
            async with self._slots.take() as slot:
                try:
                    done = await patiently(lambda: self._captured(answered, publish))
                    self._slots.note_success()
                    return done
                except TransferError as error:
                    failure = error
            num_alone += slot.is_alone
            if num_alone == NO_ROOM_TRIES:
                raise SampleRefused(
                    f"the rows of an answer were not transferred: {failure.message}"
                ) from failure
            self._slots.note_no_room(slot, failure)
            await asyncio.sleep(NO_ROOM_PAUSE_S if slot.is_alone else 0)

    async def _count(self, outcome: Outcome) -> None:
        await patiently(lambda: self._client.training.count(outcome))

    async def _captured(self, answered: AnsweredPrompt, publish: str) -> Acknowledged:
        while await self._client.training.has_waiting():
            await asyncio.sleep(RETRY_S)
        spec = self._spec_of(answered, publish)
        stream = await self._submit(spec, answered.blob)
        ended = False
        try:
            last = [chunk async for chunk in stream][-1]
            ended = True
        finally:
            if not ended:
                await stream.abort("the capture was given up")
        return Acknowledged(
            request=spec.id, windows=_number(last, "windows"), version=_number(last, "version")
        )

    async def _submit(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        """Submit a capture once the fleet has room for it. If the caller is cancelled, the request
        is aborted.
        """
        while True:
            submitting = asyncio.ensure_future(self._client.requests.submit(spec, blob))
            try:
                return await asyncio.shield(submitting)
            except Overloaded:
                await asyncio.sleep(RETRY_S)
            except asyncio.CancelledError:
                # the script may have written the request: wait for its result before the abort
                with contextlib.suppress(FleetError):
                    await (await submitting).abort("the capture was given up")
                raise

    def _spec_of(self, answered: AnsweredPrompt, publish: str) -> RequestSpec:
        given = answered.spec
        return RequestSpec(
            id=new_request_id(),
            graph=given.graph,
            prompt_ids=given.prompt_ids,
            audio=given.audio,
            outputs=(TRAINED,),
            sampling={self._main: Sampling(max_tokens=len(answered.answer))},
            params={PUBLISH: publish} if publish else {},
            kind=KIND,
            model=given.model,
            given=tuple(answered.answer),
            created_us=now_us(),
        )

    def offer(self, answered: AnsweredPrompt) -> None:
        """Capture a live answer in the background; drop it, and count it as `shed`, if other
        requests wait or enough captures are in flight. A failure is logged only.
        """
        offered = asyncio.create_task(self._offer(answered))
        self._offered.add(offered)
        offered.add_done_callback(self._offered.discard)

    async def _offer(self, answered: AnsweredPrompt) -> None:
        try:
            if len(self._offered) > self._most or await self._client.training.has_waiting():
                await self._count("shed")
                return
            await self.capture(answered)
        except FleetError as error:
            log.warning("an answer was not trained on: %s", error.message)

    async def stop(self) -> None:
        """Cancel all captures of live answers, and wait for their end."""
        offered = list(self._offered)
        for task in offered:
            task.cancel()
        await asyncio.gather(*offered, return_exceptions=True)


def _number(chunk: Chunk, name: str) -> int:
    data = chunk.tensors[name].data
    assert data is not None, f"an acknowledgement without {name}"
    return int(np.frombuffer(data, "<i8")[0])
