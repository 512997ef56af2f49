"""Responses of one voice session: begun, cancelled, interrupted and resumed; speculative, and out
of band.

Invariants: at most one response of the conversation is active. A speculative generation that no
response uses is stopped.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet.core.errors import BadInput
from fleet.processing import Message, TextPart
from web.realtime.context import EventQueue, SessionContext
from web.realtime.conversation import Clip, Conversation
from web.realtime.discard_limit import DiscardLimit
from web.realtime.generation import Generation
from web.realtime.items import ItemReader
from web.realtime.prompt import Prompt, make_prompt
from web.realtime.protocol.client_events import ResponsePatch
from web.realtime.protocol.settings import Settings
from web.realtime.recognitions import Recognitions
from web.realtime.response_plan import (
    ResponsePlan,
    TurnTimestamps,
    check_dialect,
    default_plan,
    no_output_format,
    requested_plan,
)
from web.realtime.response_stream import (
    CANCELLED,
    CancelReason,
    ResponseEvent,
    ResponseStream,
)
from web.realtime.session_tools import ToolSettings
from web.realtime.states import ResponseActivity
from web.realtime.transport.refusal import error_event

MAX_OUT_OF_BAND = 4
"""Limit of concurrent responses outside of the conversation."""


class ActiveResponse(BadInput):
    code = "conversation_already_has_active_response"


class NotActive(BadInput):
    code = "response_cancel_not_active"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeResponse:
    """A generation that was started before the user's turn had certainly ended. Used only if
    conversation (`version`) and settings are still the same when the turn ends.
    """

    generation: Generation
    version: int
    settings: Settings


class ResponseManager:
    def __init__(self, context: SessionContext, events: EventQueue[ResponseEvent]) -> None:
        self.current: ResponseStream | None = None
        """The latest response of the conversation, which may have ended."""
        self.interrupted: ResponseStream | None = None
        """The response that the user's speech interrupted, while it may be resumed."""
        self.limit = DiscardLimit()
        self.recognitions = Recognitions(context.conversation)
        self._out_of_band: dict[str, ResponseStream] = {}
        self._resending: list[ResponseStream] = []
        """Ended responses before `current` whose audio is still being sent to a client that
        reconnected.
        """
        self._speculative: SpeculativeResponse | None = None
        self._reading: Generation | None = None
        self._read: tuple[str, ToolSettings] | None = None
        """Instructions and tools that the model has read: later prompts begin with them."""
        self._unanswered: tuple[str, TurnTimestamps] | None = None
        """Item id and timestamps of the user's last spoken turn, until a response to it begins."""
        self._stopping: set[asyncio.Task[None]] = set()
        self._context, self._events = context, events
        self._gateway = context.gateway
        self._conversation = context.conversation
        self._clock = context.clock

    @property
    def active(self) -> ResponseStream | None:
        return self.current if self.current is not None and self.current.is_active else None

    @property
    def activity(self) -> ResponseActivity:
        current = self.current
        if current is None or not self._is_audible(current):
            return ResponseActivity.NONE
        return (
            ResponseActivity.WAITING
            if current.is_active and current.is_waiting
            else ResponseActivity.AUDIBLE
        )

    @property
    def is_busy(self) -> bool:
        """Return True while any response, in the conversation or out of band, is being generated,
        sent or played.
        """
        return any(self._is_audible(response) for response in self._all)

    @property
    def is_generating(self) -> bool:
        """Return True while any response is being generated."""
        return any(not response.generation.is_ended for response in self._all)

    def _is_audible(self, response: ResponseStream) -> bool:
        return response.is_active or response.playhead.left_s(self._clock.now()) > 0

    @property
    def _all(self) -> list[ResponseStream]:
        """All responses that may still send something."""
        return [
            one
            for one in (self.current, *self._resending, *self._out_of_band.values())
            if one is not None
        ]

    def find(self, response_id: str) -> ResponseStream | None:
        known = [self.current, *self._out_of_band.values()]
        return next(
            (response for response in known if response is not None and response.id == response_id),
            None,
        )

    # speculation

    def read_ahead(self) -> None:
        """Let the model read new instructions and tools while the user speaks, so that the response
        need not wait until they are read. The request generates one token, which nobody reads; its
        prefix stays cached for the conversation.
        """
        settings = self._context.settings
        wanted = default_plan(self._context, settings)
        is_refused = wanted.spoken and settings.audio.output.format is None
        is_read = self._read == (settings.instructions, wanted.tools)
        if is_refused or is_read or self.active is not None:
            return
        plan = replace(wanted, spoken=False, max_output_tokens=1)
        messages = self._conversation.messages(settings.instructions)
        if messages and not self._prompt(messages, plan).clip_names:
            self._reading = self._generate(messages, settings, plan)

    def start_speculative(self, speech: Clip) -> Generation | None:
        """Start a generation for the conversation and `speech`, the turn that may have ended, and
        return it; None if there can be no response. No response begins before the turn has ended.
        """
        self.discard_speculative()
        if self.active is not None:
            return None
        settings = self._context.settings
        plan = default_plan(self._context, settings)
        if plan.spoken and settings.audio.output.format is None:
            return None
        generation = self._generate(
            self._conversation.messages(settings.instructions, speech), settings, plan
        )
        self._speculative = SpeculativeResponse(
            generation=generation, version=self._conversation.version, settings=settings
        )
        return generation

    def discard_speculative(self) -> None:
        speculative, self._speculative = self._speculative, None
        if speculative is not None:
            self._stop(speculative.generation)

    def take_speculative(self) -> Generation | None:
        """Return the speculative generation if it is still valid, otherwise None. Call this before
        the turn's item is added to the conversation.
        """
        speculative, self._speculative = self._speculative, None
        if speculative is None:
            return None
        is_valid = (
            speculative.version == self._conversation.version
            and speculative.settings is self._context.settings
        )
        if is_valid and speculative.generation.error is None:
            return speculative.generation
        self._stop(speculative.generation)
        return None

    # responses

    def note_turn(self, item_id: str, timestamps: TurnTimestamps) -> None:
        """Store the timestamps of a spoken turn, for the latency of a response that the client
        requests later.
        """
        self._unanswered = (item_id, timestamps)

    def respond(self, timestamps: TurnTimestamps, generation: Generation | None = None) -> None:
        """Begin a response to the conversation, unless it is empty; without an output format, send
        an error instead of a spoken response. `generation` is the speculative generation to use, if
        any. No response may be active.
        """
        settings = self._context.settings
        plan = default_plan(self._context, settings)
        if plan.spoken and settings.audio.output.format is None:
            self._context.send(error_event(no_output_format()))
            return
        if generation is None:
            messages = self._conversation.messages(settings.instructions)
            if not messages:
                return
            generation = self._generate(messages, settings, plan)
        self._unanswered = None
        self._begin(plan, generation, timestamps)

    def create(self, patch: ResponsePatch, conversation: Conversation | None = None) -> None:
        """Begin the response that a `response.create` requests. `conversation` is the converted
        `input` of the event, if a thread has converted it already.

        Raises: BadInput, NotFound.
        """
        check_dialect(patch)
        settings, out_of_band = self._context.settings, patch.conversation == "none"
        if not out_of_band and self.active is not None:
            raise ActiveResponse(
                f"the conversation has an active response ({self.active.id}); cancel it, or "
                "wait for its end"
            )
        if out_of_band and len(self._out_of_band) >= MAX_OUT_OF_BAND:
            raise ActiveResponse(
                f"{MAX_OUT_OF_BAND} responses outside the conversation are active; wait for the "
                "end of one"
            )
        if not out_of_band:
            self.discard_speculative()
        plan = requested_plan(self._context, settings, patch)
        instructions = settings.instructions if patch.instructions is None else patch.instructions
        self._gateway.frontend.check_text(
            TextPart(text=instructions, where="response.instructions")
        )
        conversation = conversation if conversation is not None else self._input(patch)
        messages = conversation.messages(instructions)
        if not messages:
            where = "response.input"
            raise BadInput(
                f"{where}: there is nothing to answer; add an item, audio or instructions",
                param=where,
            )
        timestamps = TurnTimestamps(decided=self._clock.now())
        if not out_of_band:
            turn, self._unanswered = self._unanswered, None
            if turn is not None and turn[0] == conversation.last_id:
                timestamps = replace(turn[1], decided=timestamps.decided)
        self._begin(plan, self._generate(messages, settings, plan), timestamps)

    def _input(self, patch: ResponsePatch) -> Conversation:
        if patch.input is None:
            return self._conversation
        return ItemReader(self._gateway, self._context.settings).items(
            patch.input, self._conversation, "response.input"
        )

    def cancel(self, response_id: str | None) -> None:
        """Cancel a response; without an id, the active response of the conversation. Raises:
        NotActive.
        """
        response = self.active if response_id is None else self.find(response_id)
        if response is None or not response.is_active:
            raise NotActive(
                "there is no active response to cancel",
                param="response_id" if response_id else None,
            )
        # The client may still play all that it has been sent; a `truncate` reports where it
        # stopped.
        self._cancel(response, "client_cancelled", response.playhead.sent)

    def cancel_spoken(self) -> None:
        """Cancel all spoken responses after the output format was refused, since the client would
        play the audio in another format.
        """
        self.discard_speculative()
        for response in self._all:
            response.stop_resending()
            if response.is_active and response.plan.spoken:
                self._cancel(response, "client_cancelled", response.playhead.sent)

    def release(self, response: ResponseStream) -> None:
        """Forget `response`, which has ended, if it is out of band."""
        self._out_of_band.pop(response.id, None)

    def restored_prompt(self, plan: ResponsePlan, seed: int | None) -> Prompt | None:
        """Return the prompt of a response that another gateway began and of which nothing was sent;
        None if the prompt cannot be derived from the conversation.
        """
        if seed is None or plan.own_input or plan.skip_samples or plan.skip_chars:
            return None
        instructions = (
            self._context.settings.instructions if plan.instructions is None else plan.instructions
        )
        return self._prompt(self._conversation.messages(instructions), plan, seed)

    # barge-in

    def interrupt(self, reason: CancelReason = "turn_detected") -> bool:
        """Cancel the response that is being sent or played, and discard its unplayed audio.
        `reason` is the reason that the client receives. Returns True if the response can be resumed
        after a false alarm.

        A response that was cancelled before and is still being played cannot be resumed.
        """
        now, response = self._clock.now(), self.current
        for other in self._resending:
            other.stop_resending()
        if response is None or not (self._is_audible(response) or response.is_resending):
            return False
        played = response.playhead.position(now)
        response.stop_resending()
        self._context.connection.clear_audio()
        if response.is_active:
            self._cancel(response, reason, played)
        else:
            # Words that an earlier cut removed stay removed.
            response.truncate_text(min(played, response.played_samples))
            if response.outcome == CANCELLED:
                return False
        self.interrupted = response
        return True

    def prepare_truncation(self, item_id: str) -> None:
        """Call `ResponseStream.prepare_truncation` if the item is the active response's."""
        if self.active is not None and self.active.item_id == item_id:
            self.active.prepare_truncation()

    def forget_interrupted(self) -> None:
        self.interrupted = None

    def resume_interrupted(self) -> None:
        """Continue the interrupted response after a false alarm. The rest is a new response."""
        old, self.interrupted = self.interrupted, None
        if (
            old is None
            or self.active is not None
            or (old.plan.spoken and self._context.settings.audio.output.format is None)
        ):
            return
        old.note_continued()
        num_chars = len(old.item.parts[0].text) if old.item is not None else 0
        plan = replace(
            old.plan,
            skip_samples=old.plan.skip_samples + old.played_samples,
            skip_chars=old.plan.skip_chars + num_chars,
            metadata=None,
        )
        generation = Generation(
            self._gateway,
            self._clock,
            old.generation.prompt,
            shorten=old.generation.shorten,
            recognitions=self.recognitions,
        )
        generation.continue_from(old.generation)
        self._begin(plan, generation, TurnTimestamps(decided=self._clock.now()))

    # end of the session

    def stop(self) -> None:
        """Stop all responses and their generations at the end of the session."""
        self._stop_early_work()
        for response in self._all:
            response.stop()

    def detach(self) -> None:
        """Stop sending all responses, since another gateway holds the session and continues
        them.
        """
        self._stop_early_work()
        for response in self._all:
            response.detach()

    def _stop_early_work(self) -> None:
        self.discard_speculative()
        if self._reading is not None:
            self._reading.stop()

    def _begin(
        self, plan: ResponsePlan, generation: Generation, timestamps: TurnTimestamps
    ) -> None:
        response = ResponseStream(self._context, self._events, plan, generation, timestamps)
        if plan.in_conversation:
            self._resending = [other for other in self._all if other.is_resending]
            self.current = response
        else:
            self._out_of_band[response.id] = response
        response.start()

    def _cancel(self, response: ResponseStream, reason: CancelReason, played: int) -> None:
        self.limit.count(self._clock.now())
        response.cancel(reason, played)

    def _generate(
        self, messages: Sequence[Message], settings: Settings, plan: ResponsePlan
    ) -> Generation:
        generation = Generation(
            self._gateway,
            self._clock,
            self._prompt(messages, plan),
            shorten=settings.truncation == "auto",
            recognitions=self.recognitions,
        )
        generation.on_heard = self._conversation.set_clip_transcript
        if plan.in_conversation and plan.instructions is None:
            self._read = (settings.instructions, plan.tools)
        generation.start()
        return generation

    def hearing(self, clip: str) -> Generation | None:
        """Return the generation whose answer brings the transcript of this clip; None if there is
        none.
        """
        found = (response.generation for response in self._all if response.generation.hears(clip))
        return next(found, None)

    def _prompt(
        self, messages: Sequence[Message], plan: ResponsePlan, seed: int | None = None
    ) -> Prompt:
        return make_prompt(
            self._gateway.model,
            messages,
            spoken=plan.spoken,
            voice=plan.voice,
            max_output_tokens=self._max_tokens(plan),
            session=plan.conversation_id if plan.in_conversation else None,
            seed=seed,
            hearing=self._context.settings.hearing,
            speed=plan.speed,
            tools=plan.tools,
            store=self._context.settings.store_option,
        )

    def _max_tokens(self, plan: ResponsePlan) -> int | None:
        """Return the requested token limit of a response, at most this server's limit, since
        OpenAI's clients request what OpenAI's models can generate; None without a requested limit.
        """
        requested = plan.max_output_tokens
        return (
            min(requested, self._gateway.config.limits.max_answer_tokens)
            if isinstance(requested, int)
            else None
        )

    def _stop(self, generation: Generation) -> None:
        self.limit.count(self._clock.now())
        task = generation.stop()
        if task is not None and not task.done():
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)
