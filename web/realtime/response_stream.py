"""One response: the events of its life, its words as they come, and its sound no further ahead of the listener than allowed.

Knows no turn and no speculation: it is told what is being made for it, and when it is cut short.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np

from fleet.core.errors import FleetError
from fleet.processing.voice_onset import FirstVoicedClock
from web.gateway.answer import BYTES_PER_SAMPLE
from web.http.errors import error_type
from web.realtime import server_events as say
from web.realtime.conversation import Conversation, Item, Part, PlayedSpeech
from web.realtime.generation import Generation
from web.realtime.heard import Span, SpeakingRate, silences, speech_until
from web.realtime.playhead import Playhead
from web.realtime.settings import OUTPUT_RATE_HZ

log = logging.getLogger("fleet.web")

GROUP_SAMPLES = 3
"""So that the base64 of joined pieces is that of the joined sound: see `web.gateway.answer.GROUP_BYTES`."""
FRAME_SAMPLES = 1920
"""Sound goes out in pieces of at least 80 ms while the listener has enough, and in at most twelve times that."""
MAX_PIECE_SAMPLES = 12 * FRAME_SAMPLES
CANCELLED, COMPLETED, FAILED, INCOMPLETE = "cancelled", "completed", "failed", "incomplete"


class ResponseSink(Protocol):
    """Where a response goes: to whoever listens now."""

    @property
    def listening(self) -> bool:
        """Whether a client is there; without one no sound is sent."""
        ...

    def tell(self, event: say.ServerEvent) -> None: ...

    def sound(self, run: "ResponseStream", first_sample: int, pcm: bytes) -> None: ...

    def began(self, run: "ResponseStream") -> None:
        """Its first sound, or word where it does not speak, was sent."""
        ...

    def voiced(self, run: "ResponseStream", sample: int) -> None:
        """Its first voiced sample was sent: `sample` of its sound. Not called for one that another gateway began to send."""
        ...

    def over(self, run: "ResponseStream") -> None:
        """It was told to its end, or failed. Not called for one that was cut."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """Parameters of a response. `skip_*`: what was already sent of it by the response that this one continues.
    `ignored` names fields of the request that have no effect.
    """

    spoken: bool
    in_conversation: bool
    conversation_id: str
    max_output_tokens: int | str = "inf"
    voice: str = ""
    metadata: dict[str, str] | None = None
    skip_samples: int = 0
    skip_chars: int = 0
    ignored: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class TurnTimestamps:
    """When the turn was where. Units: seconds of `time.monotonic`; `None`: not known, or not yet.

    `voiced_end`: the last voiced sample of the user's turn came, and `voiced_end_ms` its place in all that was heard; `decided`:
    the turn was over; `first_sent`: the first sound left; `first_voiced`: its first voiced sample is heard by a listener who
    plays what comes without delay.
    """

    voiced_end: float | None = None
    voiced_end_ms: int | None = None
    decided: float = field(default_factory=time.monotonic)
    first_sent: float | None = None
    first_voiced: float | None = None


class ResponseStream:
    def __init__(
        self, plan: ResponsePlan, making: Generation, conversation: Conversation, out: ResponseSink, *, lead_s: float,
        rate: SpeakingRate, marks: TurnTimestamps | None = None, response_id: str | None = None, item_id: str | None = None,
    ) -> None:  # fmt: skip
        self.id = response_id or say.new_id("resp")
        self.item_id = item_id or say.new_id("item")
        self.plan, self.making = plan, making
        self.marks = marks or TurnTimestamps()
        self.playhead = Playhead(OUTPUT_RATE_HZ)
        self._voice, self._num_searched = FirstVoicedClock(OUTPUT_RATE_HZ), 0
        self.item: Item | None = None
        self.status: Literal["in_progress", "completed", "cancelled", "failed", "incomplete"] = "in_progress"
        self.sent_chars = 0
        self._conversation, self._out, self._lead_s, self._rate = conversation, out, lead_s, rate
        self._details: say.StatusDetails | None = None
        self._told: PlayedSpeech | None = None
        """Of an item that is still told: what the client may have cut of it already."""
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        return self.status == "in_progress"

    @property
    def resending(self) -> bool:
        """Return True while audio of a response that is over is sent to a client that came back."""
        return not self.active and self._task is not None and not self._task.done()

    @property
    def text(self) -> str:
        return self.making.text[self.plan.skip_chars :]

    @property
    def made(self) -> int:
        """Samples of this response's sound that there are."""
        return max(0, len(self.making.pcm) // BYTES_PER_SAMPLE - self.plan.skip_samples)

    def start(self, *, told: bool = False) -> None:
        """`told`: a client knows of it already, from another gateway."""
        if not told:
            self._out.tell(say.ResponseCreated(response=self.body()))
            self._out.tell(say.RequestOf(response_id=self.id, request_id=self.making.request_id))
        self._spawn(self._deliver())

    def cut(self, reason: Literal["turn_detected", "client_cancelled"], heard: int) -> None:
        """End it now: what it is made of is stopped, and of its words those within `heard` samples stay."""
        if self._task is not None:
            self._task.cancel()
        self.making.stop()
        self._close(CANCELLED, say.StatusDetails(type=CANCELLED, reason=reason))
        self.cut_words(heard)

    def cut_words(self, heard: int) -> None:
        if self.item is not None and self.plan.spoken:
            self._conversation.cut(self.item, self._note_said(heard))

    def note_told(self) -> None:
        """The client may cut what is still told: what it has been sent so far is written down for that."""
        if self.item is not None and self.plan.spoken:
            self._note_said(self.playhead.sent)
            self._told = self.item.parts[0].said

    @property
    def _limit(self) -> int | None:
        """How much the client will have heard of it at most, in samples, by its own word."""
        told = self._told
        return told.heard if told is not None and told.heard < told.sent else None

    def abandon(self) -> None:
        """Nobody will ever hear of it again."""
        if self._task is not None:
            self._task.cancel()
        self.making.stop()

    def let_go(self) -> None:
        """Another gateway tells it from now on."""
        if self._task is not None:
            self._task.cancel()

    def rewind(self, sample: int) -> None:
        """The listener has so much of the sound, and is sent what follows; of a response that is over too."""
        self.playhead.rewind(min(sample, self.made) if self.making.ended else sample)
        if self.active:
            self.making.poke()
        else:
            self.let_go()
            self._spawn(self._deliver_sound())

    def stop_resending(self) -> None:
        """Send no more of a response that is over, and keep no words beyond what the client has of it."""
        if not self.resending:
            return
        self.let_go()
        said = self.item.parts[0].said if self.item is not None else None
        if said is not None:
            self.cut_words(min(said.heard, self.playhead.sent))

    async def _deliver(self) -> None:
        while True:
            self._tell_words()
            wait_s = self._tell_sound()
            if self.making.ended and self._all_told():
                break
            await self.making.moved(wait_s)
        self._end()
        if self.status == FAILED or self._limit is not None:
            # The words of an answer that failed ran ahead of a sound that will never come.
            self.cut_words(self.playhead.sent)
        self._out.over(self)

    async def _deliver_sound(self) -> None:
        while self.playhead.sent < self.made:
            await self.making.moved(self._tell_sound())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._look_at)

    def _look_at(self, task: asyncio.Task[None]) -> None:
        """A bug of ours ends this response, and not in silence."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("response %s failed", self.id, exc_info=error)
        if self.active:
            self.making.stop()
            self._details = _failure(FleetError("the server failed; its log tells why"))
            self.status = FAILED
            self._out.tell(say.ResponseDone(response=self.body()))
            self._out.over(self)

    def _all_told(self) -> bool:
        return self.sent_chars >= len(self.text) and self.playhead.sent >= self.made

    def _tell_words(self) -> None:
        delta = self.text[self.sent_chars :]
        if not delta:
            return
        self._open_item()
        self.sent_chars += len(delta)
        if self.plan.spoken:
            self._out.tell(say.TranscriptDelta(response_id=self.id, item_id=self.item_id, delta=delta))
        else:
            self._out.tell(say.TextDelta(response_id=self.id, item_id=self.item_id, delta=delta))
            self._note_first()

    def _tell_sound(self) -> float | None:
        """Send what may be sent. Returns how long until more of it may be; None: not before something comes."""
        if not self._out.listening:
            return None
        now = time.monotonic()
        ready = self.made - self.playhead.sent
        if not self.making.ended:
            ready -= ready % GROUP_SAMPLES
        if ready <= 0:
            return None
        room = self.playhead.room(self._lead_s, now)
        room -= room % GROUP_SAMPLES
        wanted = min(ready, FRAME_SAMPLES)
        if room < wanted:
            return (wanted - room) / OUTPUT_RATE_HZ
        self._send(min(ready, room, MAX_PIECE_SAMPLES), now)
        return 0.0

    def _send(self, num_samples: int, now: float) -> None:
        self._open_item()
        first = self.playhead.sent
        start = (self.plan.skip_samples + first) * BYTES_PER_SAMPLE
        pcm = bytes(self.making.pcm[start : start + num_samples * BYTES_PER_SAMPLE])
        self.playhead.send(num_samples, now)
        self.making.take(start + len(pcm))
        self._out.sound(self, first, pcm)
        self._note_first()
        self._note_voiced(first, pcm, now)

    def _note_first(self) -> None:
        if self.marks.first_sent is None:
            self.marks.first_sent = time.monotonic()
            self._out.began(self)

    def _note_voiced(self, first: int, pcm: bytes, now: float) -> None:
        """Search what is sent for the first time; not behind what another gateway sent, which was not searched here."""
        if self._voice.sample is not None or first > self._num_searched:
            return
        fresh = pcm[(self._num_searched - first) * BYTES_PER_SAMPLE :]
        self._num_searched += len(fresh) // BYTES_PER_SAMPLE
        self._voice.add(fresh, now)
        if self._voice.sample is not None:
            self.marks.first_voiced = self._voice.at_s
            self._out.voiced(self, self._voice.sample)

    def _open_item(self) -> None:
        if self.item is not None:
            return
        kind = "output_audio" if self.plan.spoken else "output_text"
        self.item = Item(id=self.item_id, role="assistant", status="in_progress", parts=[Part(kind=kind)])
        empty = self._item_body(self.item)
        empty.content = []
        self._out.tell(say.OutputItemAdded(response_id=self.id, item=empty))
        if self.plan.in_conversation:
            previous = self._conversation.last_id
            gone = self._conversation.add(self.item)
            self._out.tell(say.ItemAdded(previous_item_id=previous, item=empty))
            for item_id in gone:
                self._out.tell(say.ItemDeleted(item_id=item_id))
        self._out.tell(say.ContentPartAdded(response_id=self.id, item_id=self.item_id, part=self._part("")))

    def _part(self, text: str) -> say.PartBody:
        return say.PartBody(type="audio", transcript=text) if self.plan.spoken else say.PartBody(type="text", text=text)

    def _end(self) -> None:
        error = self.making.error
        if error is not None:
            self._close(FAILED, _failure(error))
        elif self.making.finish_reason == "length":
            self._close(INCOMPLETE, say.StatusDetails(type=INCOMPLETE, reason="max_output_tokens"))
        else:
            self._close(COMPLETED, None)

    def _close(
        self, status: Literal["completed", "cancelled", "failed", "incomplete"], details: say.StatusDetails | None
    ) -> None:
        """The last events of its life, in their order."""
        self.status, self._details = status, details
        if self.item is not None:
            self._close_item(self.item)
        self._out.tell(say.ResponseDone(response=self.body()))

    def _close_item(self, item: Item) -> None:
        text = self.text[: self.sent_chars]
        item.parts[0].text = text
        item.status = "completed" if self.status == COMPLETED else "incomplete"
        if self.plan.spoken:
            self._note_said(self.playhead.sent)
            self._out.tell(say.OutputAudioDone(response_id=self.id, item_id=self.item_id))
            self._out.tell(say.TranscriptDone(response_id=self.id, item_id=self.item_id, transcript=text))
        else:
            self._out.tell(say.TextDone(response_id=self.id, item_id=self.item_id, text=text))
        self._out.tell(say.ContentPartDone(response_id=self.id, item_id=self.item_id, part=self._part(text)))
        body = self._item_body(item)
        self._out.tell(say.OutputItemDone(response_id=self.id, item=body))
        if self.plan.in_conversation and self._conversation.holds(item):
            previous = self._conversation.previous(item.id)
            self._out.tell(say.ItemDone(previous_item_id=previous, item=body))
            self._conversation.version += 1
        if self.making.whole and self.plan.spoken and not self.plan.skip_samples:
            self._rate.learn(self.plan.voice, text, speech_until(self.made, self._silences()) / OUTPUT_RATE_HZ)

    def _note_said(self, heard: int) -> int:
        """What it would all be, so that words are counted by the share that was heard. Returns how much that is: less than given
        where the client said so while it was told.
        """
        assert self.item is not None
        text, silent = self.text[: self.sent_chars], self._silences()
        whole = speech_until(self.made, silent)
        if not self.making.whole:
            # Its words run ahead of its sound: how long all of it would have been is not known any more.
            whole = int(self._rate.whole_s(self.plan.voice, text, whole / OUTPUT_RATE_HZ, text_whole=True) * OUTPUT_RATE_HZ)
        heard = heard if self._limit is None else min(heard, self._limit)
        self.item.parts[0].said = PlayedSpeech(text=text, whole=whole, sent=self.playhead.sent, heard=heard, silent=silent)
        return heard

    def _silences(self) -> list[Span]:
        start = self.plan.skip_samples * BYTES_PER_SAMPLE
        return silences(np.frombuffer(bytes(self.making.pcm[start:]), "<i2"))

    def _item_body(self, item: Item) -> say.ItemBody:
        return self._conversation.body(item)

    def body(self) -> say.ResponseBody:
        plan, over = self.plan, not self.active
        output = [self._item_body(self.item)] if self.item is not None and over else []
        return say.ResponseBody(
            id=self.id,
            status=self.status,
            status_details=self._details,
            output=output,
            conversation_id=plan.conversation_id if plan.in_conversation else None,
            output_modalities=["audio" if plan.spoken else "text"],
            max_output_tokens=plan.max_output_tokens,
            audio=say.ResponseAudio(output=say.ResponseOutput(voice=plan.voice)),
            usage=self.making.usage if over else None,
            metadata=plan.metadata,
            fleet_ignored=list(plan.ignored) or msgspec.UNSET,
        )


def _failure(error: FleetError) -> say.StatusDetails:
    failed = say.FailureBody(type=error_type(error), code=error.code, message=error.message)
    return say.StatusDetails(type=FAILED, error=failed)
