"""A run of the model for a response: submitted, collected as it arrives, and stopped when its
response is discarded.

A speculative generation is collected like any other before a response adopts it. Knows no
conversation and no socket.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial

from fleet.core.errors import AlreadySubmitted, FleetError, InputTooLarge, RedisUnreachable
from fleet.core.ids import RequestId, new_request_id
from web.gateway.answer import AnswerStream, AudioPiece, Piece, Position, skip_sent
from web.gateway.gateway import ActiveRequest, Gateway
from web.realtime.clock import Clock
from web.realtime.prompt import Prompt
from web.realtime.protocol.server_events import InputTokens, OutputTokenDetails, UsageBody

log = logging.getLogger("fleet.web")

MAX_UNSENT_BYTES = 60 * 24_000 * 2
"""Audio not sent to the client yet, beyond which the answer is read no further and its stages wait
for credit.
"""
RESUME_PAUSE_S = 0.25
"""Pause between two tries to continue an answer while Redis is away."""


class Generation:
    """`text` and `pcm` (PCM16) grow until `is_ended`; then `is_complete`, or `error` has the cause.

    `shorten`: drop the oldest turns of a prompt that is too long, instead of failing.
    """

    def __init__(
        self,
        gateway: Gateway,
        clock: Clock,
        prompt: Prompt | None,
        request_id: RequestId | None = None,
        *,
        shorten: bool = True,
    ) -> None:
        self.prompt = prompt
        self.shorten = shorten
        self.request_id = request_id or new_request_id()
        self.text = ""
        self.pcm = bytearray()
        self.is_ended = False
        self.is_complete = False
        self.error: FleetError | None = None
        self.finish_reason = "stop"
        self._released_bytes = 0
        self._answer: AnswerStream | None = None
        self._gateway, self._clock = gateway, clock
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._spawn(lambda: self._generate(Position()))

    def adopt(self) -> None:
        """Read a request of another gateway from its beginning. If that gateway was lost before it
        could submit the request, submit it, provided there is a prompt.
        """
        self._spawn(lambda: self._read(Position()))

    def continue_from(self, other: "Generation") -> None:
        """Take over the output of `other`, and generate the rest of it by the same prompt and seed.

        One that was adopted has no prompt here: its request is submitted again as it is stored.
        """
        self.text, self.pcm = other.text, bytearray(other.pcm)
        if other.is_complete:
            self.is_ended = self.is_complete = True
            self.finish_reason, self._answer = other.finish_reason, other._answer
            return
        position = Position(len(other.text), len(other.pcm))
        generate = (
            self._generate if self.prompt is not None else partial(self._retry, other.request_id)
        )
        self._spawn(lambda: generate(position))

    def stop(self) -> asyncio.Task[None] | None:
        """Abort the request unless it has ended. Returns the task in which that happens."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
        return self._task

    def wake(self) -> None:
        """End the current `wait_for_progress`."""
        self._progress.set()

    async def wait_for_progress(self, timeout_s: float | None) -> None:
        """Wait until more was generated or sent, or the time is over."""
        self._progress.clear()
        await self._clock.wait(self._progress, timeout_s)

    def release(self, num_bytes: int) -> None:
        """Note that `num_bytes` of the audio were sent, so that more of it may be read."""
        self._released_bytes = num_bytes
        self._progress.set()

    def _spawn(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._task = asyncio.create_task(self._run(work))

    async def _generate(self, position: Position) -> None:
        active = await self._submit()
        async with active.answer as answer:
            await self._collect(answer, position)

    async def _submit(self) -> ActiveRequest:
        assert self.prompt is not None
        while True:
            try:
                return await self.prompt.submit(self._gateway, self.request_id)
            except InputTooLarge:
                shorter = self.prompt.shortened() if self.shorten else None
                if shorter is None:
                    raise
                self.prompt = shorter

    async def _retry(self, request_id: RequestId, position: Position) -> None:
        self.request_id = await self._gateway.client.operations.retry(request_id)
        await self._read(position)

    async def _read(self, position: Position) -> None:
        answer = await self._resume()
        if answer is None:
            await self._submit_adopted(position)
            return
        self.prompt = None  # the request as it is stored prevails
        async with answer:
            await self._collect(answer, position)

    async def _submit_adopted(self, position: Position) -> None:
        if self.prompt is None:
            raise FleetError("the response under way is not stored any more; ask again")
        log.warning(
            "request %s of a voice session was never submitted by its gateway; this one submits it",
            self.request_id,
        )
        try:
            await self._generate(position)
        except AlreadySubmitted:  # meanwhile, by its gateway
            await self._read(position)

    async def _resume(self) -> AnswerStream | None:
        """Continue the answer of a request; None if it is unknown. Wait while Redis is away, as the
        answer's workers do.
        """
        logged = ""
        while True:
            try:
                return await self._gateway.resume(self.request_id)
            except RedisUnreachable as error:
                if error.message != logged:
                    logged = error.message
                    log.warning(
                        "request %s of a voice session waits to be continued: %s",
                        self.request_id,
                        logged,
                    )
            await self._clock.sleep(RESUME_PAUSE_S)

    async def _collect(self, answer: AnswerStream, position: Position) -> None:
        self._answer = answer
        async for piece in self._bounded(skip_sent(answer.pieces(), position)):
            if isinstance(piece, AudioPiece):
                self.pcm += piece.pcm
            else:
                self.text += piece.text
            self._progress.set()
        self.is_complete, self.finish_reason = True, answer.finish_reason

    async def _bounded(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        async for piece in pieces:
            yield piece
            while len(self.pcm) - self._released_bytes > MAX_UNSENT_BYTES:
                await self.wait_for_progress(None)

    async def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Do the work, which begins in here: a task that is cancelled before its start runs none of
        its code.
        """
        try:
            await work()
        except FleetError as error:
            self.error = error
            await self._name_stage(error)
        except asyncio.CancelledError:
            self.error = FleetError("the response was stopped")
            raise
        except Exception:
            # The process loop of one generation: the cause is logged, and only this response fails.
            log.exception("request %s of a voice session failed", self.request_id)
            self.error = FleetError("the server failed; the cause is in its log")
        finally:
            self.is_ended = True
            self._progress.set()

    async def _name_stage(self, error: FleetError) -> None:
        """Prefix the message of a failure with the stage that failed."""
        try:
            view = await self._gateway.client.telemetry.trace(self.request_id)
        except FleetError:
            return
        failed = (
            next((task.stage for task in view.tasks if task.state == "failed"), None)
            if view is not None
            else None
        )
        if failed is not None and failed not in error.message:
            error.message = f"{failed}: {error.message}"

    @property
    def first_audio_at(self) -> float | None:
        """Arrival of the first audio, in seconds of `time.monotonic`."""
        return self._answer.first_audio_at if self._answer is not None else None

    @property
    def num_trimmed(self) -> int:
        """Samples of leading silence that the stages generated and that `pcm` does not contain."""
        return self._answer.num_trimmed if self._answer is not None else 0

    @property
    def usage(self) -> UsageBody:
        """Token counts of what has arrived so far."""
        if self._answer is None:
            return UsageBody()
        usage = self._answer.usage()
        prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
        return UsageBody(
            total_tokens=usage.total_tokens,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            input_token_details=InputTokens(
                text_tokens=prompt.text_tokens,
                audio_tokens=prompt.audio_tokens,
                cached_tokens=prompt.cached_tokens,
            ),
            output_token_details=OutputTokenDetails(
                text_tokens=completion.text_tokens, audio_tokens=completion.audio_tokens
            ),
        )
