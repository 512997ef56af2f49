"""Turns of the user in one voice session. Turns input audio into items; begins, interrupts and
resumes responses.

Knows no protocol of a socket and no session.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from fleet.core.errors import FleetError, InputTooLarge
from fleet.processing.voice_activity import RATE_HZ
from web.gateway.answer import BYTES_PER_SAMPLE
from web.openai.recognition import transcribe
from web.realtime.audio.echo import WINDOW_S
from web.realtime.audio.formats import PcmFormat
from web.realtime.audio.input_buffer import AudioInputBuffer
from web.realtime.audio.turn_audio import is_speech, trailing_silence
from web.realtime.audio.turn_detector import (
    TurnEvent,
    TurnPaused,
    TurnResumed,
    TurnRules,
    TurnStarted,
    TurnStopped,
)
from web.realtime.context import SessionContext
from web.realtime.conversation import NEW_SPEECH, Clip, Item, Part
from web.realtime.echo_guard import EchoGuard
from web.realtime.generation import Generation
from web.realtime.items import MIN_CLIP_MS, check_length
from web.realtime.partial_transcripts import PartialTranscript, PartialTranscripts
from web.realtime.protocol import server_events as server
from web.realtime.protocol.settings import Settings
from web.realtime.response_manager import ResponseManager
from web.realtime.response_plan import TurnTimestamps
from web.realtime.states import TURN_TABLE, TurnInput, TurnState, UserActivity, next_state
from web.realtime.turn_transcripts import TurnTranscripts, clip_name

log = logging.getLogger("fleet.web")

FALSE_ALARM_MS = 500
"""Length of voice, in milliseconds, below which a turn must be verified, since it may be a cough or
a hum: the audio must contain speech, and, if it interrupted a response, words.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the user that is under way. `start` is its first sample, in samples at 16 kHz since
    the beginning of the session's input.
    """

    item_id: str
    start: int


class TurnManager:
    def __init__(self, context: SessionContext, responses: ResponseManager) -> None:
        self._context, self._responses = context, responses
        self._gateway = context.gateway
        self._conversation = context.conversation
        self._clock = context.clock
        self._max_s = context.gateway.config.limits.max_audio_s
        form = context.settings.audio.input.format or PcmFormat()
        self.buffer = AudioInputBuffer(form, self._rules())
        self.echo = EchoGuard(context, responses)
        self.state = TurnState.IDLE
        self.num_interruptions = 0
        self._appending = asyncio.Lock()
        self._turn: Turn | None = None
        self._received_at = self._clock.now()
        """Time at which the last input arrived."""
        self._verifying = asyncio.Lock()
        self._num_unverified = 0
        """Number of ended turns that may be false alarms and are being verified."""
        self._deferred: TurnTimestamps | None = None
        """Timestamps of a turn that ended during a response which may not be interrupted. The
        response to the turn begins once that response has ended.
        """
        self.partials = PartialTranscripts(context, self.buffer.peek, lambda: self._is_transcribed)
        self.transcripts = TurnTranscripts(context, responses, self.partials)
        self.partials.listeners.append(self._on_partial)
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def is_user_speaking(self) -> bool:
        """Return True while the user speaks. Without turn detection, all input counts as speech."""
        detector = self.buffer.detector
        return detector.speaking if detector is not None else self.buffer.retained_ms > 0

    @property
    def activity(self) -> UserActivity:
        if not self.is_user_speaking:
            return UserActivity.SILENT
        return (
            UserActivity.SPEAKING
            if self._responses.interrupted is None
            else UserActivity.INTERRUPTING
        )

    def apply_settings(self, before: Settings) -> None:
        """Apply changed settings of the audio input; `before` are the former settings."""
        settings = self._context.settings
        form = settings.audio.input.format
        if form is not None and form != self.buffer.form:
            self.buffer.set_format(form)
        if form is None and before.audio.input.format is not None:
            self._discard_input()
        if settings.audio.input != before.audio.input:
            self.echo.reset()
        if settings.detection != before.detection:
            self.buffer.set_rules(self._rules())
            if not self.is_user_speaking:
                self._end(TurnInput.DISCARDED)

    def _discard_input(self) -> None:
        """Discard the input, which must not be joined to later audio, and end the turn under way
        without a response.
        """
        turn = self._end(TurnInput.DISCARDED)
        self.buffer.clear()
        self._responses.discard_speculative()
        if turn is not None:
            self._context.send(
                server.SpeechStopped(audio_end_ms=_ms(self.buffer.position), item_id=turn.item_id)
            )

    async def append(self, audio: bytes) -> bool:
        """Append audio in the client's format to the input and detect turns in it; return True if a
        turn began, paused or ended.

        Raises: InputTooLarge.
        """
        if not self.has_room(audio):
            raise InputTooLarge(
                f"audio: the buffer would hold more than {self._max_s:g} s; commit or clear it",
                param="audio",
            )
        is_changed = False
        self._received_at = self._clock.now()
        async with self._appending:
            for number, piece in enumerate(self.buffer.split(audio)):
                if number:
                    await asyncio.sleep(0)
                self.buffer.append(self.echo.pass_on(piece))
                is_changed |= await self._classify_frames()
                if self.buffer.detector is not None and not self.buffer.detector.is_quiet:
                    self.partials.add(self.buffer.position)
                self.buffer.drop_silence()
        return is_changed

    def has_room(self, audio: bytes) -> bool:
        """Return True if the buffer can take `audio`. With turn detection, buffered audio does not
        count.
        """
        new_s = self.buffer.seconds(audio)
        retained_s = self.buffer.retained_ms / 1000 if self.buffer.detector is None else 0.0
        return retained_s + new_s <= self._max_s

    async def _classify_frames(self) -> bool:
        is_changed = False
        batcher = self._context.shared.vad
        while (frame := self.buffer.next_frame()) is not None:
            if frame.is_silent:
                probability = 0.0
            else:
                probability = await batcher.probability(
                    self.buffer.vad, frame.samples, behind=self.buffer.is_behind
                )
            for event in self.buffer.classify(frame, probability):
                self._on_event(event)
                is_changed = True
        return is_changed

    def commit(self) -> None:
        """End the turn at the client's request, and add the buffered audio as an item. Raises:
        BufferEmpty.
        """
        check_length(self.buffer.retained_ms, self._gateway, self._context.settings)
        self._responses.discard_speculative()
        turn = self._end(TurnInput.COMMITTED)
        pcm = self.buffer.take_all()
        self._add_turn(
            turn.item_id if turn is not None else server.new_id("item"),
            pcm,
            self._timestamps_of(pcm),
        )
        self._transcribe_if_idle()

    def _timestamps_of(self, pcm: bytes) -> TurnTimestamps:
        """Return the timestamps of a turn that the client committed. The end of its speech is
        searched in its audio `pcm`.
        """
        now, silent = self._clock.now(), trailing_silence(pcm)
        if silent is None:
            return TurnTimestamps(decided=now)
        return TurnTimestamps(
            voiced_end=self._received_at - silent / RATE_HZ,
            voiced_end_ms=_ms(self.buffer.position - silent),
            decided=now,
        )

    def clear(self) -> None:
        self.buffer.clear()
        self._end(TurnInput.DISCARDED)
        self._responses.discard_speculative()
        self._context.send(server.Cleared())

    def on_idle_timeout(self) -> None:
        """Begin a response after the silence that the client set (`idle_timeout_ms`), although the
        user has not spoken.
        """
        end_ms, now = _ms(self.buffer.position), self._clock.now()
        item_id, start_ms = server.new_id("item"), max(0, end_ms - self.buffer.retained_ms)
        self._context.send(
            server.TimeoutTriggered(audio_start_ms=start_ms, audio_end_ms=end_ms, item_id=item_id)
        )
        if self.buffer.retained_ms >= MIN_CLIP_MS:
            self._end(TurnInput.COMMITTED)
            self._add_turn(item_id, self.buffer.take_all(), TurnTimestamps(decided=now))
        if self._responses.active is None:
            self._responses.respond(TurnTimestamps(decided=now))

    def on_response_ended(self) -> None:
        """Request waiting transcripts, and begin a deferred response if no response of the
        conversation is active.
        """
        if not self._hears_with_responses:
            self.transcripts.send_waiting()
        if self._deferred is not None and self._responses.active is None:
            timestamps, self._deferred = self._deferred, None
            self._responses.respond(timestamps)
        self.transcripts.send_waiting()

    def stop(self) -> None:
        self.partials.stop()
        self.transcripts.stop()
        for job in self._jobs:
            job.cancel()

    @property
    def _hears_with_responses(self) -> bool:
        """True if the transcript of a turn comes with the response to it."""
        return self._gateway.edges.heard is not None

    @property
    def _is_transcribed(self) -> bool:
        """Return True if the client wants transcripts, and the graph has a recogniser."""
        wanted = self._context.settings.audio.input.transcription is not None
        return wanted and self._hears_with_responses

    @property
    def _speculates(self) -> bool:
        return self._gateway.config.voice.speculate_ms > 0

    def _rules(self) -> TurnRules | None:
        return self._context.settings.rules(
            self._gateway.config.voice.speculate_ms,
            int(self._max_s * 1000),
            recognizes=self._hears_with_responses,
        )

    def _happened(self, happened: TurnInput) -> None:
        self.state = next_state(TURN_TABLE, self.state, happened)

    def _end(self, happened: TurnInput) -> Turn | None:
        """End the turn under way and return it; None without a turn."""
        self._happened(happened)
        if happened is not TurnInput.STOPPED:
            self.partials.stop()
        turn, self._turn = self._turn, None
        if turn is not None and happened is TurnInput.DISCARDED:
            self.transcripts.forget(turn.item_id)
        return turn

    def _on_event(self, event: TurnEvent) -> None:
        match event:
            case TurnStarted():
                self._on_start(event)
            case TurnPaused(end):
                self._on_pause(end)
            case TurnResumed():
                self._happened(TurnInput.RESUMED)
                self.partials.resume()
                self._responses.discard_speculative()
            case TurnStopped():
                self._on_stop(event)

    def _on_start(self, started: TurnStarted) -> None:
        last, detector = self.buffer.position, self.buffer.detector
        if self.echo.is_echo(self.buffer.peek(last - int(WINDOW_S * RATE_HZ), last)):
            assert detector is not None, "only turn detection begins turns"
            detector.reject()
            return
        self._happened(TurnInput.STARTED)
        self._turn = Turn(item_id=server.new_id("item"), start=started.start)
        self.partials.begin(self._turn.item_id, started.start)
        self._context.send(
            server.SpeechStarted(audio_start_ms=_ms(started.start), item_id=self._turn.item_id)
        )
        detection = self._context.settings.detection
        if not self._num_unverified:
            self._responses.forget_interrupted()
        if detection is not None and detection.interrupt_response and self._responses.interrupt():
            self.num_interruptions += 1
        if detection is not None and detection.create_response and self._speculates:
            self._responses.read_ahead()

    def _on_pause(self, end: int) -> None:
        self._happened(TurnInput.PAUSED)
        generation = self._start_speculative(end)
        if generation is not None and generation.hears(NEW_SPEECH):
            self._spawn(self._read_pause(generation, end))
            self.partials.pause(end, generation.transcript_of(NEW_SPEECH))
        else:
            self.partials.pause(end)

    def _start_speculative(self, end: int) -> Generation | None:
        detection, detector = self._context.settings.detection, self.buffer.detector
        turn = self._turn
        if detection is None or detector is None or turn is None or not detection.create_response:
            return None
        if self._responses.interrupted is not None and detector.voiced_ms < FALSE_ALARM_MS:
            return None
        return self._responses.start_speculative(Clip(self.buffer.peek(turn.start, end)))

    async def _read_pause(self, generation: Generation, end: int) -> None:
        """Read the words before the pause at `end`, which a speculative response brings."""
        try:
            text = "".join([delta async for delta in generation.transcript_of(NEW_SPEECH)])
        except FleetError:
            return
        self._expect_end(end, text)

    def _expect_end(self, end: int, text: str) -> None:
        """Let the words before the pause at `end` decide when the turn ends."""
        if (detector := self.buffer.detector) is not None:
            detector.expect_end(end, text)

    def _on_partial(self, partial: PartialTranscript) -> None:
        if partial.is_pause:
            self._expect_end(partial.end, partial.text)

    def _on_stop(self, stopped: TurnStopped) -> None:
        turn = self._end(TurnInput.STOPPED)
        assert turn is not None, "a turn that stops has started"
        self.transcripts.keep(turn.item_id, self.partials.end())
        self._context.send(
            server.SpeechStopped(audio_end_ms=_ms(stopped.end), item_id=turn.item_id)
        )
        pcm, now = self.buffer.take(turn.start, stopped.end), self._clock.now()
        silent_s = (self.buffer.position - stopped.voiced_end) / RATE_HZ
        voiced = pcm[: BYTES_PER_SAMPLE * (stopped.voiced_end - turn.start)]
        # the model calls 25 to 100 ms after the last voiced sample voiced too, more in noise
        after = trailing_silence(voiced) or 0
        timestamps = TurnTimestamps(
            voiced_end=now - silent_s - after / RATE_HZ,
            voiced_end_ms=_ms(stopped.voiced_end - after),
            decided=now,
        )
        is_echo = self._responses.interrupted is not None and self.echo.is_echo(voiced, silent_s)
        if is_echo:
            self.echo.on_self_interruption()
        may_be_false = is_echo or stopped.voiced_ms < FALSE_ALARM_MS
        if not self._num_unverified and not may_be_false:
            self._end_turn(turn, pcm, timestamps)
            return
        self._num_unverified += 1
        self._spawn(self._verify(turn, pcm, timestamps, may_be_false=may_be_false, is_echo=is_echo))

    async def _verify(
        self,
        turn: Turn,
        pcm: bytes,
        timestamps: TurnTimestamps,
        *,
        may_be_false: bool,
        is_echo: bool,
    ) -> None:
        """Add a turn to the conversation unless it is a false alarm, and begin the response. If the
        user speaks again meanwhile, only the last turn begins a response. After a false alarm, the
        interrupted response is resumed.

        A turn must contain speech; if it interrupted a response, words. Speech is found within
        milliseconds. Only a short interruption waits for a transcript. Turns are verified in order.
        """
        heard: str | None = None
        try:
            async with self._verifying:
                if not is_echo and may_be_false and self._responses.interrupted is not None:
                    heard = await self._recognize(turn, pcm)
                    is_turn = bool(heard)
                else:
                    is_turn = not is_echo and (not may_be_false or await is_speech(pcm))
        finally:
            self._num_unverified -= 1
        has_continued = self.is_user_speaking or self._num_unverified > 0
        if is_turn and has_continued:
            self._responses.forget_interrupted()
            self._add_turn(turn.item_id, pcm, timestamps, heard)
            self._transcribe_if_idle()
        elif is_turn:
            self._end_turn(turn, pcm, timestamps, heard)
        else:
            self.transcripts.forget(turn.item_id)
            self._responses.discard_speculative()
            if not has_continued:
                self._responses.resume_interrupted()

    async def _recognize(self, turn: Turn, pcm: bytes) -> str:
        """Return the transcript of a short interruption; "" also if it cannot be transcribed."""
        try:
            known = await self.transcripts.recognized(turn.item_id)
            if known is not None:
                return known
            settings = self._context.settings
            return await transcribe(
                self._gateway, Clip(pcm).recording, settings.hearing, settings.store_option
            )
        except FleetError as error:
            log.warning(
                "an interruption counts as a false alarm, since it could not be transcribed: %s",
                error.message,
            )
            return ""

    def _end_turn(
        self, turn: Turn, pcm: bytes, timestamps: TurnTimestamps, heard: str | None = None
    ) -> None:
        detection = self._context.settings.detection
        is_answered = detection is not None and detection.create_response
        generation = self._responses.take_speculative()
        self._responses.forget_interrupted()
        self._add_turn(turn.item_id, pcm, timestamps, heard)
        if generation is not None:
            generation.name_speech(clip_name(turn.item_id))
        if is_answered and self._responses.active is None:
            self._responses.respond(timestamps, generation)
        elif is_answered:
            self._deferred = timestamps
        self._transcribe_if_idle()
        self.transcripts.send_with_response()

    def _add_turn(
        self, item_id: str, pcm: bytes, timestamps: TurnTimestamps, heard: str | None = None
    ) -> None:
        """Add the item of a turn. `heard` is its transcript, None if it is not known."""
        self._context.send(
            server.Committed(previous_item_id=self._conversation.last_id, item_id=item_id)
        )
        name = clip_name(item_id)
        item = Item(id=item_id, role="user", parts=[Part(kind="input_audio", clip=name)])
        self._context.add_item(item, {name: Clip(pcm)})
        if heard is not None:
            self._conversation.set_transcript(item_id, 0, heard)
        self._responses.note_turn(item_id, timestamps)
        if self._context.settings.audio.input.transcription is not None:
            self.transcripts.add(item_id)
        else:
            self.transcripts.forget(item_id)

    def _transcribe_if_idle(self) -> None:
        if self._responses.active is None:
            self.transcripts.send_waiting()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._on_job_done)

    def _on_job_done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("the processing of a user's turn failed", exc_info=error)


def _ms(position: int) -> int:
    return position * 1000 // RATE_HZ
