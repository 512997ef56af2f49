"""Speech of the client of a call: its packets of Opus as PCM16, and that in the format of the
session's input.

A packet takes less than 0.1 ms to decode and resample, so it is done in the event loop: a hand-over
to a thread takes longer.
"""

import logging
from collections.abc import Callable

import numpy as np
import soxr
from aiortc import RTCRtpReceiver
from aiortc.rtp import RtpPacket
from av import AudioCodecContext, AudioFrame, CodecContext
from av.error import FFmpegError
from av.packet import Packet
from numpy.typing import NDArray

from web.realtime.audio.formats import AudioFormat
from web.realtime.webrtc.packet_order import PacketOrder

log = logging.getLogger("fleet.web")

DECODED_HZ = 48_000
JITTER_BUFFER = "_RTCRtpReceiver__jitter_buffer"
"""Attribute of aiortc's receiver whose `add` is called with each packet. Its own buffer delays all
audio by 80 ms, and after the first loss by 320 ms.
"""


class SpeechIn:
    """Reader of a track. `on_speech` is called with pieces of PCM16 at 48 kHz."""

    capacity = 0

    def __init__(self, on_speech: Callable[[bytes], None]) -> None:
        self._on_speech = on_speech
        self._order = PacketOrder()
        codec = CodecContext.create("libopus", "r")
        assert isinstance(codec, AudioCodecContext)
        codec.sample_rate = DECODED_HZ
        codec.format = "s16"
        codec.layout = "mono"
        self._codec = codec
        self._last: NDArray[np.int16] = np.zeros(0, np.int16)

    def attach(self, receiver: RTCRtpReceiver) -> None:
        """Read the packets of `receiver`, instead of its own jitter buffer and decoder."""
        assert hasattr(receiver, JITTER_BUFFER), "the pinned release of aiortc has it"
        setattr(receiver, JITTER_BUFFER, self)

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        """Read a packet. Returns what aiortc's receiver expects of its jitter buffer: no request
        for a picture, and nothing to decode.
        """
        for payload in self._order.add(packet.sequence_number, packet.payload):
            if payload != b"":  # only padding
                self._on_speech(self._decode(payload).astype("<i2", copy=False).tobytes())
        return False, None

    def _decode(self, payload: bytes | None) -> NDArray[np.int16]:
        """Return the samples of a packet. A lost or broken one is replaced by its predecessor at
        half the level, so that times remain true.
        """
        if payload is not None:
            try:
                frames = self._codec.decode(Packet(payload))
                self._last = np.concatenate([_samples(frame) for frame in frames])
                return self._last
            except (FFmpegError, ValueError) as error:
                log.debug("a packet of a call cannot be decoded: %s", error)
        self._last = self._last // 2
        return self._last


class SpeechFormat:
    """Converter of decoded speech to the format of a session's input, which may change."""

    def __init__(self) -> None:
        self._rate_hz = DECODED_HZ
        self._resampler: soxr.ResampleStream | None = None

    def convert(self, pcm: bytes, form: AudioFormat) -> bytes:
        """Return the next piece of audio, PCM16 at 48 kHz, in the format `form`; empty while the
        resampler holds it back.
        """
        samples = np.frombuffer(pcm, "<i2")
        if form.rate != self._rate_hz:
            self._rate_hz = form.rate
            self._resampler = (
                None
                if form.rate == DECODED_HZ
                else soxr.ResampleStream(DECODED_HZ, form.rate, 1, "int16", quality="MQ")
            )
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return form.of_pcm(samples)


def _samples(frame: AudioFrame) -> NDArray[np.int16]:
    return frame.to_ndarray().astype(np.int16, copy=False).reshape(-1)
