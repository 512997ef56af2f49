"""Limits of a session's duration and idle time, measured by a manual clock."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.config.schema import VoiceConfig
from fleet.control.voice import HeldVoice
from tests.support import await_until
from tests.web.conftest import Loaded
from tests.web.fake_client import FakeClient, Script
from tests.web.fake_stores import FakeVoice
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.socket_client import message
from web.gateway.gateway import Gateway
from web.realtime import session_registry
from web.realtime.audio.formats import AudioFormat
from web.realtime.discard_limit import BURST, PER_S, DiscardLimit
from web.realtime.protocol.capabilities import default_settings
from web.realtime.protocol.server_events import Error, ResponseCreated, ServerEvent
from web.realtime.session import Session
from web.realtime.session_registry import Received, SessionRegistry
from web.realtime.transport.client_secrets import NO_KEY

NOTHING = Received(response_id=None, samples=None, chars=None)
SILENCE = json.dumps(
    {"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(480)).decode()}
)
CREATE = json.dumps({"type": "response.create", "response": {"instructions": "hello"}})
IDLE_S, MAX_S = VoiceConfig().idle_s, VoiceConfig().max_session_s


@dataclass(slots=True)
class BoundedClient:
    """A recorder of the events sent to a client. Satisfies `client_connection.ClientWriter`."""

    events: list[ServerEvent] = field(default_factory=list[ServerEvent])
    closed: tuple[int, str] | None = None
    plays: bool = False
    takes_audio: bool = True

    def send(self, event: ServerEvent) -> None:
        self.events.append(event)

    def send_audio(
        self, response_id: str, item_id: str, first_sample: int, audio: bytes, form: AudioFormat
    ) -> None:
        return

    def clear_audio(self) -> None:
        return

    def close(self, code: int, reason: str) -> None:
        self.closed = (code, reason)

    @property
    def error(self) -> str | None:
        return next((event.error.code for event in self.events if isinstance(event, Error)), None)


@dataclass(slots=True)
class Talk:
    """A session in a registry whose clock stands still unless the test advances it."""

    registry: SessionRegistry
    fake: FakeClient
    gateway: Gateway
    clock: ManualClock
    client: BoundedClient = field(default_factory=BoundedClient)

    async def begin(self) -> Session:
        return await self.registry.enter(
            self.client, default_settings(self.gateway), NO_KEY, lambda _: None
        )

    async def passes(self, seconds: float) -> None:
        """Advance the clock, and let the gateway check its sessions twice."""
        self.clock.advance(seconds)
        for _ in range(2):
            num_writes = self.fake.voice.num_saved
            for session in self.registry.sessions.values():
                session.publish()
            await await_until(
                partial(self._is_checked, num_writes), "the gateway to check the session"
            )

    async def _is_checked(self, num_writes: int) -> bool:
        return self.fake.voice.num_saved > num_writes or not self.registry.sessions


@pytest.fixture
async def talk(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Talk]:
    monkeypatch.setattr(session_registry, "SETTLE_S", 0.0)
    fake = loaded.fake_client()
    config = loaded.config.model_copy(update={"voice": VoiceConfig(reconnect_timeout_s=MAX_S)})
    gateway, clock = Gateway(config, fake, loaded.frontend), ManualClock()
    talk = Talk(SessionRegistry(gateway, clock), fake, gateway, clock)
    yield talk
    for name in list(talk.registry.sessions):
        talk.registry.end(name)
    await await_until(lambda: _none_held(fake), "the sessions to end")


async def _none_held(fake: FakeClient) -> bool:
    await asyncio.sleep(0)
    return not fake.voice.held


async def test_active_session_ends_at_its_longest_duration(talk: Talk) -> None:
    session = await talk.begin()
    step_s = MAX_S / 6
    for _ in range(5):
        session.num_frames += 1
        await talk.passes(step_s)
    assert talk.client.error is None and talk.client.closed is None
    session.num_frames += 1
    await talk.passes(step_s)
    assert (
        talk.client.error == "session_expired"
        and talk.client.closed is not None
        and talk.client.closed[0] == 1001
    )


async def test_session_without_client_events_ends_idle(talk: Talk) -> None:
    await talk.begin()
    await talk.passes(IDLE_S - 1)
    assert talk.client.error is None
    await talk.passes(1)
    assert (
        talk.client.error == "session_idle"
        and talk.client.closed is not None
        and talk.client.closed[0] == 1000
    )
    assert "15 minutes" in talk.client.closed[1]


async def test_client_that_sends_silence_is_not_idle(talk: Talk) -> None:
    session = await talk.begin()
    for _ in range(3):
        await talk.passes(IDLE_S - 1)
        session.num_frames += 1
        await session.receive(SILENCE)
        await talk.passes(0)
    assert talk.client.error is None


async def test_client_that_receives_a_response_is_not_idle(talk: Talk) -> None:
    """A client that receives a response, or still plays it, is not idle."""
    talk.fake.script = Script(stall_at=3)
    session = await talk.begin()
    await session.receive(
        json.dumps({"type": "conversation.item.create", "item": message("hello")})
    )
    await session.receive(json.dumps({"type": "response.create"}))
    await talk.passes(3 * IDLE_S / 2)
    await session.receive(json.dumps({"type": "response.cancel"}))
    await talk.passes(10)
    assert not session.responses.is_busy
    assert talk.client.error is None
    await talk.passes(IDLE_S)
    assert talk.client.error == "session_idle"


async def test_absent_client_is_not_idle_but_reaches_the_longest_duration(talk: Talk) -> None:
    session = await talk.begin()
    talk.registry.on_lost(session, talk.client)
    await talk.passes(2 * IDLE_S)
    again = BoundedClient()
    assert await talk.registry.resume(session.id, again, NOTHING, NO_KEY) is session
    await talk.passes(IDLE_S - 1)
    assert again.error is None
    talk.registry.on_lost(session, again)
    await talk.passes(MAX_S - 3 * IDLE_S + 1)
    assert not talk.registry.sessions


async def test_client_that_creates_and_cancels_in_turn_is_throttled(talk: Talk) -> None:
    """A client that creates and cancels responses in turn is throttled: to a burst of responses,
    and then to a rate.
    """
    talk.fake.script = Script(stall_at=0)
    session = await talk.begin()

    async def flood() -> None:
        for _ in range(20 * BURST):
            await session.receive(CREATE)
            await asyncio.sleep(0)
            await session.receive('{"type":"response.cancel"}')

    flooding = asyncio.create_task(flood())
    for seconds in (0, 1):
        talk.clock.advance(seconds)
        most = BURST + PER_S * seconds
        await await_until(partial(_has_created, talk.client, most), "the burst to be used up")
        for _ in range(100):
            await asyncio.sleep(0)
        assert _num_created(talk.client) <= most + 1
    flooding.cancel()


async def _has_created(client: BoundedClient, num_events: float) -> bool:
    return _num_created(client) >= num_events


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


def _num_created(client: BoundedClient) -> int:
    return sum(isinstance(event, ResponseCreated) for event in client.events)


def test_discard_limit_recovers_up_to_the_burst() -> None:
    limit = DiscardLimit()
    for _ in range(BURST):
        assert limit.delay_s(100.0) == 0
        limit.count(100.0)
    limit.count(100.0)
    assert limit.delay_s(100.0) == 1 / PER_S and limit.delay_s(100.0 + 1 / PER_S) == 0
    assert limit.delay_s(10_000.0) == 0
    for _ in range(BURST + 1):
        limit.count(10_000.0)
    assert limit.delay_s(10_000.0) == 1 / PER_S


@pytest.mark.parametrize("num_before", [0, 1])
async def test_client_that_leaves_while_its_session_opens_leaves_none_behind(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """A client that leaves while its session opens leaves no session behind: a late reply of Redis
    is undone, at the first hold and at the hold after the queue.
    """
    hold, asked, gate = talk.fake.voice.hold, asyncio.Event(), asyncio.Event()

    async def slow(
        name: str, keep_s: float, owner: str, *, new: bool = False, limits: KeyLimits = NO_LIMITS
    ) -> HeldVoice | None:
        held = await hold(name, keep_s, owner, new=new, limits=limits)
        if new == (num_before == 0):
            asked.set()
            await gate.wait()
        return held

    others = [
        await talk.begin() for _ in range(num_before * talk.gateway.config.voice.max_sessions)
    ]
    monkeypatch.setattr(FakeVoice, "hold", staticmethod(slow))
    entering = asyncio.create_task(talk.begin())
    if others:
        await await_until(
            lambda: _is(lambda: len(talk.fake.voice.held) > len(others)), "the client to be in line"
        )
        talk.registry.end(others.pop().id)
    await asked.wait()
    entering.cancel()
    await asyncio.wait({entering})
    gate.set()
    await await_until(
        lambda: _is(lambda: set(talk.fake.voice.held) == {other.id for other in others}),
        "its session to be undone",
    )
    monkeypatch.undo()


async def test_client_that_leaves_during_a_takeover_is_away(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves during a takeover counts as away: it may reconnect, or a client secret
    may open a new session instead.
    """
    session = await talk.begin()
    await talk.passes(0)
    other, hold, asked, gate = (
        SessionRegistry(talk.gateway),
        talk.fake.voice.hold,
        asyncio.Event(),
        asyncio.Event(),
    )

    async def slow(
        name: str, keep_s: float, owner: str, *, new: bool = False, limits: KeyLimits = NO_LIMITS
    ) -> HeldVoice | None:
        held = await hold(name, keep_s, owner, new=new, limits=limits)
        asked.set()
        await gate.wait()
        return held

    monkeypatch.setattr(FakeVoice, "hold", staticmethod(slow))
    resuming = asyncio.create_task(other.resume(session.id, BoundedClient(), NOTHING, NO_KEY))
    await asked.wait()
    resuming.cancel()
    await asyncio.wait({resuming})
    gate.set()
    await await_until(
        lambda: _is(lambda: "away_us" in talk.fake.voice.held[session.id].fields),
        "its client to be noted as away",
    )
    monkeypatch.undo()
    assert await other.resume(session.id, BoundedClient(), NOTHING, NO_KEY) is not session
    assert other.end(session.id)
