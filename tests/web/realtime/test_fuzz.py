"""Malformed, out-of-order and oversized events are refused; nothing crashes or grows, and other
sessions are not disturbed.

`--events 20000` runs the long form.
"""

import asyncio
import base64
import gc
import json
import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from fleet.core.errors import BadInput
from tests.support import await_until
from tests.tool_template import WEATHER
from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from tests.web.realtime.socket_client import opened
from web.http.errors import status_of
from web.realtime.protocol.client_events import MAX_EVENT_BYTES, event_id_of, parse_event
from web.realtime.session import Session

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

KINDS = (
    "session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "output_audio_buffer.clear",
    "conversation.item.create",
    "conversation.item.delete",
    "conversation.item.retrieve",
    "conversation.item.truncate",
    "response.create",
    "response.cancel",
    "fleet.played",
    "no.such.event",
    "",
)
FIELDS = (
    "session",
    "audio",
    "item",
    "item_id",
    "content_index",
    "audio_end_ms",
    "response",
    "response_id",
    "samples",
    "event_id",
    "previous_item_id",
    "type",
    "input",
    "output",
    "turn_detection",
    "format",
    "rate",
    "voice",
    "content",
    "role",
    "text",
    "id",
    "metadata",
    "tools",
    "conversation",
    "instructions",
    "output_modalities",
    "transcription",
    "max_output_tokens",
    "underruns",
    "tool_choice",
    "parallel_tool_calls",
    "parameters",
    "strict",
    "name",
    "call_id",
    "arguments",
    "truncation",
    "language",
    "prompt",
    "threshold",
    "silence_duration_ms",
    "idle_timeout_ms",
    "eagerness",
    "create_response",
    "noise_reduction",
    "include",
    "speed",
)
SOUND = base64.b64encode(bytes(9_600)).decode()
SCALARS: tuple[object, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    10**30,
    1.5,
    float("1e308"),
    "",
    "x",
    "é\ud800",
    "root",
    "audio/pcm",
    "server_vad",
    "semantic_vad",
    "user",
    "assistant",
    "system",
    "message",
    "input_text",
    "input_audio",
    "output_audio",
    "item_reference",
    "marin",
    "inf",
    "none",
    "required",
    "function",
    "get_weather",
    "transcription",
    "realtime",
    "<|im_end|>",
    "[" * 2_000,
    SOUND,
    base64.b64encode(b"\xff\x7f" * 4_801).decode()[:-1],
    "A" * 70_000,
)


BROKEN = (
    "",
    "{",
    "[]",
    "null",
    '"x"',
    "[" * 50_000,
    '{"type":1}',
    '{"type":"response.create"',
    "\x00",
)


def random_value(source: random.Random, fields: Sequence[str], depth: int = 0) -> object:
    chance = source.random()
    if depth > 3 or chance < 0.55:
        return source.choice(SCALARS)
    if chance < 0.85:
        return {
            source.choice(fields): random_value(source, fields, depth + 1)
            for _ in range(source.randrange(4))
        }
    return [random_value(source, fields, depth + 1) for _ in range(source.randrange(4))]


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def value(self) -> object:
        return random_value(self._random, FIELDS)

    def frame(self) -> str | bytes:
        chance = self._random.random()
        if chance < 0.05:
            return self._random.randbytes(self._random.randrange(2_000))
        if chance < 0.10:
            return self._random.choice(BROKEN)
        if chance < 0.11:
            return json.dumps({"type": "input_audio_buffer.append", "audio": "A" * 2_000_000})
        event: dict[str, object] = {
            "type": self._random.choice(KINDS),
            "event_id": f"e{self._random.randrange(10**9)}",
        }
        if chance < 0.4:
            event |= self.likely()
        for _ in range(self._random.randrange(4)):
            event[self._random.choice(FIELDS)] = self.value()
        return json.dumps(event)

    def likely(self) -> dict[str, object]:
        """Generate an event that is nearly valid, to reach deeper code."""
        part = {
            "type": self._random.choice(["input_text", "output_audio", "input_audio"]),
            "text": "hi",
            "audio": SOUND,
        }
        return self._random.choice(
            [
                {
                    "type": "conversation.item.create",
                    "item": {"type": "message", "role": "user", "content": [part]},
                },
                {
                    "type": "response.create",
                    "response": {"conversation": self._random.choice(["auto", "none"])},
                },
                {"type": "input_audio_buffer.append", "audio": SOUND},
                {
                    "type": "session.update",
                    "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}},
                },
                {"type": "response.cancel"},
                *self.likely_tools(),
            ]
        )

    def likely_tools(self) -> list[dict[str, object]]:
        """Generate nearly valid events about tools and transcription."""
        return [
            {"type": "session.update", "session": {"type": "realtime", "tools": [WEATHER]}},
            {
                "type": "session.update",
                "session": {
                    "type": self._random.choice(["realtime", "transcription"]),
                    "audio": {"input": {"transcription": {"language": self._word()}}},
                },
            },
            {
                "type": "session.update",
                "session": {
                    "type": "realtime",
                    "tool_choice": {"type": "function", "name": self._word()},
                },
            },
            {
                "type": "response.create",
                "response": {"tools": [WEATHER], "tool_choice": self._word()},
            },
            {
                "type": "conversation.item.create",
                "item": {
                    "type": "function_call",
                    "name": "get_weather",
                    "call_id": "c",
                    "arguments": self._random.choice(["{}", "[" * 2_000, '{"a": "\\ud800"}']),
                },
            },
            {
                "type": "conversation.item.create",
                "item": {
                    "type": "function_call_output",
                    "call_id": self._random.choice(["c", "unknown"]),
                    "output": self._word(),
                },
            },
        ]

    def _word(self) -> object:
        return self._random.choice(SCALARS)


def live(kind: type) -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) is kind)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "path",
    ["/v1/realtime", "/console/ws", "/v1/realtime?fleet=1", "/v1/realtime?intent=transcription"],
)
async def test_random_invalid_events_leave_other_sessions_undisturbed(
    shared_caller: ServedGateway, num_events: int, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = shared_caller
    gateway.client.reset()
    gateway.client.script = Script(num_samples=4_800)
    before, held, fuzzer = live(Session), set(gateway.client.voice.held), Fuzzer(1)
    with caplog.at_level(logging.ERROR):
        async with opened(gateway) as bystander:
            await bystander.complete("hello")
            for _ in range(max(1, num_events // 500)):
                await storm(gateway, path, fuzzer, min(500, num_events))
            await bystander.complete("still there?")
    assert not [record for record in caplog.records if record.name.startswith("fleet")], (
        "an error was logged"
    )

    async def nothing_is_left() -> bool:
        return held >= set(gateway.client.voice.held) and live(Session) <= before

    await await_until(nothing_is_left, "every session to be gone")
    assert all(stream.finished or stream.aborted for stream in gateway.client.streams.values())


async def storm(gateway: ServedGateway, path: str, fuzzer: Fuzzer, num_events: int) -> None:
    """Send invalid events over one connection, which must stay open and usable."""
    async with connect(gateway.url.replace("http", "ws") + path, max_size=None) as socket:
        reading = asyncio.create_task(read(socket))
        for _ in range(num_events):
            await socket.send(fuzzer.frame())
        await socket.send(json.dumps({"type": "no.such.event", "event_id": "the-last"}))
        events = await asyncio.wait_for(reading, 120)
    assert events[0]["type"] == "session.created"
    assert not [
        event
        for event in events
        if event["type"] == "error" and event["error"]["type"] == "server_error"
    ]


async def read(socket: ClientConnection) -> list[dict[str, Any]]:
    """Read events up to the reply to the last event sent."""
    events: list[dict[str, Any]] = []
    try:
        async for frame in socket:
            if isinstance(frame, bytes):
                continue
            events.append(json.loads(frame))
            if events[-1]["type"] == "error" and events[-1]["error"]["event_id"] == "the-last":
                return events
    except ConnectionClosed as closed:
        raise AssertionError(f"the connection was closed: {closed}; last {events[-1:]}") from closed
    raise AssertionError("the connection was closed")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_event_is_parsed_or_refused_by_field(kind: str, fields: dict[str, object]) -> None:
    raw = json.dumps({**fields, "type": kind})
    event_id_of(raw)
    try:
        assert parse_event(raw).type == kind
    except BadInput as error:
        assert error.message and status_of(error) in (400, 413)


@given(st.text())
def test_text_that_is_not_an_event_is_refused(raw: str) -> None:
    event_id_of(raw)
    with pytest.raises(BadInput):
        parse_event(raw)


def test_event_beyond_the_bound_is_refused() -> None:
    with pytest.raises(BadInput, match="at most"):
        parse_event(" " * (MAX_EVENT_BYTES + 1))


def test_binary_frame_is_refused_over_openais_protocol(gateway: ServedGateway) -> None:
    async def send() -> dict[str, Any]:
        async with opened(gateway, "/v1/realtime") as page:
            await page.socket.send(b"\x00\x01")
            return await page.until("error")

    error_event = asyncio.run(send())
    assert "input_audio_buffer.append" in error_event["error"]["message"]
