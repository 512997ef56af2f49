"""The user's turns: what is heard becomes items, answers are begun early, cut short, or go on, and words are written down later.

Knows no protocol of a socket; the session tells it what came.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import FleetError, InputTooLarge
from fleet.processing.voice_onset import VoicedSearch
from web.gateway.gateway import Gateway
from web.http.errors import error_type
from web.openai.transcription import transcribe
from web.realtime import server_events as say
from web.realtime import vad
from web.realtime.client_connection import ClientConnection
from web.realtime.conversation import Clip, Conversation, Item, Part
from web.realtime.input_buffer import AudioInputBuffer
from web.realtime.items import MIN_CLIP_MS
from web.realtime.response_manager import BufferEmpty, ResponseManager
from web.realtime.response_stream import TurnTimestamps
from web.realtime.settings import INPUT_FORMAT, PcmFormat, Settings
from web.realtime.turns import RATE_HZ, GoesOn, Paused, Started, Stopped, TurnEvent, TurnRules
from web.schema.chat import InputAudio, InputAudioPartBody, MessageBody

log = logging.getLogger("fleet.web")

FALSE_ALARM_MS = 500
"""Speech shorter than this, without words, was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the user is saying. `start` in samples at 16 kHz of all that the session heard."""

    item_id: str
    start: int


class TurnManager:
    def __init__(
        self, gateway: Gateway, line: ClientConnection, conversation: Conversation, replies: ResponseManager,
        settings: Callable[[], Settings], add: Callable[[Item, dict[str, Clip]], None], together: vad.Together,
    ) -> None:  # fmt: skip
        self._gateway, self._line, self._conversation, self._replies = gateway, line, conversation, replies
        self._settings, self._add = settings, add
        self._max_s = gateway.config.limits.max_audio_s
        form = settings().audio.input.format or PcmFormat()
        self.ear = AudioInputBuffer(form.rate, self._rules())
        self.interruptions = 0
        self._together = together
        self._hearing = asyncio.Lock()
        self._turn: Turn | None = None
        self._came_at = time.monotonic()
        """When the last audio came."""
        self._judging = asyncio.Lock()
        self._unjudged = 0
        """Turns that are over, and of which it is not decided yet whether they were any."""
        self._owed: TurnTimestamps | None = None
        """A turn that ended under an answer which may not be interrupted: it is answered next."""
        self._unwritten: list[str] = []
        """Items whose words nobody wrote down yet: that waits until the answer has begun."""
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def hearing(self) -> bool:
        """Somebody speaks; without a detector, whatever the client sends is taken for speech."""
        detector = self.ear.detector
        return detector.speaking if detector is not None else self.ear.kept_ms > 0

    def changed(self, before: Settings) -> None:
        """The settings are others now."""
        now = self._settings()
        form = now.audio.input.format
        if form is not None and form.rate != self.ear.rate_hz:
            self.ear.set_rate(form.rate)
        if form is None and before.audio.input.format is not None:
            self._discard()
        if now.detection != before.detection:
            self.ear.listen(self._rules())
            if not self.hearing:
                self._turn = None

    def _discard(self) -> None:
        """Drop what was heard, since none of what comes next belongs to it, and end the turn under way without an answer."""
        turn, self._turn = self._turn, None
        self.ear.clear()
        self._replies.drop_ahead()
        if turn is not None:
            self._line.tell(say.SpeechStopped(audio_end_ms=self._ms(self.ear.position), item_id=turn.item_id))

    async def hear(self, pcm: bytes) -> bool:
        """Whether a turn began, paused or ended in it. Raises: InputTooLarge."""
        coming_s = len(pcm) / 2 / self.ear.rate_hz
        held_s = self.ear.kept_ms / 1000 if self.ear.detector is None else 0.0
        if held_s + coming_s > self._max_s:
            raise InputTooLarge(f"audio: the buffer would hold more than {self._max_s:g} s; commit or clear it", param="audio")
        told = False
        self._came_at = time.monotonic()
        async with self._hearing:
            for number, piece in enumerate(self.ear.pieces(pcm)):
                if number:
                    await asyncio.sleep(0)
                self.ear.hear(piece)
                told |= await self._judge_frames()
                self.ear.forget_silence()
        return told

    async def _judge_frames(self) -> bool:
        """Together with that of others: see `vad.Together`."""
        told = False
        while (frame := self.ear.next_frame()) is not None:
            if frame.still:
                probability = 0.0
            else:
                probability = await self._together.probability(self.ear.vad, frame.samples, behind=self.ear.is_behind)
            for event in self.ear.judged(frame, probability):
                self._on_turn(event)
                told = True
        return told

    def commit(self) -> None:
        """The client says that the turn is over. Raises: BufferEmpty."""
        if self.ear.kept_ms < MIN_CLIP_MS:
            unread = f" ({INPUT_FORMAT} is refused, so audio is not read)" if self._settings().audio.input.format is None else ""
            least = f"at least {MIN_CLIP_MS} ms are needed"
            raise BufferEmpty(f"the input buffer holds {self.ear.kept_ms} ms of audio; {least}{unread}")
        self._replies.drop_ahead()
        turn, self._turn = self._turn, None
        pcm = self.ear.take_all()
        self._add_turn(turn.item_id if turn is not None else say.new_id("item"), pcm, self._marks_of(pcm))
        self._write_down_unless_answered()

    def _marks_of(self, pcm: bytes) -> TurnTimestamps:
        """Find the end of the speech in audio that the client committed: no detector has judged where it lies."""
        silent = _trailing_silence(pcm)
        if silent is None:
            return TurnTimestamps()
        return TurnTimestamps(voiced_end=self._came_at - silent / RATE_HZ, voiced_end_ms=self._ms(self.ear.position - silent))

    def clear(self) -> None:
        self.ear.clear()
        self._turn = None
        self._replies.drop_ahead()
        self._line.tell(say.Cleared())

    def time_out(self) -> None:
        """Nobody said anything for so long that the model speaks by itself."""
        end_ms = self._ms(self.ear.position)
        item_id, start_ms = say.new_id("item"), max(0, end_ms - self.ear.kept_ms)
        self._line.tell(say.TimeoutTriggered(audio_start_ms=start_ms, audio_end_ms=end_ms, item_id=item_id))
        if self.ear.kept_ms >= MIN_CLIP_MS:
            self._add_turn(item_id, self.ear.take_all(), TurnTimestamps())
        if self._replies.active is None:
            self._replies.answer(TurnTimestamps())

    def on_answer_begun(self) -> None:
        """The first sound left: now there is time to write down what the user said."""
        self._write_down()

    def on_answer_over(self) -> None:
        """Of the conversation or outside of it: what is owed waits for that of the conversation."""
        self._write_down()
        if self._owed is not None and self._replies.active is None:
            marks, self._owed = self._owed, None
            self._replies.answer(marks)

    def stop(self) -> None:
        for job in self._jobs:
            job.cancel()

    def _rules(self) -> TurnRules | None:
        return self._settings().rules(self._gateway.config.voice.speculate_ms, int(self._max_s * 1000))

    def _on_turn(self, event: TurnEvent) -> None:
        match event:
            case Started():
                self._on_start(event)
            case Paused(end):
                self._on_pause(end)
            case GoesOn():
                self._replies.drop_ahead()
            case Stopped():
                self._on_stop(event)

    def _on_start(self, started: Started) -> None:
        self._turn = Turn(item_id=say.new_id("item"), start=started.start)
        self._line.tell(say.SpeechStarted(audio_start_ms=self._ms(started.start), item_id=self._turn.item_id))
        detection = self._settings().detection
        if not self._unjudged:
            self._replies.forget_interrupted()
        if detection is not None and detection.interrupt_response and self._replies.interrupt(time.monotonic()):
            self.interruptions += 1

    def _on_pause(self, end: int) -> None:
        detection, detector, turn = self._settings().detection, self.ear.detector, self._turn
        if detection is None or detector is None or turn is None or not detection.create_response:
            return
        if self._replies.interrupted is not None and detector.voiced_ms < FALSE_ALARM_MS:
            return
        clip = Clip(self.ear.peek(turn.start, end))
        sound = InputAudioPartBody(type="input_audio", input_audio=InputAudio(data=clip.file(), format="wav"))
        self._replies.begin_ahead(MessageBody(role="user", content=[sound]))

    def _on_stop(self, stopped: Stopped) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self._line.tell(say.SpeechStopped(audio_end_ms=self._ms(stopped.end), item_id=turn.item_id))
        pcm = self.ear.take(turn.start, stopped.end)
        silent_s = (self.ear.position - stopped.voiced_end) / RATE_HZ
        marks = TurnTimestamps(voiced_end=time.monotonic() - silent_s, voiced_end_ms=self._ms(stopped.voiced_end))
        if not self._unjudged and not self._may_be_none(stopped):
            self._end_turn(turn, pcm, marks)
            return
        self._unjudged += 1
        self._spawn(self._judge(turn, pcm, stopped, marks))

    def _may_be_none(self, stopped: Stopped) -> bool:
        """So short that it may be a cough."""
        return self._replies.interrupted is not None and stopped.voiced_ms < FALSE_ALARM_MS

    async def _judge(self, turn: Turn, pcm: bytes, stopped: Stopped, marks: TurnTimestamps) -> None:
        """It is a turn if there are words in it. If the user has gone on meanwhile, what comes last is answered, or goes on.

        Only here does a transcription stand between the user and an answer: what is longer is answered at once. Turns are judged
        in their order, each after the one before.
        """
        try:
            async with self._judging:
                is_turn = not self._may_be_none(stopped) or await self._has_words(pcm)
        finally:
            self._unjudged -= 1
        goes_on = self.hearing or self._unjudged > 0
        if is_turn and goes_on:
            self._replies.forget_interrupted()
            self._add_turn(turn.item_id, pcm, marks)
            self._write_down_unless_answered()
        elif is_turn:
            self._end_turn(turn, pcm, marks)
        elif not goes_on:
            self._replies.go_on()

    async def _has_words(self, pcm: bytes) -> bool:
        """To a model that cannot hear there are none."""
        try:
            return bool(await transcribe(self._gateway, _floats(pcm), RATE_HZ))
        except FleetError as error:
            log.warning("what interrupted an answer could not be understood: %s", error.message)
            return False

    def _end_turn(self, turn: Turn, pcm: bytes, marks: TurnTimestamps) -> None:
        detection = self._settings().detection
        answered = detection is not None and detection.create_response
        ahead = self._replies.take_ahead()
        self._replies.forget_interrupted()
        self._add_turn(turn.item_id, pcm, marks)
        if answered and self._replies.active is None:
            self._replies.answer(marks, ahead)
        elif answered:
            self._owed = marks
        self._write_down_unless_answered()

    def _add_turn(self, item_id: str, pcm: bytes, marks: TurnTimestamps) -> None:
        self._line.tell(say.Committed(previous_item_id=self._conversation.last_id, item_id=item_id))
        name = f"{item_id}.0"
        item = Item(id=item_id, role="user", parts=[Part(kind="input_audio", clip=name)])
        self._add(item, {name: Clip(pcm)})
        self._replies.note_turn(item_id, marks)
        if self._settings().audio.input.transcription is not None:
            self._unwritten.append(item_id)

    def _write_down_unless_answered(self) -> None:
        if self._replies.active is None:
            self._write_down()

    def _write_down(self) -> None:
        items, self._unwritten = self._unwritten, []
        for item_id in items:
            clip = self._conversation.clips.get(f"{item_id}.0")
            if clip is not None:
                self._spawn(self._transcribe(item_id, clip))

    async def _transcribe(self, item_id: str, clip: Clip) -> None:
        try:
            words = await transcribe(self._gateway, _floats(clip.pcm), RATE_HZ)
        except FleetError as error:
            detail = say.TranscriptionError(type=error_type(error), code=error.code, message=error.message, param=error.param)
            self._line.tell(say.TranscriptionFailed(item_id=item_id, content_index=0, error=detail))
            return
        if not self._conversation.note_transcript(item_id, 0, words):
            return
        if words:
            self._line.tell(say.TranscriptionDelta(item_id=item_id, content_index=0, delta=words))
        usage = say.TranscriptionUsage(seconds=round(clip.seconds, 3))
        self._line.tell(say.TranscriptionCompleted(item_id=item_id, content_index=0, transcript=words, usage=usage))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._done)

    def _done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("listening failed: %r", error)

    def _ms(self, position: int) -> int:
        return position * 1000 // RATE_HZ


def _trailing_silence(pcm: bytes) -> int | None:
    """The samples behind the last voiced one; None if nothing is voiced."""
    backwards = np.frombuffer(pcm, "<i2")[::-1]
    search = VoicedSearch(RATE_HZ)
    for start in range(0, len(backwards), RATE_HZ):
        search.feed(backwards[start : start + RATE_HZ].tobytes())
    return search.floor if search.found else None


def _floats(pcm: bytes) -> NDArray[np.float32]:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)
