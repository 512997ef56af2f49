"""Track that plays the audio of responses to the client of a call: a packet of Opus every 20 ms.

A frame takes 0.4 ms to encode, without the interpreter lock, and nothing while there is silence, so
frames are encoded in the event loop.
"""

import asyncio
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import AudioCodecContext, AudioFrame, CodecContext
from av.packet import Packet
from av.stream import Stream

from web.realtime.protocol.settings import OUTPUT_RATE_HZ
from web.realtime.webrtc.outgoing import FRAME_MS, FRAME_SAMPLES

CLOCK_HZ = 48_000
"""Clock of the timestamps of Opus, whatever the rate of its audio. Source: RFC 7587 section 4.1."""
BIT_RATE = 32_000
"""Bits per second: enough for speech at full quality; browsers send the same."""
EXPECTED_LOSS = "5"
"""Expected packet loss in percent. Above 0 the encoder repeats the preceding frame in each packet
(RFC 6716 section 2.1.7); browsers play the copy if the preceding packet is missing.
"""
SILENCE = b"\xf8\xff\xfe"
"""Packet of Opus with 20 ms of silence."""
TAIL_FRAMES = 2
"""Number of silent frames that are encoded after speech, so that the encoder emits the samples that
it holds back (6.5 ms).
"""
FRAME_S = FRAME_MS / 1000
MAX_LATE_S = 0.2
"""Delay up to which late packets are sent in a burst. After a longer delay the missed times are
skipped, and the audio goes on later.
"""


class OpusEncoder:
    """Encoder of frames of 20 ms, PCM16 at 24 kHz, to packets of Opus."""

    def __init__(self) -> None:
        codec = CodecContext.create("libopus", "w")
        assert isinstance(codec, AudioCodecContext)
        codec.sample_rate, codec.bit_rate = OUTPUT_RATE_HZ, BIT_RATE
        codec.format, codec.layout = "s16", "mono"
        codec.time_base = Fraction(1, OUTPUT_RATE_HZ)
        codec.options = {
            "application": "voip",
            "frame_duration": str(FRAME_MS),
            "fec": "1",
            "packet_loss": EXPECTED_LOSS,
        }
        self._codec = codec
        self._num_frames = 0
        self._num_silent = TAIL_FRAMES

    def encode(self, pcm: bytes | None) -> bytes:
        """Return the packet of a frame; None stands for silence."""
        if pcm is not None:
            self._num_silent = 0
        elif self._num_silent >= TAIL_FRAMES:
            return SILENCE
        else:
            self._num_silent += 1
        samples = np.zeros(FRAME_SAMPLES, np.int16) if pcm is None else np.frombuffer(pcm, "<i2")
        frame = AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts = OUTPUT_RATE_HZ, self._num_frames * FRAME_SAMPLES
        self._num_frames += 1
        return b"".join(bytes(packet) for packet in self._codec.encode(frame)) or SILENCE


class SpeechOut(MediaStreamTrack):
    """Track of the frames that `next_frame` returns, of which None is silence."""

    kind = "audio"

    def __init__(self, next_frame: Callable[[], bytes | None]) -> None:
        super().__init__()
        self._next_frame = next_frame
        self._encoder = OpusEncoder()
        self._timestamp = 0
        self._due: float | None = None

    async def recv(self) -> "Packet[Stream]":
        """Return the next packet when it is due. Raises: MediaStreamError after the track's end."""
        if self.readyState != "live":
            raise MediaStreamError
        await self._wait_until_due()
        packet = Packet(self._encoder.encode(self._next_frame()))
        packet.pts, packet.time_base = self._timestamp, Fraction(1, CLOCK_HZ)
        return packet

    async def _wait_until_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._due is None:
            self._due = now
            return
        num_frames = 1
        if now - self._due > MAX_LATE_S:
            num_frames += int((now - self._due) / FRAME_S)
        self._due += num_frames * FRAME_S
        self._timestamp += num_frames * CLOCK_HZ * FRAME_MS // 1000
        if self._due > now:
            await asyncio.sleep(self._due - now)
