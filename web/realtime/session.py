"""One voice session: what its client says, turned into items, answers and events; and what there is to know of it.

Whatever its client says is done at once, in the order it comes; what takes time (answers, transcripts) runs beside it. A session
outlives its socket: see `hall`. Knows no socket and no Redis.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from fleet.core.clock import now_us
from fleet.core.errors import FleetError, UnsupportedValue
from fleet.core.ids import RequestId
from web.gateway.gateway import Gateway
from web.http.offload import read_in_thread
from web.realtime import client_events as ask
from web.realtime import server_events as say
from web.realtime.client_connection import ClientConnection
from web.realtime.conversation import Clip, Conversation, Item
from web.realtime.heard import SpeakingRate
from web.realtime.items import ItemReader, no_input_format
from web.realtime.refusal import error_event
from web.realtime.response_manager import ResponseManager
from web.realtime.response_stream import ResponseStream
from web.realtime.settings import ServerVad, Settings
from web.realtime.story import SessionView, Story, shown_id, timing_parts
from web.realtime.turn_manager import TurnManager
from web.realtime.update import updated
from web.realtime.vad import Together

log = logging.getLogger("fleet.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCallbacks:
    """Observer of a session: `changed` is called after each change that another gateway needs to continue it."""

    changed: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all sessions of a gateway have in common: how fast it speaks, and who judges what they hear."""

    rate: SpeakingRate = field(default_factory=SpeakingRate)
    together: Together = field(default_factory=Together)


class Session:
    """Satisfies `response_manager.ResponseObserver`."""

    def __init__(
        self, gateway: Gateway, settings: Settings, shared: Shared, watch: SessionCallbacks, conversation_id: str | None = None
    ) -> None:
        limits = gateway.config.limits
        self.id = settings.id
        self.settings = settings
        self.conversation_id = conversation_id or say.new_id("conv")
        self.created_us = now_us()
        self.line = ClientConnection()
        self.story = Story()
        self.watch = watch
        self.num_received = 0
        """Frames of its client, of any kind."""
        self.conversation = Conversation(limits.max_messages - 1, limits.max_audio_s)
        self.replies = ResponseManager(
            gateway, self.line, self.conversation, lambda: self.settings, self,
            conversation_id=self.conversation_id, rate=shared.rate,
        )  # fmt: skip
        self.listener = TurnManager(
            gateway, self.line, self.conversation, self.replies, lambda: self.settings, self._add, shared.together
        )
        self._gateway = gateway
        self._jobs: set[asyncio.Task[None]] = set()
        self._audio_refused = False
        """The client knows already that its audio is not read."""
        self._logged_ignored: set[str] = set()
        self._state = ""
        self._quiet: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def receive(self, raw: str) -> None:
        """One event of the client's. What is wrong with it is told, and nothing else happens."""
        await self._keep_pace()
        is_large = len(raw) > ask.MAX_PLAIN_BYTES
        try:
            if is_large:
                event = await read_in_thread(ask.parse_event, raw)
                await self._handle_large(event)
            else:
                event = ask.parse_event(raw)
                await self._handle(event)
            if isinstance(event, ask.BufferAppend):
                return
        except FleetError as error:
            self.refuse(error, await read_in_thread(ask.event_id_of, raw) if is_large else ask.event_id_of(raw))
        self.note()

    async def hear(self, pcm: bytes, event_id: str | None = None) -> None:
        """Sound as it is: PCM16 at the rate that the settings declare. Most of it changes nothing that anybody is told."""
        if not self._has_input_format(event_id):
            return
        await self._keep_pace()
        try:
            if await self.listener.hear(pcm):
                self.note()
        except FleetError as error:
            self.refuse(error, event_id)
        self._note_state()

    async def _keep_pace(self) -> None:
        """Read no more from a client that has answers begun and discarded, one after the other."""
        if (delay_s := self.replies.pace.delay_s(time.monotonic())) > 0:
            await asyncio.sleep(delay_s)

    def refuse(self, error: FleetError, event_id: str | None = None) -> None:
        self.line.tell(error_event(error, event_id))

    def _has_input_format(self, event_id: str | None) -> bool:
        """Return True if audio can be read. Refuse it otherwise, once for each update: a microphone sends many blocks."""
        if self.settings.audio.input.format is not None:
            return True
        if not self._audio_refused:
            self._audio_refused = True
            self.refuse(no_input_format("audio"), event_id)
        return False

    async def _handle_large(self, event: ask.AnyClientEvent) -> None:
        """Decode and resample long audio in a thread."""
        reader = ItemReader(self._gateway, self.settings)
        match event:
            case ask.BufferAppend():
                if self._has_input_format(event.event_id):
                    await self.hear(await read_in_thread(ask.decode_pcm, event.audio, "audio"), event.event_id)
            case ask.ItemCreate():
                item, clips = await read_in_thread(reader.item, event.item, "item")
                self._add(item, clips, event.previous_item_id)
            case ask.ResponseCreate(response=ask.ResponsePatch(input=list(patches)) as wanted):
                known = self.conversation.snapshot()
                self._create(wanted, await read_in_thread(reader.items, patches, known, "response.input"))
            case _:
                await self._handle(event)

    async def _handle(self, event: ask.AnyClientEvent) -> None:
        match event:
            case ask.BufferAppend():
                if self._has_input_format(event.event_id):
                    await self.hear(ask.decode_pcm(event.audio, "audio"), event.event_id)
            case ask.ItemRetrieve():
                await self._retrieve(event.item_id)
            case ask.SessionUpdate():
                self.update(event.session, event.event_id)
            case ask.BufferCommit():
                self.listener.commit()
            case ask.BufferClear():
                self.listener.clear()
            case ask.ItemCreate() | ask.ItemDelete() | ask.ItemTruncate():
                self._handle_item(event)
            case ask.ResponseCreate():
                self._create(event.response or ask.ResponsePatch())
            case ask.ResponseCancel():
                self.replies.cancel(event.response_id)
            case ask.Played():
                self._note_played(event)
            case ask.OutputClear():
                message = "type: output_audio_buffer.clear is for WebRTC; stop playing and truncate the item"
                raise UnsupportedValue(message, param="type")

    def _create(self, wanted: ask.ResponsePatch, given: Conversation | None = None) -> None:
        self.replies.create(wanted, given)
        self._log_ignored("response.tools" if wanted.tools else "")

    async def _retrieve(self, item_id: str) -> None:
        """Send an item with its audio, which is resampled in a thread: a short event may ask for minutes of it."""
        item = self.conversation.find(item_id)
        if self.settings.audio.input.format is not None and any(part.clip for part in item.parts):
            body = await read_in_thread(self.conversation.body, item, with_audio=True)
        else:
            body = self.conversation.body(item)
        self.line.tell(say.ItemRetrieved(item=body))

    def _handle_item(self, event: ask.ItemCreate | ask.ItemDelete | ask.ItemTruncate) -> None:
        conversation = self.conversation
        match event:
            case ask.ItemCreate():
                item, clips = ItemReader(self._gateway, self.settings).item(event.item, "item")
                self._add(item, clips, event.previous_item_id)
            case ask.ItemDelete():
                conversation.remove(event.item_id)
                self.line.tell(say.ItemDeleted(item_id=event.item_id))
            case ask.ItemTruncate():
                self.replies.note_told(event.item_id)
                conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
                told = say.ItemTruncated(
                    item_id=event.item_id, content_index=event.content_index, audio_end_ms=event.audio_end_ms
                )
                self.line.tell(told)

    def update(self, fields: Mapping[str, object], event_id: str | None = None) -> None:
        """Apply what is served of a `session.update`. Each field that is not is refused by its name; `session.updated` always
        follows, since clients wait for it.
        """
        settings, refused = updated(self._gateway, self.settings, fields)
        before, self.settings = self.settings, settings
        self._audio_refused = False
        self.listener.changed(before)
        for error in refused:
            self.refuse(error, event_id)
        if settings.audio.output.format is None and before.audio.output.format is not None:
            self.replies.stop_speaking()
        for name in settings.fleet_ignored or ():
            self._log_ignored(name)
        self.line.tell(say.SessionUpdated(session=settings))

    def _log_ignored(self, name: str) -> None:
        """Log an ignored field once in a session: clients send it with every update."""
        if name and name not in self._logged_ignored:
            self._logged_ignored.add(name)
            log.warning("session %s: %s is ignored: tools are not served", shown_id(self.id), name)

    def _add(self, item: Item, clips: dict[str, Clip], after: str | None = None) -> None:
        gone = self.conversation.add(item, clips, after)
        previous, body = self.conversation.previous(item.id), self.conversation.body(item)
        self.line.tell(say.ItemAdded(previous_item_id=previous, item=body))
        self.line.tell(say.ItemDone(previous_item_id=previous, item=body))
        for item_id in gone:
            self.line.tell(say.ItemDeleted(item_id=item_id))

    def _note_played(self, event: ask.Played) -> None:
        run = self.replies.find(event.response_id)
        if run is not None:
            run.playhead.told(event.samples, time.monotonic())
        underruns = min(event.underruns, 1000)
        self._gateway.metrics.count_underruns(underruns)
        if run is not None:
            # In the sound as the stages made it, which is what the request's story holds.
            before = run.making.num_trimmed + run.plan.skip_samples
            self._gateway.playback_reports.note(run.making.request_id, before + event.samples, underruns)
        self.story.underruns += underruns

    # replies.Watcher

    def began(self, run: ResponseStream) -> None:
        self.listener.on_answer_begun()
        if run.plan.in_conversation:
            self.story.turns += 1
            if not run.plan.spoken:
                self._spawn(self._tell_timing(run))
        self.note()

    def voiced(self, run: ResponseStream) -> None:
        if run.plan.in_conversation and run.marks.first_sent:
            self._spawn(self._tell_timing(run))

    def over(self, run: ResponseStream) -> None:
        self.story.server_underruns += run.playhead.underruns
        self.listener.on_answer_over()
        self.note()

    async def _tell_timing(self, run: ResponseStream) -> None:
        """From the marks of this process, and those of the stages: the clocks of other machines may differ, ours do not."""
        marks, aloud = run.marks, run.plan.spoken
        first = marks.first_voiced if aloud else marks.first_sent
        assert first is not None
        begin = marks.decided if marks.voiced_end is None else min(marks.voiced_end, marks.decided)
        spoken_ms = round((first - begin) * 1000, 1) if marks.voiced_end is not None and aloud else None
        if spoken_ms is not None:
            self.story.note(spoken_ms)
            self._gateway.metrics.observe_voice_to_voice(spoken_ms / 1000)
        try:
            made = await self._gateway.client.telemetry.first_outputs(RequestId(run.making.request_id))
        except FleetError as error:
            log.warning("request %s: its timing is not known: %s", run.making.request_id, error.message)
            return
        to_us = now_us() - time.monotonic() * 1e6
        arrived = (run.making.first_sound_at if aloud else None) or first
        parts = timing_parts(
            int(begin * 1e6 + to_us), int(marks.decided * 1e6 + to_us), made.claimed_us, made.first_us,
            self._gateway.graph.stages_for(self._gateway.outputs(spoken=aloud)), int(arrived * 1e6 + to_us),
            int(first * 1e6 + to_us) if aloud else None,
        )  # fmt: skip
        told = say.Timing(
            response_id=run.id, request_id=run.making.request_id, item_id=run.item_id, voice_to_voice_ms=spoken_ms,
            voiced_end_ms=marks.voiced_end_ms, parts=parts,
        )  # fmt: skip
        self.line.tell(told)
        self.watch.changed()

    # its state

    def note(self) -> None:
        """Something may have changed: say so to whoever looks."""
        self._note_state()
        self.watch.changed()

    def _note_state(self) -> None:
        state = self.state()
        if state == self._state:
            return
        self._state = state
        self.line.tell(say.State(state=state))
        self._set_idle(state)
        self.watch.changed()

    def state(self) -> str:
        run, now = self.replies.run, time.monotonic()
        if self.listener.hearing:
            return "interrupted" if self.replies.interrupted is not None else "hearing"
        if run is None or not self.replies.sounding(now):
            return "listening"
        if run.active and run.marks.first_sent is None:
            return "thinking"
        if not run.active:
            self._look_again(run.playhead.left_s(now))
        return "speaking"

    def _look_again(self, after_s: float) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet = asyncio.get_running_loop().call_later(after_s + 0.01, self.note)

    def _set_idle(self, state: str) -> None:
        """Once both are silent, the user has so long to say something."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        detection = self.settings.detection
        wait_ms = detection.idle_timeout_ms if isinstance(detection, ServerVad) else None
        if state == "listening" and wait_ms is not None and self.story.turns:
            self._idle = asyncio.get_running_loop().call_later(wait_ms / 1000, self._time_out)

    def _time_out(self) -> None:
        self.listener.time_out()
        self.note()

    @property
    def answering(self) -> bool:
        """Return True while a response is made, or its audio is played."""
        return self.replies.busy(time.monotonic())

    def view(self, gateway_id: str, client_secret: str | None) -> SessionView:
        active = self.replies.active
        return SessionView(
            id=self.id,
            gateway=gateway_id,
            state=self.state() if self.line.listening else "away",
            turns=self.story.turns,
            voice_to_voice_last_ms=self.story.last_ms,
            voice_to_voice_median_ms=self.story.median_ms,
            interruptions=self.listener.interruptions,
            underruns=self.story.underruns,
            input_rate_hz=self.listener.ear.rate_hz,
            voice=self.settings.audio.output.voice,
            request_id=active.making.request_id if active is not None else None,
            client_secret=client_secret,
            created_us=self.created_us,
            seen_us=now_us(),
        )

    # its end

    def abandon(self) -> None:
        """It is over: everything for it stops."""
        self._stop_timers()
        self.replies.abandon()

    def let_go(self) -> None:
        """Another gateway has it now."""
        self._stop_timers()
        self.replies.let_go()

    def _stop_timers(self) -> None:
        self.listener.stop()
        for job in self._jobs:
            job.cancel()
        for timer in (self._quiet, self._idle):
            if timer is not None:
                timer.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
