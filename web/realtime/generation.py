"""The generation of a response by the model: submitted, collected as it arrives, and aborted when
its response is discarded.

A speculative generation is collected in the same way before there is a response for it. Knows no
conversation and no socket.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial

from fleet.control.client import VoiceHold
from fleet.core.errors import AlreadySubmitted, FleetError, InputTooLarge, RedisUnreachable
from fleet.core.ids import RequestId, new_request_id
from fleet.core.request import RequestSpec
from web.gateway.answer import (
    AnswerStream,
    AudioPiece,
    HeardPiece,
    Piece,
    Position,
    skip_sent,
)
from web.gateway.answer_calls import CallPiece, CollectedCall, collect
from web.gateway.answer_words import WordEnd
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import ActiveRequest
from web.realtime.clock import Clock
from web.realtime.conversation import NEW_SPEECH
from web.realtime.prompt import Prompt
from web.realtime.protocol.server_events import InputTokens, OutputTokenDetails, UsageBody
from web.realtime.recognitions import Recognitions

log = logging.getLogger("fleet.web")

MAX_UNSENT_BYTES = 60 * 24_000 * 2
"""Limit of generated audio that was not sent to the client. Beyond it the answer is not read
further, and its stages stop for lack of credit.
"""
RESUME_PAUSE_S = 0.25
"""Seconds between two tries to continue an answer while Redis is unreachable."""


class Generation:
    """A request to the model and its output so far. `text` and `pcm` (PCM16) grow until `is_ended`;
    then either `is_complete` is True or `error` has the cause.

    `prompt` is None for a request of another gateway whose prompt is unknown. `shorten`: True to
    drop the oldest turns of a prompt that is too long, False to fail. `recognitions`: recognitions
    under way in the session. The prompt is submitted once its clips are no longer being recognised,
    with their transcripts; a clip without a transcript stays audio.
    """

    def __init__(
        self,
        gateway: Gateway,
        clock: Clock,
        prompt: Prompt | None,
        request_id: RequestId | None = None,
        *,
        shorten: bool = True,
        recognitions: Recognitions | None = None,
    ) -> None:
        self.prompt = prompt
        self.shorten = shorten
        self.request_id = request_id or new_request_id()
        self.text = ""
        self.calls: list[CollectedCall] = []
        """Function calls of the answer, after its text."""
        self.heard: dict[str, str] = {}
        """Transcript of each clip of the prompt by name, as far as it has arrived."""
        self.is_heard = False
        self.on_heard: Callable[[str, str], None] = lambda _name, _text: None
        """Function that is called for each clip, with its name and transcript, once the transcripts
        of all clips are complete.
        """
        self._recognitions = recognitions
        self._recognized: list[str] = []
        """Names of the clips that are marked as being recognised by this request."""
        self._stored_names: list[str] = []
        self.pcm = bytearray()
        self.is_ended = False
        self.is_complete = False
        self.error: FleetError | None = None
        self.finish_reason = "stop"
        self._released_bytes = 0
        self._answer: AnswerStream | None = None
        self._earlier_word_ends: list[WordEnd] | None = None
        """Word ends of the generation that this one continues; None if there is no such generation.
        """
        self._voice: Callable[[], VoiceHold] | None = None
        self._gateway, self._clock = gateway, clock
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._spawn(lambda: self._generate(Position()))

    def adopt(self, voice: Callable[[], VoiceHold]) -> None:
        """Collect, from its beginning, the answer to a request that another gateway submitted. If
        that gateway was lost before it submitted the request, submit the request, provided that
        `prompt` is known.

        `voice`: returns the session, and the epoch at which this gateway holds it. A gateway that
        has lost the session to another gateway meanwhile is refused the answer.
        """
        self._voice = voice
        self._spawn(lambda: self._read(Position()))

    def continue_from(self, other: "Generation") -> None:
        """Take over the output of `other`, and generate the rest of the answer with the same prompt
        and seed. If `other` is complete, nothing is submitted.

        Without a `prompt` (if `other` was adopted from another gateway), the stored request of
        `other` is submitted again.
        """
        self.text, self.pcm = other.text, bytearray(other.pcm)
        self.calls = [replace(call) for call in other.calls]
        self._earlier_word_ends = other.word_ends
        self.on_heard = other.on_heard
        if other.is_complete:
            self.is_ended = self.is_complete = True
            self.finish_reason, self._answer = other.finish_reason, other._answer
            return
        num_called = sum(1 + len(call.arguments) for call in other.calls)
        position = Position(len(other.text) + num_called, len(other.pcm))
        generate = (
            self._generate if self.prompt is not None else partial(self._retry, other.request_id)
        )
        self._spawn(lambda: generate(position))

    def stop(self) -> asyncio.Task[None] | None:
        """Abort the request unless it has ended. Returns the task of the generation, whose end
        completes the abort; None if no generation was started.
        """
        if self._task is not None and not self._task.done():
            self._task.cancel()
        return self._task

    def wake(self) -> None:
        """End a `wait_for_progress` that is under way."""
        self._progress.set()

    async def wait_for_progress(self, timeout_s: float | None) -> None:
        """Wait until more was generated or sent, until `wake` is called, or until `timeout_s` have
        passed.
        """
        self._progress.clear()
        await self._clock.wait(self._progress, timeout_s)

    def hears(self, clip: str) -> bool:
        """Return True if the transcript of this clip comes with the answer."""
        return self._gateway.edges.heard is not None and clip in self._clip_names

    def name_speech(self, clip: str) -> None:
        """Name the clip that the turn had as `NEW_SPEECH` before it became an item; `clip` is the
        new name.
        """
        if self.prompt is not None:
            self.prompt = self.prompt.renamed(NEW_SPEECH, clip)
        self._begin_recognition([clip])
        if NEW_SPEECH in self.heard:
            self.heard[clip] = self.heard.pop(NEW_SPEECH)
            if self.is_heard:
                self.on_heard(clip, self.heard[clip])

    async def transcript_of(self, clip: str) -> AsyncIterator[str]:
        """Yield the transcript of a clip as it arrives. Raises: FleetError if the generation ends
        before the transcript, or turns out not to bring it.
        """
        num_sent = 0
        while True:
            if delta := self.heard.get(clip, "")[num_sent:]:
                num_sent += len(delta)
                yield delta
            elif self.is_heard:
                return
            elif self.is_ended or clip not in self._clip_names:
                raise self.error or FleetError("the response ended before its transcript")
            else:
                await self.wait_for_progress(None)

    @property
    def _clip_names(self) -> list[str]:
        return self.prompt.clip_names if self.prompt is not None else self._stored_names

    def _hear(self, piece: HeardPiece, spec: RequestSpec) -> None:
        names = self._clip_names
        if len(names) != len(spec.audio):
            return
        name = names[piece.clip]
        self.heard[name] = (self.heard.get(name, "") + piece.text).lstrip()
        self.is_heard = piece.is_last
        for name in names if piece.is_last else ():
            self.on_heard(name, self.heard.setdefault(name, ""))
        if piece.is_last:
            self._end_recognition()

    def _begin_recognition(self, clips: Sequence[str]) -> None:
        """Mark clips of the prompt as being recognised by this request, if the graph does so."""
        if self._recognitions is None or self._gateway.edges.heard is None:
            return
        if not self.is_heard and not self.is_ended:
            named = [clip for clip in clips if clip != NEW_SPEECH]
            self._recognitions.begin(named)
            self._recognized += named

    def _end_recognition(self) -> None:
        if self._recognitions is not None:
            self._recognitions.end(self._recognized)
            self._recognized = []

    def release(self, num_bytes: int) -> None:
        """Record that the first `num_bytes` of the audio were sent, so that more of the answer may
        be read.
        """
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
        if self._recognitions is not None:
            await self._recognitions.until_ended(self.prompt.clip_names)
            self.prompt = self._recognitions.with_transcripts(self.prompt)
            self._begin_recognition(self._clip_names)
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
        self._stored_names = self.prompt.clip_names if self.prompt is not None else []
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
        """Return the answer stream of a request of another gateway; None if the request is unknown.
        Waits while Redis is unreachable. Raises: ResumedElsewhere, NotFound.
        """
        logged = ""
        while True:
            try:
                voice = self._voice() if self._voice is not None else None
                return await self._gateway.resume(self.request_id, voice)
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
            elif isinstance(piece, HeardPiece):
                self._hear(piece, answer.spec)
            elif isinstance(piece, CallPiece):
                collect(self.calls, piece)
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
        """Await `work` and record how it ended. The coroutine is created in here, since a task that
        is cancelled before its start would leave it unawaited.
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
            self._end_recognition()
            self._progress.set()

    async def _name_stage(self, error: FleetError) -> None:
        """Prefix the message of an error with the name of the stage that failed, if the trace shows
        it.
        """
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
    def word_ends(self) -> list[WordEnd] | None:
        """Ends of the words of `text` in `text` and in `pcm`, as far as the audio has arrived; None
        if the graph does not tell them.
        """
        known = self._answer.word_ends if self._answer is not None else None
        earlier = self._earlier_word_ends
        return known if earlier is None or len(known or ()) >= len(earlier) else earlier

    @property
    def usage(self) -> UsageBody:
        """Token counts of the output that has arrived so far."""
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
