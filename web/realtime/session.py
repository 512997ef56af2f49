"""A voice session: passes the client's events to the parts of the session, and handles the events
that the parts report.

Client events are handled immediately, in the order of arrival; responses and transcripts run
concurrently. A session outlives its socket: see `session_registry`. Knows no socket and no Redis.

The session owns its parts, each of which calls only the parts after it: turn manager, response
manager, response stream, generation. Response streams report back through an event queue.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping

from fleet.core.clock import now_us
from fleet.core.errors import FleetError, UnsupportedValue
from fleet.core.ids import RequestId
from web.gateway.gateway import Gateway
from web.gateway.ignored_fields import warning_of
from web.http.offload import read_in_thread, read_input
from web.realtime.clock import Clock, Timer
from web.realtime.context import EventQueue, SessionContext, SharedAudio
from web.realtime.conversation import Conversation
from web.realtime.items import ItemReader, no_input_format
from web.realtime.protocol import client_events as client
from web.realtime.protocol import server_events as server
from web.realtime.protocol.session_update import apply_update
from web.realtime.protocol.settings import ServerVad, Settings
from web.realtime.protocol.transcription_session import check_event, session_body
from web.realtime.response_manager import ResponseManager
from web.realtime.response_stream import Milestone, ResponseEvent, ResponseStream
from web.realtime.session_stats import SessionStats, timing_parts
from web.realtime.session_views import SessionView, shown_id
from web.realtime.states import SESSION_TABLE, SessionState
from web.realtime.transport.client_connection import ClientConnection
from web.realtime.transport.refusal import error_event
from web.realtime.turn_log import TurnLog
from web.realtime.turn_manager import TurnManager

log = logging.getLogger("fleet.web")

MAX_REPORTED_UNDERRUNS = 1000


class Session:
    def __init__(
        self,
        gateway: Gateway,
        settings: Settings,
        shared: SharedAudio,
        clock: Clock,
        on_change: Callable[[], None],
        conversation_id: str | None = None,
    ) -> None:
        """Create a session without a client.

        `on_change` is called after each change that another gateway needs to continue the session.
        `conversation_id` is the id of a conversation to restore; by default a new id.
        """
        limits = gateway.config.limits
        self.id = settings.id
        self.created_us = now_us()
        self.stats = SessionStats()
        self.num_frames = 0
        """Number of frames of any kind that the client has sent."""
        self.context = SessionContext(
            gateway=gateway,
            settings=settings,
            conversation=Conversation(
                limits.max_messages - 1,
                limits.max_audio_s,
                sends_transcripts=gateway.edges.heard is not None,
            ),
            conversation_id=conversation_id or server.new_id("conv"),
            connection=ClientConnection(),
            clock=clock,
            shared=shared,
        )
        self.events = EventQueue[ResponseEvent](self._on_response_event)
        self.responses = ResponseManager(self.context, self.events)
        self.turns = TurnManager(self.context, self.responses)
        self.turn_log = TurnLog(self.context, self._to_us)
        self._gateway = gateway
        self._clock = clock
        self._on_change = on_change
        self._conversation, self._send = self.context.conversation, self.context.send
        self._jobs: set[asyncio.Task[None]] = set()
        self._is_audio_refused = False
        """True once the client was sent the error that its audio is not read, until the next
        `session.update`.
        """
        self._logged_fields: set[str] = set()
        self._state: SessionState | None = None
        self._playback_end: Timer | None = None
        self._idle: Timer | None = None

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def connection(self) -> ClientConnection:
        return self.context.connection

    # client events

    async def receive(self, raw: str) -> None:
        """Handle an event of the client, given as JSON. An invalid event is answered by an `error`
        event and changes nothing.
        """
        await self._throttle()
        is_large = len(raw) > client.MAX_PLAIN_BYTES
        try:
            event = await read_input(is_large, client.parse_event, raw)
            await self._handle(event, is_large=is_large)
            if isinstance(event, client.BufferAppend):
                return
        except FleetError as error:
            self.send_error(error, await read_input(is_large, client.event_id_of, raw))
        self.publish()

    async def receive_audio(self, audio: bytes, event_id: str | None = None) -> None:
        """Append audio in the session's input format to the input. `event_id` is the client's id of
        the event, for an error.
        """
        if not self._has_input_format(event_id):
            return
        await self._throttle()
        try:
            if await self.turns.append(audio):
                self.publish()
        except FleetError as error:
            self.send_error(error, event_id)
        self._publish_state()

    async def _throttle(self) -> None:
        """Delay the events of a client that has caused too many responses to be started and
        discarded.
        """
        if (delay_s := self.responses.limit.delay_s(self._clock.now())) > 0:
            await self._clock.sleep(delay_s)

    def send_error(self, error: FleetError, event_id: str | None = None) -> None:
        self._send(error_event(error, event_id))

    def _has_input_format(self, event_id: str | None) -> bool:
        """Return True if the session has an input format. Otherwise send an error, once per
        `session.update`, since a microphone sends many pieces.
        """
        if self.settings.audio.input.format is not None:
            return True
        if not self._is_audio_refused:
            self._is_audio_refused = True
            self.send_error(no_input_format("audio", self._gateway), event_id)
        return False

    async def _handle(self, event: client.AnyClientEvent, *, is_large: bool) -> None:
        """Handle a parsed event of the client. If `is_large` is True, its audio is decoded and
        resampled in a thread.
        """
        check_event(self.settings, event.type)
        match event:
            case client.BufferAppend():
                if self._has_input_format(event.event_id):
                    await self.receive_audio(
                        await read_input(is_large, client.decode_audio, event.audio, "audio"),
                        event.event_id,
                    )
            case client.ItemCreate():
                reader = ItemReader(self._gateway, self.settings)
                item, clips = await read_input(is_large, reader.item, event.item, "item")
                self.context.add_item(item, clips, event.previous_item_id)
            case client.ItemDelete():
                self._conversation.remove(event.item_id)
                self._send(server.ItemDeleted(item_id=event.item_id))
            case client.ItemTruncate(item_id=item_id, content_index=index, audio_end_ms=end_ms):
                self.responses.prepare_truncation(item_id)
                self._conversation.truncate(item_id, index, end_ms)
                self._send(
                    server.ItemTruncated(item_id=item_id, content_index=index, audio_end_ms=end_ms)
                )
            case client.ItemRetrieve():
                await self._retrieve(event.item_id)
            case client.SessionUpdate():
                self.update(event.session, event.event_id)
            case client.BufferCommit():
                self.turns.commit()
            case client.BufferClear():
                self.turns.clear()
            case client.ResponseCreate():
                await self._create_response(
                    event.response or client.ResponsePatch(), is_large=is_large
                )
            case client.ResponseCancel():
                self.responses.cancel(event.response_id)
            case client.Played():
                self.record_playback(event)
            case client.OutputClear():
                self._clear_output()

    async def _create_response(self, patch: client.ResponsePatch, *, is_large: bool) -> None:
        conversation = None
        if is_large and patch.input is not None:
            reader, known = ItemReader(self._gateway, self.settings), self._conversation.snapshot()
            conversation = await read_in_thread(reader.items, patch.input, known, "response.input")
        self.responses.create(patch, conversation)
        ignores_tools = patch.tools and not self._gateway.call_format
        self._log_ignored("response.tools" if ignores_tools else "")

    async def _retrieve(self, item_id: str) -> None:
        """Send an item with its audio, which is resampled in a thread."""
        item = self._conversation.find(item_id)
        form = self.settings.audio.input.format if any(part.clip for part in item.parts) else None
        body = await read_input(form is not None, self._conversation.body, item, form)
        self._send(server.ItemRetrieved(item=body))

    def update(self, fields: Mapping[str, object], event_id: str | None = None) -> None:
        """Apply the valid and served fields of a `session.update`, and send an error for every
        other field. `session.updated` always follows, since clients wait for it.
        """
        before = self.settings
        has_begun = bool(self._conversation.items) or self.responses.current is not None
        settings, errors = apply_update(self._gateway, before, fields, has_begun=has_begun)
        self.context.settings = settings
        self._is_audio_refused = False
        self.turns.apply_settings(before)
        for error in errors:
            self.send_error(error, event_id)
        if settings.audio.output.format is None and before.audio.output.format is not None:
            self.responses.cancel_spoken()
        self._log_ignored("session.tools" if settings.warnings else "")
        self._send(server.SessionUpdated(session=session_body(settings)))

    def _log_ignored(self, name: str) -> None:
        """Log an ignored field, once in a session, since clients send it with every update; "" logs
        nothing.
        """
        if name and name not in self._logged_fields:
            self._logged_fields.add(name)
            log.warning("session %s: %s", shown_id(self.id), warning_of(name))

    def _clear_output(self) -> None:
        """Cancel what is being spoken, and discard the audio that has not been played. Raises:
        UnsupportedValue for a client that plays the audio itself.
        """
        if not self.connection.plays:
            message = (
                "type: output_audio_buffer.clear is for WebRTC; stop playing and truncate the item"
            )
            raise UnsupportedValue(message, param="type")
        current = self.responses.current
        if current is not None and current.plan.spoken:
            self.responses.interrupt("client_cancelled")
            self.responses.forget_interrupted()
        self.connection.clear_audio()

    def take_audio(self) -> None:
        """Resume sending audio, once the client can take it."""
        if self.responses.current is not None:
            self.responses.current.generation.wake()

    def record_playback(self, event: client.Played) -> None:
        """Record how much of a response the client has played, and add the underruns since the
        client's last report.
        """
        response = self.responses.find(event.response_id)
        underruns = min(event.underruns, MAX_REPORTED_UNDERRUNS)
        self.stats.underruns += underruns
        self.turn_log.add_underruns(event.response_id, underruns)
        self._gateway.metrics.count_underruns(underruns)
        if response is not None:
            played = event.samples * response.form.stride
            response.playhead.report(played, self._clock.now())
            response.generation.wake()
            # The request's trace holds positions in the audio as the stages generated it.
            before = response.generation.num_trimmed + response.plan.skip_samples
            self._gateway.playback_reports.note(
                response.generation.request_id, before + played, underruns
            )

    # events of the responses

    def _on_response_event(self, event: ResponseEvent) -> None:
        response, milestone = event
        self.turn_log.note(response)
        match milestone:
            case Milestone.STARTED:
                self.turns.transcripts.send_waiting()
                if response.plan.in_conversation:
                    self.stats.num_turns += 1
                    self._spawn(self._record_turn(response))
                    if not response.plan.spoken:
                        self._spawn(self._send_timing(response))
                self.publish()
            case Milestone.VOICED:
                if response.plan.in_conversation and response.timestamps.first_sent:
                    self._spawn(self._send_timing(response))
            case Milestone.ENDED:
                self.responses.release(response)
                self.turns.on_response_ended()
                self.publish()

    async def _record_turn(self, response: ResponseStream) -> None:
        """Write the times of the user's turn to the trace of the request that answers it."""
        voiced_end, decided = response.timestamps.voiced_end, response.timestamps.decided
        if voiced_end is None:
            return
        request = RequestId(response.generation.request_id)
        try:
            await self._gateway.client.telemetry.record_turn(
                request,
                voiced_end_us=self._to_us(voiced_end),
                decided_us=self._to_us(decided),
            )
        except FleetError as error:
            log.info("request %s: its turn cannot be written: %s", request, error.message)

    async def _send_timing(self, response: ResponseStream) -> None:
        """Send the latency of a response, made from the timestamps of this process and of the
        stages, whose clocks may differ on other machines.
        """
        timestamps, spoken = response.timestamps, response.plan.spoken
        first = timestamps.first_voiced if spoken else timestamps.first_sent
        assert first is not None
        voiced_end, decided = timestamps.voiced_end, timestamps.decided
        begin = decided if voiced_end is None else min(voiced_end, decided)
        voice_to_voice_ms = (
            round((first - begin) * 1000, 1) if voiced_end is not None and spoken else None
        )
        if voice_to_voice_ms is not None:
            self.stats.add(voice_to_voice_ms)
            self._gateway.metrics.observe_voice_to_voice(voice_to_voice_ms / 1000)
        generation = response.generation
        try:
            outputs = await self._gateway.client.telemetry.first_outputs(
                RequestId(generation.request_id)
            )
        except FleetError as error:
            log.warning(
                "request %s: the timing of its stages could not be read: %s",
                generation.request_id,
                error.message,
            )
            return
        first_audio_at = generation.first_audio_at if spoken else None
        arrived_us = (
            self._to_us(first)
            if first_audio_at is None
            else int(first_audio_at * 1e6 + now_us() - time.monotonic() * 1e6)
        )
        parts = timing_parts(
            self._to_us(begin),
            self._to_us(decided),
            outputs.claimed_us,
            outputs.first_us,
            self._gateway.graph.stages_for(self._gateway.outputs(spoken=spoken)),
            arrived_us,
            self._to_us(first) if spoken else None,
        )
        self.turn_log.add_timing(response.id, voice_to_voice_ms, parts)
        timing = server.Timing(
            response_id=response.id,
            request_id=generation.request_id,
            item_id=response.item_id,
            voice_to_voice_ms=voice_to_voice_ms,
            voiced_end_ms=timestamps.voiced_end_ms,
            parts=parts,
        )
        self._send(timing)
        self._on_change()

    def _to_us(self, at: float) -> int:
        """Convert a time of the session's clock to microseconds since 1970."""
        return int(at * 1e6 + now_us() - self._clock.now() * 1e6)

    # state

    def publish(self) -> None:
        """Send the session's state if it changed, and call `on_change`, so that the session is
        stored.
        """
        self._publish_state()
        self._on_change()

    def _publish_state(self) -> None:
        state = self.state()
        if state == self._state:
            return
        self._state = state
        self._send(server.State(state=state))
        self._set_idle_timer(state)
        self._on_change()

    def state(self) -> SessionState:
        state = SESSION_TABLE[self.turns.activity, self.responses.activity]
        if (
            state is SessionState.SPEAKING
            and self.responses.current is not None
            and not self.responses.current.is_active
        ):
            self._publish_after(self.responses.current.playhead.left_s(self._clock.now()))
        return state

    def _publish_after(self, delay_s: float) -> None:
        if self._playback_end is not None:
            self._playback_end.cancel()
        self._playback_end = self._clock.call_later(delay_s + 0.01, self.publish)

    def _set_idle_timer(self, state: SessionState) -> None:
        """Start the timer for the client's `idle_timeout_ms` if user and model are silent; stop it
        otherwise.
        """
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        detection = self.settings.detection
        wait_ms = detection.idle_timeout_ms if isinstance(detection, ServerVad) else None
        if state is SessionState.LISTENING and wait_ms is not None and self.stats.num_turns:
            self._idle = self._clock.call_later(wait_ms / 1000, self._on_idle_timeout)

    def _on_idle_timeout(self) -> None:
        self.turns.on_idle_timeout()
        self.publish()

    def view(self, gateway_id: str, client_secret: str | None) -> SessionView:
        active = self.responses.active
        return SessionView(
            id=self.id,
            gateway=gateway_id,
            state=self.state() if self.connection.is_attached else "away",
            turns=self.stats.num_turns,
            voice_to_voice_last_ms=self.stats.last_ms,
            voice_to_voice_median_ms=self.stats.median_ms,
            interruptions=self.turns.num_interruptions,
            underruns=self.stats.underruns,
            input_rate_hz=self.turns.buffer.rate_hz,
            voice=self.settings.audio.output.voice,
            request_id=active.generation.request_id if active is not None else None,
            client_secret=client_secret,
            created_us=self.created_us,
            seen_us=now_us(),
        )

    # end

    def stop(self) -> None:
        """End the session and all its responses, timers and tasks."""
        self._stop_timers()
        self.responses.stop()

    def detach(self) -> None:
        """Stop the session on this gateway, since another gateway holds it and continues its
        responses.
        """
        self._stop_timers()
        self.responses.detach()

    def _stop_timers(self) -> None:
        self.turns.stop()
        for job in self._jobs:
            job.cancel()
        for timer in (self._playback_end, self._idle):
            if timer is not None:
                timer.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
