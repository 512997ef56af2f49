"""Client of a call: an aiortc connection with a microphone that says what a test wants, and a
recorder of what is heard.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import AudioFrame
from numpy.typing import NDArray

from tests.web.conftest import ServedGateway
from tests.web.realtime.openai_types import check_event
from tests.web.realtime.speech_samples import RATE_HZ, blocks

HEARD_HZ = 48_000
FRAME_S, FRAME_SAMPLES = 0.02, RATE_HZ // 50
LOUD = 1000
"""Level above which a sample counts as sound, out of 32768."""
PATIENCE_S = 60
Event = dict[str, Any]


class Microphone(MediaStreamTrack):
    """A microphone of 24 kHz: what `say` was given, and silence."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[bytes] = []
        self._began_at: float | None = None
        self._num_frames = 0

    def say(self, pcm: bytes) -> None:
        self._frames += blocks(pcm)

    async def recv(self) -> AudioFrame:
        if self.readyState != "live":
            raise MediaStreamError
        loop, due = asyncio.get_running_loop(), asyncio.Event()
        self._began_at = loop.time() if self._began_at is None else self._began_at
        loop.call_at(self._began_at + self._num_frames * FRAME_S, due.set)
        await due.wait()
        pcm = self._frames.pop(0) if self._frames else b""
        samples = np.frombuffer(pcm.ljust(2 * FRAME_SAMPLES, b"\0"), "<i2").reshape(1, -1)
        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = RATE_HZ, self._num_frames * FRAME_SAMPLES
        frame.time_base = Fraction(1, RATE_HZ)
        self._num_frames += 1
        return frame


@dataclass(slots=True)
class CallClient:
    peer: RTCPeerConnection
    channel: RTCDataChannel
    microphone: Microphone
    call_id: str = ""
    session: Event = field(default_factory=dict[str, Any])
    events: list[Event] = field(default_factory=list[Event])
    heard: list[NDArray[np.int16]] = field(default_factory=list[NDArray[np.int16]])
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    _hears: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Event])

    def on_message(self, message: str) -> None:
        event: Event = json.loads(message)
        check_event(event)
        self._arrived.put_nowait(event)

    async def listen(self, track: MediaStreamTrack) -> None:
        try:
            while True:
                frame = await track.recv()
                assert isinstance(frame, AudioFrame)
                self.heard.append(frame.to_ndarray().reshape(-1)[::2].astype(np.int16))
                self._hears.set()
        except MediaStreamError:
            return

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
        """Wait until so much sound was heard."""
        async with asyncio.timeout(PATIENCE_S):
            while self.loud_s() < seconds:
                self._hears.clear()
                await self._hears.wait()

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def sound(self) -> NDArray[np.int16]:
        """Return all that was heard, from the first loud sample to the last one, at 48 kHz."""
        samples = np.concatenate([*self.heard, np.zeros(1, np.int16)])
        (loud,) = np.nonzero(np.abs(samples) > LOUD)
        return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]

    def loud_s(self) -> float:
        """Return the length of the sound that was heard, silence included."""
        return len(self.sound()) / HEARD_HZ


@dataclass(slots=True)
class CallOffer:
    """An offer, and the client that makes it."""

    client: CallClient
    sdp: str


async def make_offer(label: str = "oai-events") -> CallOffer:
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    client = CallClient(peer, peer.createDataChannel(label), Microphone())
    peer.addTrack(client.microphone)
    client.channel.on("message", client.on_message)
    client.channel.on("close", client.closed.set)
    peer.on("track", lambda track: asyncio.ensure_future(client.listen(track)))
    await peer.setLocalDescription(await peer.createOffer())
    return CallOffer(client, peer.localDescription.sdp)


async def post_offer(
    gateway: ServedGateway, sdp: str, key: str | None = None, **query: str
) -> httpx.Response:
    headers = {"content-type": "application/sdp"}
    headers |= {"authorization": f"Bearer {key}"} if key is not None else {}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        return await http.post(
            "/v1/realtime/calls", content=sdp.encode(), headers=headers, params=query
        )


@asynccontextmanager
async def called(
    gateway: ServedGateway, key: str | None = None, **query: str
) -> AsyncIterator[CallClient]:
    """Open a call, and close it at the end."""
    offer = await make_offer()
    client = offer.client
    try:
        answer = await post_offer(gateway, offer.sdp, key, **query)
        assert answer.status_code == 201, answer.text
        client.call_id = answer.headers["location"].removeprefix("/v1/realtime/calls/")
        await client.peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        client.session = (await client.until("session.created"))["session"]
        yield client
    finally:
        await client.peer.close()
