"""Telephone calls over Twilio's Media Streams: what the caller hears, interrupts and may open."""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Origin

from tests.clients.environments import REQUIREMENTS
from tests.support import wait_until
from tests.web.conftest import KEY, Loaded, ServedGateway, serving
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.speech_samples import QUESTION, question, silence, speech
from tests.web.realtime.test_other_clients import question as spoken_question
from tests.web.realtime.test_other_clients import run_client
from tests.web.realtime.test_telephone_audio import telephone
from web.realtime.audio.client_audio import in_format
from web.realtime.audio.formats import PcmuFormat

__all__ = ["spoken_question"]
PATH = "/v1/telephone/twilio"
MULAW = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
FORM = PcmuFormat()
BLOCK = 160
ANSWER = "The green boat is near the bridge, and nobody has seen its owner since the storm."
WAVE = np.resize(np.frombuffer(speech(ANSWER), "<i2"), 3 * RATE_HZ)
WORDS = [("one", RATE_HZ // 2), (" two", RATE_HZ), (" three", 2 * RATE_HZ), (" four", 3 * RATE_HZ)]
COUNT = Script(text="one two three four", wave=WAVE, words=WORDS)


def whole_audio() -> bytes:
    def read(first: int, last: int) -> bytes:
        return WAVE[max(0, first) : last].astype("<i2").tobytes()

    return in_format(read, 0, len(WAVE), FORM)


@dataclass(slots=True)
class TelephoneCaller:
    """A telephone network's end of a call, which records what it is sent."""

    socket: ClientConnection
    audio: bytearray = field(default_factory=bytearray)
    marks: list[str] = field(default_factory=list[str])
    """Names of the marks that have arrived and were not returned."""

    async def send(self, event: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"event": event, "streamSid": "MZ1", **fields}))

    async def start(self, media_format: object = None, **parameters: object) -> None:
        await self.send("connected", protocol="Call", version="1.0.0")
        start = {
            "accountSid": "AC1",
            "callSid": "CA1",
            "streamSid": "MZ1",
            "tracks": ["inbound"],
            "mediaFormat": media_format or MULAW,
            "customParameters": parameters,
        }
        await self.send("start", sequenceNumber="1", start=start)

    async def speak(self, pcm: bytes) -> None:
        audio = telephone(pcm, FORM)
        for at in range(0, len(audio), BLOCK):
            payload = b64encode(audio[at : at + BLOCK]).decode()
            media = {"track": "inbound", "chunk": "1", "timestamp": "5", "payload": payload}
            await self.send("media", media=media)

    async def until(self, event: str) -> dict[str, Any]:
        while True:
            message = json.loads(await asyncio.wait_for(self.socket.recv(), 60))
            assert message["streamSid"] == "MZ1"
            if message["event"] == "media":
                self.audio += b64decode(message["media"]["payload"])
            elif message["event"] == "mark":
                self.marks.append(message["mark"]["name"])
            if message["event"] == event:
                return message

    async def play(self, num_marks: int) -> None:
        """Return the marks of the next audio, as its playback reaches them."""
        for _ in range(num_marks):
            if not self.marks:
                await self.until("mark")
            await self.send("mark", mark={"name": self.marks.pop(0)})

    async def hear(self, num_bytes: int) -> None:
        while len(self.audio) < num_bytes:
            await self.play(1)


@asynccontextmanager
async def calling(
    gateway: ServedGateway, query: str = "", origin: str | None = None
) -> AsyncIterator[TelephoneCaller]:
    address = f"{gateway.url.replace('http', 'ws')}{PATH}{query}"
    async with connect(address, origin=Origin(origin) if origin else None) as socket:
        yield TelephoneCaller(socket)


def sessions(gateway: ServedGateway) -> set[str]:
    """Return the ids of the live sessions, some of which may be of earlier tests."""
    return {view["id"] for view in gateway.http.get("/v1/fleet/sessions").json()["data"]}


@pytest.fixture(scope="module")
def standing(cascade: Loaded) -> Iterator[ServedGateway]:
    """A gateway whose clock stands still, so that only marks tell what was played."""
    with serving(cascade, clock=ManualClock()) as gateway:
        yield gateway


async def test_caller_hears_the_answer_to_a_spoken_question(gateway: ServedGateway) -> None:
    gateway.client.script = COUNT
    before = sessions(gateway)
    async with calling(gateway) as caller:
        await caller.start(instructions="Be brief.", voice="marin", model="omni")
        await caller.send("dtmf", dtmf={"track": "inbound_track", "digit": "5"})
        await caller.speak(question())
        await caller.hear(len(WAVE) // 3)
        await caller.send("stop", stop={"callSid": "CA1"})
        await caller.socket.wait_closed()
        assert caller.socket.close_code == 1000
    assert caller.audio == whole_audio()
    spec, _ = gateway.client.submitted[-1]
    assert "Be brief." in gateway.client.tokenizer.decode(list(spec.prompt_ids))
    assert abs(spec.audio[0].num_samples / 16_000 - len(speech(QUESTION)) / 48_000) < 0.8
    wait_until(lambda: not sessions(gateway) - before, "the session to end")


async def test_caller_who_speaks_clears_the_answer_and_only_heard_words_are_kept(
    standing: ServedGateway,
) -> None:
    standing.client.reset()
    standing.client.script = replace(COUNT, heard="What day is it?")
    async with calling(standing) as caller:
        await caller.start()
        await caller.speak(question())
        while len(caller.audio) < 8_000 * 3 // 2:
            await caller.play(1)
        while len(caller.audio) < 8_000 * 9 // 4:
            await caller.until("mark")
        left, caller.marks = caller.marks, []
        await caller.speak(speech(QUESTION))
        await caller.until("clear")
        for name in left:  # discarded audio returns its marks, too
            await caller.send("mark", mark={"name": name})
        had = len(caller.audio)
        await caller.speak(silence(900))
        await caller.hear(had + 8_000)
    spec, _ = standing.client.submitted[-1]
    prompt = standing.http.get(f"/v1/fleet/requests/{spec.id}").json()["prompt"]
    assert "one two" in prompt and "three" not in prompt


@pytest.mark.parametrize(
    ("start", "code", "reason"),
    [
        ({"key": "wrong"}, 3000, "invalid_api_key"),
        ({}, 3000, "custom parameter `key`"),
        ({"key": "ek_unknown"}, 3000, "client secret is unknown"),
        ({"key": KEY, "voice": "nobody"}, 4000, "session.audio.output.voice"),
        ({"key": KEY, "model": "gpt-9"}, 4000, "model_not_found"),
        ({"key": KEY, "instruction": "Be brief."}, 4000, "instruction: there is no such field"),
        ({"key": KEY, "media_format": {**MULAW, "sampleRate": 16000}}, 4000, "start.mediaFormat"),
        ({"key": KEY, "voice": 5}, 4000, "customParameters"),
    ],
)
async def test_refused_call_is_closed_with_the_reason(
    locked: ServedGateway, start: dict[str, Any], code: int, reason: str
) -> None:
    async with calling(locked) as caller:
        await caller.start(**start)
        await caller.socket.wait_closed()
        assert caller.socket.close_code == code
        assert reason in (caller.socket.close_reason or "")
    assert not locked.client.submitted


@pytest.mark.parametrize("frame", ["no json", '{"event": 5}', "[]", '{"event": "media"}', "{}"])
async def test_stream_that_does_not_begin_as_a_call_is_closed(
    gateway: ServedGateway, frame: str
) -> None:
    async with calling(gateway) as caller:
        with suppress(ConnectionClosed):
            for _ in range(8):
                await caller.socket.send(frame)
        await caller.socket.wait_closed()
        assert caller.socket.close_code == 4000


async def test_call_opens_with_a_key_or_a_client_secret(locked: ServedGateway) -> None:
    answer = locked.http.post(
        "/v1/realtime/client_secrets",
        json={"session": {"type": "realtime", "instructions": "Speak like a captain."}},
        headers={"authorization": f"Bearer {KEY}"},
    )
    secret = answer.json()["value"]
    for query, parameters in (("", {"key": KEY}), (f"?key={KEY}", {}), ("", {"key": secret})):
        async with calling(locked, query) as caller:
            await caller.start(**parameters)
            await caller.speak(question())
            await caller.until("media")
    spec, _ = locked.client.submitted[-1]
    assert "captain" in locked.client.tokenizer.decode(list(spec.prompt_ids))


async def test_page_of_another_site_cannot_call(gateway: ServedGateway) -> None:
    async with calling(gateway, origin="http://evil.example") as caller:
        await caller.socket.wait_closed()
        assert caller.socket.close_code == 3000


async def test_model_of_text_takes_no_calls(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        async with calling(gateway) as caller:
            await caller.start()
            await caller.socket.wait_closed()
            assert caller.socket.close_code == 4000
            assert "does not hear and speak" in (caller.socket.close_reason or "")


def test_pipecats_serializer_talks_with_the_gateway(
    gateway: ServedGateway, spoken_question: str
) -> None:
    """Pipecat encodes the caller's audio and decodes the answer's, both at 24 kHz."""
    gateway.client.script = COUNT
    wanted, arguments = len(whole_audio()), (gateway.url, spoken_question)
    printed = run_client("pipecat_call.script", REQUIREMENTS[2], *arguments, str(wanted))
    assert printed.strip() == f"{wanted} bytes, of which all were decoded"
