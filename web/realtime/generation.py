"""An answer being made for a voice session: asked for, kept as it comes, and abandoned at once when nobody wants it any more.

It does not wait for being wanted: an answer begun on speculation is made like any other, and told when it is adopted. Knows no
conversation and no socket.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial

from fleet.core.errors import FleetError, InputTooLarge
from fleet.core.ids import RequestId, new_request_id
from web.gateway.answer import AnswerStream, AudioPiece, Piece, Position, skip_sent
from web.gateway.gateway import ActiveRequest, Gateway, RequestOverrides
from web.realtime.ask import shortened
from web.realtime.server_events import InputTokens, OutputTokenDetails, UsageBody
from web.schema.chat import ChatBody

log = logging.getLogger("fleet.web")

MAX_AHEAD_BYTES = 60 * 24_000 * 2
"""Sound nobody has taken yet; beyond it the answer is not read on, and its stages wait for credit."""


class Generation:
    """`text` and `pcm` (PCM16) grow until `ended`; then either `whole`, or `error` says why not.

    `shorten`: whether a conversation that is too long loses its oldest turns, or fails.

    Units: `asked_at`, `first_sound_at` seconds of `time.monotonic`.
    """

    def __init__(
        self, gateway: Gateway, body: ChatBody | None, request_id: RequestId | None = None, *, shorten: bool = True
    ) -> None:
        self.body = body
        self.shorten = shorten
        self.request_id = request_id or new_request_id()
        self.text = ""
        self.pcm = bytearray()
        self.taken_bytes = 0
        self.ended = False
        self.whole = False
        self.error: FleetError | None = None
        self.finish_reason = "stop"
        self.voice: str | None = None
        self.asked_at = time.monotonic()
        self._answer: AnswerStream | None = None
        self._gateway = gateway
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._guarded(lambda: self._make(Position())))

    def take_over(self) -> None:
        """Go on with a request that another gateway asked for: it is told again from its beginning."""
        self._task = asyncio.create_task(self._guarded(lambda: self._read_again(Position())))

    def make_rest(self, of: "Generation") -> None:
        """What the other had made is had; the same is asked for again, and told from there.

        One that was taken over has no body here: its request is sent again as it is written down.
        """
        self.text, self.pcm, self.voice = of.text, bytearray(of.pcm), of.voice
        if of.whole:
            self.ended = self.whole = True
            self.finish_reason, self._answer = of.finish_reason, of._answer
            return
        position = Position(len(of.text), len(of.pcm))
        make = self._make if self.body is not None else partial(self._send_again, of.request_id)
        self._task = asyncio.create_task(self._guarded(lambda: make(position)))

    def stop(self) -> asyncio.Task[None] | None:
        """The request ends everywhere, unless it has; nothing more is told."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
        return self._task

    def poke(self) -> None:
        """Whoever waits for `moved` looks again."""
        self._moved.set()

    async def moved(self, timeout_s: float | None) -> None:
        """Until something came, or so long."""
        self._moved.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._moved.wait()
        except TimeoutError:
            return

    def take(self, num_bytes: int) -> None:
        """The listener has been sent so much of the sound."""
        self.taken_bytes = num_bytes
        self._moved.set()

    async def _make(self, had: Position) -> None:
        opened = await self._open()
        self.voice = opened.voice
        async with opened.answer as answer:
            await self._collect(answer, had)

    async def _open(self) -> ActiveRequest:
        assert self.body is not None
        while True:
            try:
                return await self._gateway.submit(
                    self.body, self.request_id, RequestOverrides(where="conversation"), kind="voice"
                )
            except InputTooLarge:
                shorter = shortened(self.body) if self.shorten else None
                if shorter is None:
                    raise
                self.body = shorter

    async def _send_again(self, of: RequestId, had: Position) -> None:
        self.request_id = await self._gateway.client.operations.retry(of)
        await self._read_again(had)

    async def _read_again(self, had: Position) -> None:
        answer = await self._gateway.resume(self.request_id)
        if answer is None:
            raise FleetError("the answer under way is not known any more")
        self.voice = answer.spec.params.get("voice")
        async with answer:
            await self._collect(answer, had)

    async def _collect(self, answer: AnswerStream, had: Position) -> None:
        self._answer = answer
        async for piece in self._bounded(skip_sent(answer.pieces(), had)):
            if isinstance(piece, AudioPiece):
                self.pcm += piece.pcm
            else:
                self.text += piece.text
            self._moved.set()
        self.whole, self.finish_reason = True, answer.finish_reason

    async def _bounded(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        async for piece in pieces:
            yield piece
            while len(self.pcm) - self.taken_bytes > MAX_AHEAD_BYTES:
                await self.moved(None)

    async def _guarded(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """`work` is begun in here: a task that is cancelled before it began never gets so far."""
        try:
            await work()
        except FleetError as error:
            self.error = error
            await self._name_stage()
        except asyncio.CancelledError:
            self.error = FleetError("the answer was stopped")
            raise
        except Exception:
            # The loop of this answer: the story goes to the log, only it fails.
            log.exception("a voice answer failed")
            self.error = FleetError("the server failed; its log tells why")
        finally:
            self.ended = True
            self._moved.set()

    async def _name_stage(self) -> None:
        """Who listens must be told where it failed."""
        assert self.error is not None
        try:
            view = await self._gateway.client.telemetry.trace(self.request_id)
        except FleetError:
            return
        failed = next((task.stage for task in view.tasks if task.state == "failed"), None) if view is not None else None
        if failed is not None and failed not in self.error.message:
            self.error.message = f"{failed}: {self.error.message}"

    @property
    def first_sound_at(self) -> float | None:
        return self._answer.first_audio_at if self._answer is not None else None

    @property
    def num_trimmed(self) -> int:
        """Samples of leading silence that the stages made and that `pcm` does not begin with."""
        return self._answer.num_trimmed if self._answer is not None else 0

    @property
    def usage(self) -> UsageBody:
        """Of what has come so far."""
        if self._answer is None:
            return UsageBody()
        told = self._answer.usage()
        prompt, completion = told.prompt_tokens_details, told.completion_tokens_details
        return UsageBody(
            total_tokens=told.total_tokens,
            input_tokens=told.prompt_tokens,
            output_tokens=told.completion_tokens,
            input_token_details=InputTokens(
                text_tokens=prompt.text_tokens, audio_tokens=prompt.audio_tokens, cached_tokens=prompt.cached_tokens
            ),
            output_token_details=OutputTokenDetails(text_tokens=completion.text_tokens, audio_tokens=completion.audio_tokens),
        )
