"""Which answer is due, and the one under way: begun on speculation, cut short by the user, gone on with after a false alarm.

Invariants: at most one response of the conversation is active. What was begun on speculation and not adopted is stopped.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from fleet.core.errors import BadInput, UnsupportedValue
from fleet.processing import TextPart
from web.gateway.gateway import Gateway
from web.realtime import server_events as say
from web.realtime.ask import chat_body
from web.realtime.client_connection import ClientConnection
from web.realtime.client_events import ResponsePatch
from web.realtime.conversation import Conversation
from web.realtime.generation import Generation
from web.realtime.heard import SpeakingRate
from web.realtime.items import ItemReader
from web.realtime.pace import Pace
from web.realtime.refusal import error_event
from web.realtime.response_stream import CANCELLED, ResponsePlan, ResponseStream, TurnTimestamps
from web.realtime.served import check_speaks
from web.realtime.settings import (
    OUTPUT_FORMAT,
    RESPONSE_BETA,
    SAME_IN_BETA,
    SERVED_FORMAT,
    Settings,
    beta_refusal,
    check_output_format,
    voice_name,
)
from web.schema.chat import MessageBody

MAX_ASIDE = 4
"""Responses outside the conversation at once."""


class ActiveResponse(BadInput):
    code = "conversation_already_has_active_response"


class NotActive(BadInput):
    code = "response_cancel_not_active"


class BufferEmpty(BadInput):
    code = "input_audio_buffer_commit_empty"


class ResponseObserver(Protocol):
    """Who is told how answers fare: the session."""

    def began(self, run: ResponseStream) -> None: ...

    def voiced(self, run: ResponseStream) -> None: ...

    def over(self, run: ResponseStream) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeResponse:
    """An answer begun before the turn was over. It serves if nothing of this has changed by then."""

    making: Generation
    version: int
    settings: Settings


class ResponseManager:
    """Satisfies `response_stream.ResponseSink`."""

    def __init__(
        self, gateway: Gateway, line: ClientConnection, conversation: Conversation, settings: Callable[[], Settings],
        watcher: ResponseObserver, *, conversation_id: str, rate: SpeakingRate,
    ) -> None:  # fmt: skip
        self.run: ResponseStream | None = None
        self.interrupted: ResponseStream | None = None
        self._aside: dict[str, ResponseStream] = {}
        self._earlier: list[ResponseStream] = []
        """Responses before `run` whose audio is still being sent to a client that came back."""
        self._ahead: SpeculativeResponse | None = None
        self._unanswered: tuple[str, TurnTimestamps] | None = None
        """The item of the user's last spoken turn, and when its speech ended, until an answer to it begins."""
        self._gateway, self._line, self._conversation = gateway, line, conversation
        self._settings, self._watcher, self._rate = settings, watcher, rate
        self._conversation_id = conversation_id
        self._stopping: set[asyncio.Task[None]] = set()
        self.pace = Pace()

    @property
    def active(self) -> ResponseStream | None:
        return self.run if self.run is not None and self.run.active else None

    def sounding(self, now: float) -> bool:
        """Whether the listener is, or is about to be, spoken to."""
        return self.run is not None and (self.run.active or self.run.playhead.left_s(now) > 0)

    def busy(self, now: float) -> bool:
        """Return True while any response is under way, of the conversation or not, or its audio is played."""
        return self.sounding(now) or any(run.active or run.playhead.left_s(now) > 0 for run in self._runs)

    @property
    def _runs(self) -> list[ResponseStream]:
        """All responses that may still send something."""
        return [run for run in (self.run, *self._earlier, *self._aside.values()) if run is not None]

    def find(self, response_id: str) -> ResponseStream | None:
        known = [self.run, *self._aside.values()]
        return next((run for run in known if run is not None and run.id == response_id), None)

    # speculation

    def begin_ahead(self, said: MessageBody) -> None:
        """The turn may be over: begin the answer, and show nothing."""
        self.drop_ahead()
        if self.active is not None:
            return
        settings = self._settings()
        plan = self._plan(settings)
        if plan.spoken and settings.audio.output.format is None:
            return
        messages = [*self._conversation.messages(settings.instructions), said]
        making = self._make(messages, settings, plan)
        self._ahead = SpeculativeResponse(making=making, version=self._conversation.version, settings=settings)

    def drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._stop(ahead.making)

    def take_ahead(self) -> Generation | None:
        """What was begun on speculation, if it is the answer to what is so now. Ask before the turn's item is added."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        fits = ahead.version == self._conversation.version and ahead.settings is self._settings()
        if fits and ahead.making.error is None:
            return ahead.making
        self._stop(ahead.making)
        return None

    # answers

    def note_turn(self, item_id: str, marks: TurnTimestamps) -> None:
        """Keep when the speech of this item ended: the client may ask for the answer to it."""
        self._unanswered = (item_id, marks)

    def answer(self, marks: TurnTimestamps, making: Generation | None = None) -> None:
        """Answer the conversation as it stands. Where it is empty, or an answer is under way (`over` says when), it is not."""
        settings = self._settings()
        plan = self._plan(settings)
        if plan.spoken and settings.audio.output.format is None:
            self._line.tell(error_event(_no_output_format()))
            return
        if making is None:
            messages = self._conversation.messages(settings.instructions)
            if not messages:
                return
            making = self._make(messages, settings, plan)
        self._unanswered = None
        self._begin(plan, making, marks)

    def create(self, wanted: ResponsePatch, given: Conversation | None = None) -> None:
        """Begin the response of a `response.create`. `given` is its input, if it was read before. Raises: BadInput, NotFound."""
        _check_dialect(wanted)
        settings, aside = self._settings(), wanted.conversation == "none"
        if not aside and self.active is not None:
            raise ActiveResponse(f"the conversation has an active response ({self.active.id}); cancel it, or wait for its end")
        if aside and len(self._aside) >= MAX_ASIDE:
            raise ActiveResponse(f"{MAX_ASIDE} responses outside the conversation are active; wait for the end of one")
        if not aside:
            self.drop_ahead()
        plan = self._wanted_plan(settings, wanted)
        instructions = settings.instructions if wanted.instructions is None else wanted.instructions
        self._gateway.frontend.check_text(TextPart(text=instructions, where="response.instructions"))
        asked = given if given is not None else self._input(wanted)
        messages = asked.messages(instructions)
        if not messages:
            where = "response.input"
            raise BadInput(f"{where}: there is nothing to answer; add an item, sound or instructions", param=where)
        marks = TurnTimestamps()
        if not aside:
            turn, self._unanswered = self._unanswered, None
            if turn is not None and turn[0] == asked.last_id:
                marks = replace(turn[1], decided=marks.decided)
        self._begin(plan, self._make(messages, settings, plan), marks)

    def _input(self, wanted: ResponsePatch) -> Conversation:
        if wanted.input is None:
            return self._conversation
        return ItemReader(self._gateway, self._settings()).items(wanted.input, self._conversation, "response.input")

    def cancel(self, response_id: str | None) -> None:
        """Raises: NotActive."""
        run = self.active if response_id is None else self.find(response_id)
        if run is None or not run.active:
            raise NotActive("there is no active response to cancel", param="response_id" if response_id else None)
        # The listener may still play whatever it has been sent; a `truncate` says where it stopped.
        self._cut(run, "client_cancelled", run.playhead.sent)

    def stop_speaking(self) -> None:
        """Cancel the spoken responses: the client would play them in another format."""
        self.drop_ahead()
        for run in self._runs:
            run.stop_resending()
            if run.active and run.plan.spoken:
                self._cut(run, "client_cancelled", run.playhead.sent)

    # the user speaks

    def interrupt(self, now: float) -> bool:
        """The user speaks while being spoken to: nothing more is made or sent. Whether there was anything to stop.

        One that was cancelled may still be playing, but is over: it is not what a false alarm goes on with.
        """
        run = self.run
        for earlier in self._earlier:
            earlier.stop_resending()
        if run is None or not (self.sounding(now) or run.resending):
            return False
        heard = run.playhead.at(now)
        run.stop_resending()
        if run.active:
            self._cut(run, "turn_detected", heard)
        else:
            # What an earlier cut took does not come back.
            run.cut_words(min(heard, _heard_of(run)))
            if run.status == CANCELLED:
                return False
        self.interrupted = run
        return True

    def note_told(self, item_id: str) -> None:
        """The client is about to cut this item, which may be told still."""
        if self.active is not None and self.active.item_id == item_id:
            self.active.note_told()

    def forget_interrupted(self) -> None:
        self.interrupted = None

    def go_on(self) -> None:
        """It was a false alarm: what was cut goes on as a response of its own."""
        old, self.interrupted = self.interrupted, None
        if old is None or self.active is not None or (old.plan.spoken and self._settings().audio.output.format is None):
            return
        chars = len(old.item.parts[0].text) if old.item is not None else 0
        plan = replace(
            old.plan, skip_samples=old.plan.skip_samples + _heard_of(old), skip_chars=old.plan.skip_chars + chars, metadata=None
        )
        making = Generation(self._gateway, old.making.body, shorten=old.making.shorten)
        making.make_rest(old.making)
        self._begin(plan, making, TurnTimestamps())

    # run.Out

    @property
    def listening(self) -> bool:
        return self._line.listening

    def tell(self, event: say.ServerEvent) -> None:
        self._line.tell(event)

    def sound(self, run: ResponseStream, first_sample: int, pcm: bytes) -> None:
        self._line.sound(run.id, run.item_id, first_sample, pcm)

    def began(self, run: ResponseStream) -> None:
        self._watcher.began(run)

    def voiced(self, run: ResponseStream, sample: int) -> None:
        self._line.tell(say.Voiced(response_id=run.id, sample=sample))
        self._watcher.voiced(run)

    def over(self, run: ResponseStream) -> None:
        self._aside.pop(run.id, None)
        self._watcher.over(run)

    # its end

    def abandon(self) -> None:
        """The session is over: everything of it stops."""
        self.drop_ahead()
        for run in self._runs:
            run.abandon()

    def let_go(self) -> None:
        """Another gateway has the session: what it is answered is not ours to stop."""
        self.drop_ahead()
        for run in self._runs:
            run.let_go()

    def adopt(self, run: ResponseStream) -> None:
        """A response that another gateway began."""
        self.run = run
        run.start(told=True)

    def _begin(self, plan: ResponsePlan, making: Generation, marks: TurnTimestamps) -> None:
        run = ResponseStream(
            plan, making, self._conversation, self, lead_s=self._gateway.config.voice.send_ahead_s, rate=self._rate, marks=marks
        )
        if plan.in_conversation:
            self._earlier = [other for other in self._runs if other.resending]
            self.run = run
        else:
            self._aside[run.id] = run
        run.start()

    def _cut(self, run: ResponseStream, reason: str, heard: int) -> None:
        self.pace.discard(time.monotonic())
        run.cut("turn_detected" if reason == "turn_detected" else "client_cancelled", heard)
        self._aside.pop(run.id, None)
        self._watcher.over(run)

    def _make(self, messages: list[MessageBody], settings: Settings, plan: ResponsePlan) -> Generation:
        body = chat_body(
            self._gateway.model, messages, spoken=plan.spoken, voice=plan.voice,
            max_output_tokens=self._max_tokens(plan), session=self._conversation_id if plan.in_conversation else None,
        )  # fmt: skip
        making = Generation(self._gateway, body, shorten=settings.truncation == "auto")
        making.start()
        return making

    def _max_tokens(self, plan: ResponsePlan) -> int | None:
        """OpenAI's clients ask for as much as its models can; nobody gets more than this server's limit."""
        wanted = plan.max_output_tokens
        return min(wanted, self._gateway.config.limits.max_answer_tokens) if isinstance(wanted, int) else None

    def _stop(self, making: Generation) -> None:
        self.pace.discard(time.monotonic())
        task = making.stop()
        if task is not None and not task.done():
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _plan(self, settings: Settings) -> ResponsePlan:
        return ResponsePlan(
            spoken="audio" in settings.output_modalities,
            in_conversation=True,
            conversation_id=self._conversation_id,
            max_output_tokens=settings.max_output_tokens,
            voice=settings.audio.output.voice,
        )

    def _wanted_plan(self, settings: Settings, wanted: ResponsePatch) -> ResponsePlan:
        ignored = ("response.tools",) if wanted.tools else ()
        in_conversation = wanted.conversation != "none"
        plan = replace(self._plan(settings), in_conversation=in_conversation, metadata=wanted.metadata, ignored=ignored)
        if wanted.output_modalities is not None:
            plan = replace(plan, spoken="audio" in wanted.output_modalities)
        if wanted.max_output_tokens is not None:
            plan = replace(plan, max_output_tokens=wanted.max_output_tokens)
        output = wanted.audio.output if wanted.audio is not None else None
        if output is not None:
            check_output_format(output.format, "response.audio.output.format")
        declared = settings.audio.output.format is not None or (output is not None and output.format is not None)
        if plan.spoken and not declared:
            raise _no_output_format()
        if output is not None and output.voice is not None:
            plan = replace(plan, voice=voice_name(output.voice))
            self._gateway.frontend.voice(plan.voice or None, "response.audio.output.voice")
        check_speaks(self._gateway, "response.output_modalities", spoken=plan.spoken)
        return plan


def _check_dialect(wanted: ResponsePatch) -> None:
    """Refuse fields of the dialect before GA, except for the audio format that is sent anyway. Raises: UnsupportedValue."""
    for name, now in RESPONSE_BETA.items():
        value = getattr(wanted, name)
        if value is not None and (name, value) != ("output_audio_format", SAME_IN_BETA):
            raise beta_refusal("response", name, now)


def _no_output_format() -> UnsupportedValue:
    message = f"{OUTPUT_FORMAT}: no audio is sent while it is refused; set it to {SERVED_FORMAT}, or ask for text"
    return UnsupportedValue(message, param=OUTPUT_FORMAT)


def _heard_of(run: ResponseStream) -> int:
    """Samples of it that were played, as far as is known."""
    said = run.item.parts[0].said if run.item is not None else None
    return said.heard if said is not None else 0
