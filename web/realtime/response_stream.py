"""Delivery of one response: its events, its text as it arrives, and its audio at most
`voice.send_ahead_s` ahead of playback.

Knows no turn and no speculation.
"""

import asyncio
import logging
from collections.abc import Coroutine
from enum import Enum
from typing import Literal

import msgspec

from fleet.core.errors import FleetError
from fleet.core.ids import RESPONSE, shown_id
from fleet.processing.voice_onset import FirstVoicedClock
from web.gateway.answer import BYTES_PER_SAMPLE
from web.gateway.ignored_fields import warning_of
from web.http.errors import error_type
from web.realtime.audio.formats import OUTPUT_RATE_HZ, AudioFormat
from web.realtime.audio.playhead import Playhead
from web.realtime.call_delivery import CallDelivery
from web.realtime.context import EventQueue, SessionContext
from web.realtime.conversation import Item, Part, PlayedSpeech
from web.realtime.delivered_speech import GROUP_SAMPLES, DeliveredSpeech
from web.realtime.generation import Generation
from web.realtime.protocol import server_events as server
from web.realtime.response_plan import ResponsePlan, TurnTimestamps
from web.realtime.states import RESPONSE_TABLE, ResponseInput, ResponseState, next_state

log = logging.getLogger("fleet.web")

FRAME_SAMPLES = 1920
"""Length of a piece of audio (80 ms) for which the playback buffer must have room. Shorter pieces
are sent only if no more is ready; `MAX_PIECE_SAMPLES` is the longest.
"""
MAX_PIECE_SAMPLES = 12 * FRAME_SAMPLES
CANCELLED, COMPLETED, FAILED, INCOMPLETE = "cancelled", "completed", "failed", "incomplete"
Outcome = Literal["completed", "cancelled", "failed", "incomplete"]
CancelReason = Literal["turn_detected", "client_cancelled"]


class Milestone(Enum):
    """Step in the delivery of a response that the session is notified of."""

    STARTED = "started"
    """The first output was sent: audio, or text where the response is not spoken."""
    VOICED = "voiced"
    """The first voiced sample was sent; not emitted for a response that another gateway began to
    send.
    """
    ENDED = "ended"
    """The response was sent completely, failed or was cancelled."""


ResponseEvent = tuple["ResponseStream", Milestone]


class ResponseStream:
    def __init__(
        self,
        context: SessionContext,
        events: EventQueue[ResponseEvent],
        plan: ResponsePlan,
        generation: Generation,
        timestamps: TurnTimestamps,
        *,
        response_id: str | None = None,
        item_id: str | None = None,
    ) -> None:
        self.id = response_id or shown_id(generation.request_id, RESPONSE)
        self.item_id = item_id or server.new_id("item")
        self.plan = plan
        self.generation = generation
        self.timestamps = timestamps
        self.playhead = Playhead(OUTPUT_RATE_HZ)
        self.item: Item | None = None
        self.state = ResponseState.WAITING
        self.outcome: Outcome | None = None
        self.sent_chars = 0
        self._context, self._events = context, events
        self._conversation, self._clock = context.conversation, context.clock
        self._delivered = DeliveredSpeech(
            generation=generation,
            voice=plan.voice,
            skip_chars=plan.skip_chars,
            skip_samples=plan.skip_samples,
            rate=context.shared.rate,
        )
        self._calls = CallDelivery(context, self.id, in_conversation=plan.in_conversation)
        self.details: server.StatusDetails | None = None
        self._voice, self._num_searched = FirstVoicedClock(OUTPUT_RATE_HZ), 0
        self._num_words_sent = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_active(self) -> bool:
        return self.outcome is None

    @property
    def is_waiting(self) -> bool:
        return self.state is ResponseState.WAITING

    @property
    def is_resending(self) -> bool:
        return self.state is ResponseState.RESENDING

    @property
    def text(self) -> str:
        return self.generation.text[self.plan.skip_chars :]

    @property
    def form(self) -> AudioFormat:
        """Format in which the client gets the audio now."""
        return self._context.connection.form(self.plan.form)

    @property
    def num_samples(self) -> int:
        """Samples of this response that have been generated."""
        return self._delivered.num_samples

    @property
    def played_samples(self) -> int:
        """Number of samples that the item records as played: all sent samples, unless the response
        was cut; 0 before the response has ended or was truncated.
        """
        speech = self._speech
        return speech.played if speech is not None else 0

    @property
    def _speech(self) -> PlayedSpeech | None:
        return self.item.parts[0].speech if self.item is not None else None

    def played_audio(self, first: int, last: int) -> bytes:
        """Return the audio from sample `first` up to sample `last`, PCM16."""
        return self._delivered.audio(first, last)

    def start(self) -> None:
        self._context.send(server.ResponseCreated(response=self.body()))
        self._context.send(
            server.RequestOf(response_id=self.id, request_id=self.generation.request_id)
        )
        self._spawn(self._deliver())

    def adopt(
        self, *, sent_samples: int, sent_chars: int, item: Item | None, is_active: bool
    ) -> None:
        """Continue a response of which another gateway has sent `sent_samples` and `sent_chars`;
        `item` is None before any output. A response that is not active is only kept, so that its
        audio can be sent again.
        """
        self.item, self.sent_chars = item, sent_chars
        self.playhead.rewind(sent_samples)
        self._calls.resend()
        if sent_samples or sent_chars:
            self.timestamps.first_sent = 0.0
            self._happened(ResponseInput.OUTPUT_SENT)
        if is_active:
            self._spawn(self._deliver())
        else:
            self.outcome = COMPLETED
            self._happened(ResponseInput.ENDED)

    def cancel(self, reason: CancelReason, played: int) -> None:
        """End the response and its generation; its item keeps the words within the first `played`
        samples.
        """
        self._cancel_task()
        self.generation.stop()
        self._close(CANCELLED, server.StatusDetails(type=CANCELLED, reason=reason), played)
        self._events.emit((self, Milestone.ENDED))

    def truncate_text(self, played: int) -> None:
        if self.item is not None and self.plan.spoken:
            self._conversation.cut(self.item, self._record_speech(played))

    def prepare_truncation(self) -> None:
        """Record what has been sent of the item under way, before the client's truncation is
        applied to it.
        """
        if self.item is not None and self.plan.spoken:
            self._record_speech(self.playhead.sent)

    def note_continued(self) -> None:
        """Record that another response continues this one from the played position. A later
        truncation cannot add words any more.
        """
        if (speech := self._speech) is not None:
            speech.limit = speech.played

    @property
    def _limit(self) -> int | None:
        """Number of samples after which the client truncated the item; None if it did not."""
        speech = self._speech
        return speech.limit if speech is not None else None

    def stop(self) -> None:
        """End the response and its generation without a further event, since the session is
        over.
        """
        self.detach()
        self.generation.stop()

    def detach(self) -> None:
        """Stop sending the response, since another gateway continues it. The generation is not
        stopped.
        """
        self._cancel_task()
        self._happened(ResponseInput.DETACHED)

    def resend_from(self, sample: int) -> None:
        """Send the audio again from `sample` on, a position in the client's format, to a client
        that reconnected, even if the response has ended.
        """
        self._num_words_sent = 0
        sample *= self.form.stride
        # Another connection may continue it in the format of the plan.
        sample -= sample % self.plan.form.stride
        self.playhead.rewind(min(sample, self.num_samples) if self.generation.is_ended else sample)
        if self.is_active:
            self.generation.wake()
            return
        self._cancel_task()
        self._happened(ResponseInput.RESEND)
        self._spawn(self._resend())

    def stop_resending(self) -> None:
        """End the resending of an ended response's audio. Its item keeps only words that the client
        has received.
        """
        if not self.is_resending:
            return
        self._cancel_task()
        self._happened(ResponseInput.RESENT)
        if (speech := self._speech) is not None:
            self.truncate_text(min(speech.played, self.playhead.sent))

    async def _deliver(self) -> None:
        while True:
            self._send_text()
            if self._calls.send(self.generation.calls, 0 if self.item is None else 1):
                self._on_output_sent()
            wait_s = self._send_audio()
            if self.generation.is_ended and self._is_all_sent():
                break
            await self.generation.wait_for_progress(wait_s)
        self._end()
        self._events.emit((self, Milestone.ENDED))

    async def _resend(self) -> None:
        while self.playhead.sent < self.num_samples:
            await self.generation.wait_for_progress(self._send_audio())
        self._happened(ResponseInput.RESENT)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._on_task_done)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """End the response as failed, with an event, if its task ended with an unexpected
        exception.
        """
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the delivery of response %s failed", self.id, exc_info=error)
        if self.is_resending:
            self._happened(ResponseInput.RESENT)
        elif self.is_active:
            self.generation.stop()
            self.details = _failure(FleetError("the server failed; the cause is in its log"))
            self.outcome = FAILED
            self._calls.cut()
            self._happened(ResponseInput.ENDED)
            self._context.send(server.ResponseDone(response=self.body()))
            self._events.emit((self, Milestone.ENDED))

    def _happened(self, happened: ResponseInput) -> None:
        self.state = next_state(RESPONSE_TABLE, self.state, happened)

    def _is_all_sent(self) -> bool:
        return (
            self.sent_chars >= len(self.text)
            and self.playhead.sent >= self.num_samples
            and not self._calls.is_behind(self.generation.calls)
        )

    def _send_text(self) -> None:
        delta = self.text[self.sent_chars :]
        if not delta:
            return
        self._open_item()
        self.sent_chars += len(delta)
        if self.plan.spoken:
            self._context.send(
                server.TranscriptDelta(response_id=self.id, item_id=self.item_id, delta=delta)
            )
        else:
            self._context.send(
                server.TextDelta(response_id=self.id, item_id=self.item_id, delta=delta)
            )
            self._on_output_sent()

    def _send_audio(self) -> float | None:
        """Send the next piece of audio if the client needs it. Returns the seconds until the next
        piece is due; None if more must be generated first, or the client takes no audio.
        """
        connection = self._context.connection
        if not connection.takes_audio:
            return None
        now = self._clock.now()
        ready = self._delivered.num_ready(self.playhead.sent, self.form)
        if ready <= 0:
            return None
        ahead_s = connection.ahead_s(self._context.gateway.config.voice.send_ahead_s)
        room = self.playhead.room(ahead_s, now)
        room -= room % GROUP_SAMPLES
        wanted = min(ready, FRAME_SAMPLES)
        if room < wanted:
            return (wanted - room) / OUTPUT_RATE_HZ
        self._send_samples(min(ready, room, MAX_PIECE_SAMPLES), now)
        return 0.0

    def _send_samples(self, num_samples: int, now: float) -> None:
        self._open_item()
        first, form = self.playhead.sent, self.form
        last = first + num_samples
        audio = self._delivered.client_audio(first, last, form)
        self.playhead.send(num_samples, now)
        self.generation.release((self.plan.skip_samples + last) * BYTES_PER_SAMPLE)
        self._context.connection.send_audio(
            self.id, self.item_id, first // form.stride, audio, form
        )
        self._on_output_sent()
        self._find_voice(first, self.played_audio(first, last), now)
        self._send_word_ends(last)

    def _send_word_ends(self, sent: int) -> None:
        """Send the ends of the words within the first `sent` samples, each once a connection."""
        ends = (self._delivered.word_ends() or ())[self._num_words_sent :]
        stride = self.form.stride
        fresh = [(chars, end // stride) for chars, end in ends if end <= sent]
        self._num_words_sent += len(fresh)
        if fresh:
            self._context.send(server.WordsSent(response_id=self.id, ends=fresh))

    def _on_output_sent(self) -> None:
        if self.is_waiting:
            self._happened(ResponseInput.OUTPUT_SENT)
            self.timestamps.first_sent = self._clock.now()
            self._events.emit((self, Milestone.STARTED))

    def _find_voice(self, first: int, pcm: bytes, now: float) -> None:
        """Search for the first voiced sample in `pcm`, whose first sample has the position `first`.
        Audio that was searched before is skipped; nothing is searched if another gateway sent the
        audio before.
        """
        if self._voice.sample is not None or first > self._num_searched:
            return
        fresh = pcm[(self._num_searched - first) * BYTES_PER_SAMPLE :]
        self._num_searched += len(fresh) // BYTES_PER_SAMPLE
        self._voice.add(fresh, now)
        if self._voice.sample is not None:
            self.timestamps.first_voiced = self._voice.at_s
            sample = self._voice.sample // self.form.stride
            self._context.send(server.Voiced(response_id=self.id, sample=sample))
            self._events.emit((self, Milestone.VOICED))

    def _open_item(self) -> None:
        if self.item is not None:
            return
        kind = "output_audio" if self.plan.spoken else "output_text"
        self.item = Item(
            id=self.item_id, role="assistant", status="in_progress", parts=[Part(kind=kind)]
        )
        empty = self._conversation.body(self.item)
        assert isinstance(empty, server.ItemBody)
        empty.content = []
        self._context.send(server.OutputItemAdded(response_id=self.id, item=empty))
        if self.plan.in_conversation:
            previous = self._conversation.last_id
            removed = self._conversation.add(self.item)
            self._context.send(server.ItemAdded(previous_item_id=previous, item=empty))
            for item_id in removed:
                self._context.send(server.ItemDeleted(item_id=item_id))
        self._context.send(
            server.ContentPartAdded(response_id=self.id, item_id=self.item_id, part=self._part(""))
        )

    def _part(self, text: str) -> server.PartBody:
        return (
            server.PartBody(type="audio", transcript=text)
            if self.plan.spoken
            else server.PartBody(type="text", text=text)
        )

    def _end(self) -> None:
        error, sent = self.generation.error, self.playhead.sent
        if error is not None:
            self._close(FAILED, _failure(error), sent)
        elif self.generation.finish_reason == "length":
            details = server.StatusDetails(type=INCOMPLETE, reason="max_output_tokens")
            self._close(INCOMPLETE, details, sent)
        else:
            self._close(COMPLETED, None, sent)

    def _close(self, outcome: Outcome, details: server.StatusDetails | None, played: int) -> None:
        """Send the last events of the response, in their order. Its item keeps the words within the
        first `played` samples.
        """
        self.outcome, self.details = outcome, details
        self._happened(ResponseInput.ENDED)
        if self.item is not None:
            self._close_item(self.item, played)
        self._calls.cut()
        self._context.send(server.ResponseDone(response=self.body()))

    def _close_item(self, item: Item, played: int) -> None:
        """Send the last events of the item. The transcript has all text that was sent; the item of
        a cancelled, failed or truncated response keeps only the text that was played.
        """
        text = self.text[: self.sent_chars]
        item.parts[0].text = text
        item.status = "completed" if self.outcome == COMPLETED else "incomplete"
        send = self._context.send
        if self.plan.spoken:
            send(server.OutputAudioDone(response_id=self.id, item_id=self.item_id))
            send(server.TranscriptDone(response_id=self.id, item_id=self.item_id, transcript=text))
        else:
            send(server.TextDone(response_id=self.id, item_id=self.item_id, text=text))
        send(
            server.ContentPartDone(response_id=self.id, item_id=self.item_id, part=self._part(text))
        )
        if self.plan.spoken:
            played = self._record_speech(played)
            # The words of a failed response are ahead of audio that never arrives.
            if self.outcome in (CANCELLED, FAILED) or self._limit is not None:
                self._conversation.cut(item, played)
        body = self._conversation.body(item)
        send(server.OutputItemDone(response_id=self.id, item=body))
        if self.plan.in_conversation and self._conversation.holds(item):
            previous = self._conversation.previous(item.id)
            send(server.ItemDone(previous_item_id=previous, item=body))
            self._conversation.version += 1
        if self.plan.spoken:
            self._delivered.learn_rate(text)

    def _record_speech(self, played: int) -> int:
        """Store with the item its speech and the number of played samples, and return that number.
        The result is lower than `played` if the client truncated the item meanwhile.
        """
        assert self.item is not None
        limit = self._limit
        played = played if limit is None else min(played, limit)
        speech = self._delivered.speech(self.text[: self.sent_chars], self.playhead.sent, played)
        speech.limit = limit
        self.item.parts[0].speech = speech
        return played

    def body(self) -> server.ResponseBody:
        plan = self.plan
        output: list[server.AnyItemBody] = []
        if not self.is_active:
            output += [self._conversation.body(self.item)] if self.item is not None else []
            output += self._calls.bodies()
        return server.ResponseBody(
            id=self.id,
            status=self.outcome or "in_progress",
            status_details=self.details,
            output=output,
            conversation_id=plan.conversation_id if plan.in_conversation else None,
            output_modalities=["audio" if plan.spoken else "text"],
            max_output_tokens=plan.max_output_tokens,
            audio=server.ResponseAudio(
                output=server.ResponseOutput(format=plan.form, voice=plan.voice)
            ),
            usage=None if self.is_active else self.generation.usage,
            metadata=plan.metadata,
            warnings=[warning_of(name) for name in plan.ignored] or msgspec.UNSET,
        )


def _failure(error: FleetError) -> server.StatusDetails:
    failed = server.FailureBody(type=error_type(error), code=error.code, message=error.message)
    return server.StatusDetails(type=FAILED, error=failed)
