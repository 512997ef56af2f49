"""Client of a call: an aiortc connection with a microphone that says what a test wants, and a
recorder of what is heard.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
import pytest
from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCDtlsTransport,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import RtpPacket, is_rtcp
from av import AudioCodecContext, AudioFrame, CodecContext
from av.packet import Packet
from numpy.typing import NDArray

from tests.support import await_until, wait_until
from tests.web.conftest import ServedGateway, bearer
from tests.web.realtime.openai_types import check_event
from tests.web.realtime.socket_client import Addressed, message
from tests.web.realtime.speech_samples import RATE_HZ, blocks
from web.realtime.webrtc.speech_in import JITTER_BUFFER

HEARD_HZ = 48_000
FRAME_S, FRAME_SAMPLES = 0.02, RATE_HZ // 50
LOUD = 1000
"""Level above which a sample counts as sound, out of 32768."""
PATIENCE_S = 60
SEND_RTP = "_send_rtp"
Event = dict[str, Any]


class Microphone(MediaStreamTrack):
    """A microphone of 24 kHz: what `say` was given, and silence."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[bytes] = []
        self._began_at: float | None = None
        self.num_frames = 0

    def say(self, pcm: bytes) -> None:
        self._frames += blocks(pcm)

    async def recv(self) -> AudioFrame:
        if self.readyState != "live":
            raise MediaStreamError
        loop, due = asyncio.get_running_loop(), asyncio.Event()
        self._began_at = loop.time() if self._began_at is None else self._began_at
        loop.call_at(self._began_at + self.num_frames * FRAME_S, due.set)
        await due.wait()
        pcm = self._frames.pop(0) if self._frames else b""
        samples = np.frombuffer(pcm.ljust(2 * FRAME_SAMPLES, b"\0"), "<i2").reshape(1, -1)
        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = RATE_HZ, self.num_frames * FRAME_SAMPLES
        frame.time_base = Fraction(1, RATE_HZ)
        self.num_frames += 1
        return frame


class CallEar:
    """Decoder of a client, in place of aiortc's jitter buffer, which for each lost packet discards
    some that have arrived. A lost packet is silence.
    """

    capacity = 0

    def __init__(self, on_heard: Callable[[NDArray[np.int16], list[bytes]], None]) -> None:
        self._on_heard = on_heard
        codec = CodecContext.create("libopus", "r")
        assert isinstance(codec, AudioCodecContext)
        codec.sample_rate = HEARD_HZ
        codec.format = "s16"
        codec.layout = "mono"
        self._codec = codec
        self._due: int | None = None

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        (frame,) = self._codec.decode(Packet(packet.payload))
        samples = frame.to_ndarray().reshape(-1).astype(np.int16)
        missing = 0 if self._due is None else (packet.sequence_number - self._due) % (1 << 16)
        assert missing < 50, "no packet is late or doubled on loopback"
        silence = np.zeros(missing * len(samples), np.int16)
        self._on_heard(np.concatenate([silence, samples]), [*[b""] * missing, packet.payload])
        self._due = packet.sequence_number + 1
        return False, None


@dataclass(slots=True)
class CallClient:
    peer: RTCPeerConnection
    channel: RTCDataChannel
    microphone: Microphone
    call_id: str = ""
    session: Event = field(default_factory=dict[str, Any])
    events: list[Event] = field(default_factory=list[Event])
    heard: list[NDArray[np.int16]] = field(default_factory=list[NDArray[np.int16]])
    packets: list[bytes] = field(default_factory=list[bytes])
    """Packets of Opus that were heard, in order; a lost one is empty."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    _hears: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Event])

    def on_message(self, message: str) -> None:
        event: Event = json.loads(message)
        check_event(event)
        self._arrived.put_nowait(event)

    def on_state(self) -> None:
        if self.peer.connectionState in ("closed", "failed"):
            self.closed.set()

    def on_heard(self, samples: NDArray[np.int16], packets: list[bytes]) -> None:
        self.heard.append(samples)
        self.packets += packets
        self._hears.set()

    def send(self, kind: str, **fields: object) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> Event:
        event = await asyncio.wait_for(self._arrived.get(), PATIENCE_S)
        self.events.append(event)
        return event

    async def until(self, kind: str) -> Event:
        while (event := await self.next())["type"] != kind:
            pass
        return event

    async def until_heard(self, seconds: float) -> None:
        """Wait until `seconds` of sound were heard."""
        async with asyncio.timeout(PATIENCE_S):
            while self.loud_s() < seconds:
                self._hears.clear()
                await self._hears.wait()

    async def until_said(self, num_frames: int) -> None:
        """Wait until the microphone has sent `num_frames` more."""
        last = self.microphone.num_frames + num_frames

        async def is_said() -> bool:
            return self.microphone.num_frames >= last

        await await_until(is_said, "the microphone")

    def ask(self, text: str = "hello", **response: object) -> None:
        self.send("conversation.item.create", item=message(text))
        self.send("response.create", response=response)

    async def played(self) -> Event:
        """Return the next response that is done, once its audio was played."""
        done = await self.until("response.done")
        await self.until("output_audio_buffer.stopped")
        return done["response"]

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def sound(self) -> NDArray[np.int16]:
        """Return all that was heard, from the first loud sample to the last one, at 48 kHz."""
        samples = np.concatenate([*self.heard, np.zeros(1, np.int16)])
        (loud,) = np.nonzero(np.abs(samples) > LOUD)
        return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]

    def longest_pause_s(self) -> float:
        """Return the length of the longest pause within the sound."""
        (loud,) = np.nonzero(np.abs(self.sound()) > LOUD)
        return float(np.diff(loud, prepend=0).max()) / HEARD_HZ

    def loud_s(self) -> float:
        """Return the length of the sound that was heard, silence included."""
        return len(self.sound()) / HEARD_HZ


@dataclass(slots=True)
class CallOffer:
    """An offer, and the client that makes it."""

    client: CallClient
    sdp: str


@asynccontextmanager
async def offered() -> AsyncIterator[CallOffer]:
    """Make an offer, and close its client at the end."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    client = CallClient(peer, peer.createDataChannel("oai-events"), Microphone())
    peer.addTrack(client.microphone)
    client.channel.on("message", client.on_message)
    client.channel.on("close", client.closed.set)
    peer.on("connectionstatechange", client.on_state)
    (receiver,) = peer.getReceivers()
    setattr(receiver, JITTER_BUFFER, CallEar(client.on_heard))
    try:
        await peer.setLocalDescription(await peer.createOffer())
        yield CallOffer(client, peer.localDescription.sdp)
    finally:
        await peer.close()


async def post_offer(
    gateway: Addressed,
    sdp: str,
    key: str | None = None,
    session_settings: Event | None = None,
    query: Mapping[str, str] | None = None,
) -> httpx.Response:
    """Send an offer alone, or with the settings of its session in a form."""
    headers = bearer(key) if key is not None else {}
    where = "/v1/realtime/calls"
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20, params=query) as http:
        if session_settings is not None:
            form = {"sdp": (None, sdp), "session": (None, json.dumps(session_settings))}
            return await http.post(where, files=form, headers=headers)
        headers["content-type"] = "application/sdp"
        return await http.post(where, content=sdp.encode(), headers=headers)


@asynccontextmanager
async def called(
    gateway: Addressed,
    key: str | None = None,
    session_settings: Event | None = None,
    query: Mapping[str, str] | None = None,
) -> AsyncIterator[CallClient]:
    """Open a call, and close it at the end."""
    async with offered() as offer:
        client = offer.client
        answer = await post_offer(gateway, offer.sdp, key, session_settings, query)
        assert answer.status_code == 201, answer.text
        client.call_id = answer.headers["location"].removeprefix("/v1/realtime/calls/")
        await client.peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        client.session = (await client.until("session.created"))["session"]
        yield client


def sessions(gateway: ServedGateway) -> set[str]:
    return set(gateway.client.voice.held)


async def until_over(gateway: ServedGateway, session: str) -> None:
    await asyncio.to_thread(wait_until, lambda: session not in sessions(gateway), "the end")


async def until_away(gateway: ServedGateway, session: str) -> None:
    """Wait until a session has no client."""
    held = gateway.client.voice.held
    await asyncio.to_thread(wait_until, lambda: "away_us" in held[session].fields, "the loss")


async def until_listed(gateway: ServedGateway, session: str) -> None:
    """Wait until other gateways know of a session."""
    held = gateway.client.voice.held
    await asyncio.to_thread(wait_until, lambda: "view" in held[session].fields, "the record")


def drop_packets(monkeypatch: pytest.MonkeyPatch, lose_each: int) -> None:
    """Lose one in `lose_each` of the packets of audio that each side sends."""
    send, num_sent = getattr(RTCDtlsTransport, SEND_RTP), Counter[RTCDtlsTransport]()

    async def send_most(transport: RTCDtlsTransport, data: bytes) -> None:
        num_sent[transport] += not is_rtcp(data)
        if is_rtcp(data) or num_sent[transport] % lose_each:
            await send(transport, data)

    monkeypatch.setattr(RTCDtlsTransport, SEND_RTP, send_most)
