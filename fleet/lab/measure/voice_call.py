"""Client of one of many concurrent calls: a voice session over WebRTC, whose audio is Opus.

The questions are encoded before the measurement, and what is heard is decoded only until the first
voiced sample, since all calls share one event loop. Knows no stage and no process.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.exceptions import InvalidStateError
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import RtpPacket
from av import AudioCodecContext, AudioFrame, CodecContext
from av.packet import Packet
from av.stream import Stream

from fleet.lab.client.audio import BYTES_PER_SAMPLE, PCM_RATE_HZ
from fleet.lab.client.client import ApiClient
from fleet.lab.client.realtime import RealtimeEvent
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.voice import SpokenQuestion
from fleet.lab.measure.voice_client import (
    COMPLETE,
    NOISE,
    NOISE_BLOCKS,
    EncodedSpeech,
    VoiceClient,
    VoiceConnection,
)
from fleet.lab.measure.voice_format import VoiceFormat

PACKET_MS = 20
CLOCK_HZ = 48_000
"""Clock rate of the timestamps of Opus, and sample rate of decoded audio. Source: RFC 7587 section
4.1.
"""
FRAME_SAMPLES, HEARD_SAMPLES = (rate * PACKET_MS // 1000 for rate in (PCM_RATE_HZ, CLOCK_HZ))
SILENCE = b"\xf8\xff\xfe"
"""Packet of Opus with 20 ms of silence, which a gateway sends while it plays nothing."""
JITTER_BUFFER = "_RTCRtpReceiver__jitter_buffer"
"""Attribute of aiortc's receiver whose `add` is called with each packet."""
CLOSED = "the call has ended before its last answer"
HEARD = VoiceFormat(type="", rate_hz=CLOCK_HZ, sample_bytes=BYTES_PER_SAMPLE)


def opus_speech(questions: Sequence[SpokenQuestion]) -> EncodedSpeech:
    """Encode background noise and questions as packets of Opus. Silence is put before a question,
    so that its last sample ends a packet.
    """
    noise = np.random.default_rng(1).integers(-NOISE, NOISE, NOISE_BLOCKS * FRAME_SAMPLES)
    spoken = (question.samples for question in questions)
    return EncodedSpeech(
        block_ms=PACKET_MS,
        form=HEARD,
        noise=_packets(noise.astype(np.int16)),
        questions=tuple(
            _packets(np.pad(samples, (-len(samples) % FRAME_SAMPLES, 0))) for samples in spoken
        ),
    )


def _packets(samples: np.ndarray) -> tuple[bytes, ...]:
    codec = _opus("w", PCM_RATE_HZ)
    codec.time_base = Fraction(1, PCM_RATE_HZ)
    codec.options = {"application": "voip", "frame_duration": str(PACKET_MS)}
    packets: list[bytes] = []
    for at in range(0, len(samples), FRAME_SAMPLES):
        piece = samples[at : at + FRAME_SAMPLES].reshape(1, -1)
        frame = AudioFrame.from_ndarray(piece, format="s16", layout="mono")
        frame.sample_rate, frame.pts = PCM_RATE_HZ, at
        packets += [bytes(packet) for packet in codec.encode(frame)]
    return tuple(packets)


def _opus(mode: Literal["r", "w"], rate_hz: int) -> AudioCodecContext:
    codec = CodecContext.create("libopus", mode)
    assert isinstance(codec, AudioCodecContext)
    codec.sample_rate = rate_hz
    codec.format = "s16"
    codec.layout = "mono"
    return codec


class WebRtcClient(VoiceClient):
    """Client of one call. Playback has a buffer of 200 ms, as in browsers, and a longer pause in
    the received audio is an underrun.
    """

    buffer_s: ClassVar = 0.2

    def __init__(self, api: ApiClient, speech: EncodedSpeech, model: str, *, seed: int) -> None:
        super().__init__(api.url, api.headers, speech, model, console=False, seed=seed)
        self._api = api
        self._decoder = _opus("r", CLOCK_HZ)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[VoiceConnection]:
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        connection = _CallConnection(peer)
        try:
            await peer.setLocalDescription(await peer.createOffer())
            offer = peer.localDescription.sdp
            answer = await asyncio.to_thread(self._api.start_call, self._model, offer)
            await peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))
            yield connection
        finally:
            await peer.close()

    def _on_binary(self, frame: bytes) -> None:
        if frame != SILENCE:
            self._receive_audio(HEARD_SAMPLES, lambda: self._decode(frame))

    def _decode(self, packet: bytes) -> bytes:
        frames = self._decoder.decode(Packet(packet))
        return b"".join(frame.to_ndarray().astype("<i2").tobytes() for frame in frames)

    def _on_event(self, event: RealtimeEvent) -> None:
        """Handle an event. A turn is done when the whole answer was played, or when the response
        ended without a complete answer.
        """
        if event.type == "output_audio_buffer.stopped":
            self._done.set()
        elif event.type == "response.done" and event.response.status in COMPLETE:
            self._status = event.response.status
        else:
            super()._on_event(event)


class _CallConnection:
    """Connection of a call: events are sent and received as text, and packets of Opus as bytes."""

    capacity = 0

    def __init__(self, peer: RTCPeerConnection) -> None:
        self._peer = peer
        self._microphone = _Microphone()
        self._received: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self._channel = peer.createDataChannel("oai-events")
        self._channel.on("message", self._received.put_nowait)
        self._channel.on("close", self._on_closed)
        peer.on("connectionstatechange", self._on_state)
        peer.addTrack(self._microphone)
        (receiver,) = peer.getReceivers()
        assert hasattr(receiver, JITTER_BUFFER), "the pinned release of aiortc has it"
        setattr(receiver, JITTER_BUFFER, self)

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        """Take a received packet in place of aiortc's jitter buffer. The result tells aiortc not to
        request a key frame, and that there is nothing to decode.
        """
        self._received.put_nowait(packet.payload)
        return False, None

    async def send(self, message: str | bytes, /) -> None:
        """Send an event, or a packet of the microphone's audio. Raises: BenchError after the end of
        the call.
        """
        if isinstance(message, bytes):
            self._microphone.packets.put_nowait(message)
            return
        try:
            self._channel.send(message)
        except InvalidStateError as error:
            raise BenchError(CLOSED) from error

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        """Yield what is received. Raises: BenchError at the end of the call."""
        while (message := await self._received.get()) is not None:
            yield message
        raise BenchError(CLOSED)

    def _on_closed(self) -> None:
        self._received.put_nowait(None)

    def _on_state(self) -> None:
        if self._peer.connectionState in ("failed", "closed"):
            self._on_closed()


class _Microphone(MediaStreamTrack):
    """Audio track that sends each packet as soon as it is put into the queue `packets`."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.packets: asyncio.Queue[bytes] = asyncio.Queue()
        self._timestamp = 0

    async def recv(self) -> "Packet[Stream]":
        """Return the next packet. Raises: MediaStreamError after the track's end."""
        if self.readyState != "live":
            raise MediaStreamError
        packet = Packet(await self.packets.get())
        packet.pts, packet.time_base = self._timestamp, Fraction(1, CLOCK_HZ)
        self._timestamp += HEARD_SAMPLES
        return packet
