"""Malformed frames on the sockets of growing texts and of telephone calls: an error event or a
close code answers each, no failure is logged, and no session, thread or memory is left.

`--events 5000` runs the long form.
"""

import asyncio
import base64
import gc
import json
import logging
import random
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from tests.support import await_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import Script
from tests.web.realtime.test_fuzz import BROKEN, live, random_value
from tests.web.realtime.test_telephone_calls import MULAW, PATH
from web.http.protocol.bounds import MAX_DISCARDED_BYTES
from web.realtime.session import Session
from web.realtime.transport.refusal import INVALID_REQUEST, TRY_AGAIN_LATER, UNAUTHORIZED
from web.realtime.transport.voice_socket import NORMAL_CLOSURE
from web.speech_stream.socket import SpeechSocket
from web.speech_stream.utterance import GrowingUtterance

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

SPEECH = "/v1/audio/speech/stream"
CLOSED = (
    NORMAL_CLOSURE,
    CloseCode.INVALID_DATA,
    CloseCode.MESSAGE_TOO_BIG,
    INVALID_REQUEST,
    UNAUTHORIZED,
    TRY_AGAIN_LATER,
)
"""Close codes of refusals. A failure of the server would be `INTERNAL_ERROR`."""
MAX_GROWTH_KIB = 256 * 1024
"""Limit of the growth of the process's peak memory over all frames, whose number does not matter.
"""
SPEECH_FIELDS = (
    *("type", "text", "voice", "response_format", "speed", "word_timestamps", "stream_audio"),
    *("model", "seed", "temperature", "fleet", "language", "x", ""),
)
SPEECH_KINDS = ("session.config", "input.text", "input.done", "session.close", "x", "")
CALL_FIELDS = ("event", "start", "media", "mark", "dtmf", "stop", "streamSid", "sequenceNumber")
CALL_KINDS = ("connected", "start", "media", "mark", "dtmf", "stop", "clear", "x", "")
BYTES = (b"", b"\xff\xfe", b'{"event":"\xff"}', b"\x00" * 3_000, b"{}")


class FrameFuzzer:
    """Maker of frames. `likely`: frames that are nearly valid, to reach deeper code."""

    def __init__(
        self,
        seed: int,
        kind: str,
        kinds: tuple[str, ...],
        names: tuple[str, ...],
        likely: list[Any],
    ) -> None:
        self._random = random.Random(seed)
        self._kind = kind
        self._kinds = kinds
        self._names = names
        self._likely = likely

    def frame(self) -> str | bytes:
        chance = self._random.random()
        if chance < 0.05:
            return self._random.choice(BYTES)
        if chance < 0.12:
            return self._random.choice(BROKEN)
        if chance < 0.13:
            return json.dumps({self._kind: "x", "x": "A" * 300_000})
        made: dict[str, object] = {self._kind: self._random.choice(self._kinds)}
        if chance < 0.7:
            made = dict(self._random.choice(self._likely))
        for _ in range(self._random.randrange(3)):
            made[self._random.choice(self._names)] = random_value(self._random, self._names)
        return json.dumps(made)


def speech_frames(seed: int) -> FrameFuzzer:
    likely = [
        {"type": "session.config", "response_format": "pcm"},
        {"type": "session.config", "response_format": "mp3", "stream_audio": True},
        {"type": "input.text", "text": "One two. Three"},
        {"type": "input.text", "text": "\u202e\N{GRINNING FACE}\0 <|im_end|>. "},
        {"type": "input.text", "text": "a" * 3_000},
        {"type": "input.done"},
    ]
    return FrameFuzzer(seed, "type", SPEECH_KINDS, SPEECH_FIELDS, likely)


def call_frames(seed: int) -> FrameFuzzer:
    sound = base64.b64encode(b"\x7f\x00" * 80).decode()
    likely = [
        {"event": "connected"},
        {"event": "media", "media": {"track": "inbound", "payload": sound}},
        {"event": "media", "media": {"track": "outbound", "payload": "!"}},
        {"event": "media", "media": {"payload": "A" * 100_000}},
        {"event": "mark", "mark": {"name": "resp_1:99999999999999999999"}},
        {"event": "dtmf", "dtmf": {"digit": "1"}},
        START,
        {"event": "start", "start": {"streamSid": "x" * 300, "mediaFormat": MULAW}},
        {"event": "start", "start": {"streamSid": "x", "mediaFormat": {"sampleRate": -(2**63)}}},
    ]
    return FrameFuzzer(seed, "event", CALL_KINDS, CALL_FIELDS, likely)


START: dict[str, object] = {
    "event": "start",
    "start": {"streamSid": "MZ1", "mediaFormat": MULAW, "customParameters": {}},
}


SETTINGS = {"type": "session.config", "response_format": "pcm"}
DONE = [json.dumps({"type": kind}) for kind in ("input.done", "session.close")]
BEGIN_AND_END = {
    SPEECH: ([json.dumps(SETTINGS)], DONE),
    PATH: ([json.dumps(START)], [json.dumps({"event": "stop"})] * 8),
}
"""Frames with which a session begins, and those that end it, if it has begun or not."""


@pytest.fixture(scope="module")
def speaking(cascade: Loaded) -> Iterator[ServedGateway]:
    with serving(cascade) as gateway:
        yield gateway


@asynccontextmanager
async def opened(gateway: ServedGateway, path: str) -> AsyncIterator[ClientConnection]:
    async with connect(gateway.url.replace("http", "ws", 1) + path, max_size=None) as socket:
        yield socket


async def send_until_closed(socket: ClientConnection, frames: Iterator[str | bytes]) -> int:
    """Send frames until the server closes the socket, as it does after the last one at the latest.
    Return their number, after a check of every event and of the close code. A client that goes on
    sending after the close is cut off, and may not read it.
    """
    reading = asyncio.create_task(_read(socket))
    num_sent = num_bytes = 0
    with suppress(ConnectionClosed):  # a frame was refused, as the close code tells
        for frame in frames:
            num_sent += 1
            num_bytes += len(frame)
            await socket.send(frame)
    code = await asyncio.wait_for(reading, 60)
    assert code in CLOSED or (code is None and num_bytes > MAX_DISCARDED_BYTES), code
    return num_sent


async def _read(socket: ClientConnection) -> int | None:
    """Check every event; return the close code, None if the connection was cut."""
    try:
        async for frame in socket:
            event = json.loads(frame) if isinstance(frame, str) else {}
            assert event.get("error") is None or isinstance(event["error"], bool | dict), event
            if isinstance(event.get("error"), dict):
                assert event["error"]["type"] != "server_error", event
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else None
    return NORMAL_CLOSURE


async def storm(gateway: ServedGateway, path: str, fuzzer: FrameFuzzer, num_frames: int) -> None:
    """Send frames over as many connections as the server's refusals need. Most connections begin
    with a valid frame, and all end with some.
    """
    begin, end = BEGIN_AND_END[path]
    num_left, number = num_frames, 0
    while num_left > 0:
        sent = [fuzzer.frame() for _ in range(20)]
        made = iter([*(begin if number % 4 else []), *sent, *end])
        async with opened(gateway, path) as socket:
            num_left -= await send_until_closed(socket, made)
        number += 1


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", [SPEECH, PATH])
async def test_malformed_frames_leave_nothing_behind(
    speaking: ServedGateway, num_events: int, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    gateway = speaking
    gateway.client.reset()
    gateway.client.script = Script(num_samples=2_400)
    fuzzer = {SPEECH: speech_frames, PATH: call_frames}[path](random.randrange(10**6))
    kinds: list[type] = [Session, SpeechSocket, GrowingUtterance]
    await storm(gateway, path, fuzzer, min(100, num_events))
    await _settled(gateway)
    before = [live(kind) for kind in kinds]
    threads, peak = threading.active_count(), peak_kib()
    with caplog.at_level(logging.ERROR):
        await storm(gateway, path, fuzzer, num_events)
        await _settled(gateway)
    reached = gateway.client.submitted if path == SPEECH else gateway.client.voice.owners
    assert reached, "no frame came as far as a request or a session"
    failed = [each for each in caplog.records if each.exc_info or each.name == "asyncio"]
    assert not failed, f"a failure was logged: {failed[0].getMessage()}"
    await await_until(_all_at_most(kinds, before), "every session and socket to be gone")
    assert threading.active_count() <= threads + 2, "threads are left"
    assert peak_kib() - peak < MAX_GROWTH_KIB
    assert gateway.http.get("/health").status_code == 200


async def _settled(gateway: ServedGateway) -> None:
    async def is_settled() -> bool:
        return not gateway.client.voice.held and all(
            stream.finished or stream.aborted for stream in gateway.client.streams.values()
        )

    await await_until(is_settled, "every session and request to end")


def _all_at_most(kinds: list[type], most: list[int]) -> Callable[[], Any]:
    async def check() -> bool:
        gc.collect()
        return all(live(kind) <= limit for kind, limit in zip(kinds, most, strict=True))

    return check
