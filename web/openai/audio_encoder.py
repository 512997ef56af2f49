"""Streaming encoder from PCM16 to audio files, optionally with a changed tempo. Knows no
request.
"""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, cast

import av
import numpy as np
import soxr
from av import error as errors
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.filter import Graph
from numpy.typing import NDArray

from fleet.processing import g711
from web.schema.audio import FileFormat

MEDIA_TYPES: dict[FileFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcmu": "audio/pcmu",
    "pcma": "audio/pcma",
}
_LAWS: dict[FileFormat, g711.Law] = {"pcmu": "mu", "pcma": "a"}
BYTES_PER_SAMPLE = 2
UNKNOWN_LEN = 0xFFFFFFFF
"""Length in a WAV header that means: until the end of the stream."""
MIN_TEMPO = 0.5
"""Lowest factor of one FFmpeg filter `atempo`; lower tempos need two filters in sequence, down to a
quarter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Codec:
    """An audio codec and its container in FFmpeg's names. `stream` holds options of the container
    for a stream, in which the header cannot be completed at the end. Units: `bit_rate` in bits per
    second.
    """

    container: str
    name: str
    bit_rate: int = 0
    stream: dict[str, str] = field(default_factory=dict[str, str])


_CODECS = {
    "mp3": _Codec(
        container="mp3",
        name="libmp3lame",
        bit_rate=64_000,
        stream={"write_xing": "0", "id3v2_version": "0"},
    ),
    "flac": _Codec(container="flac", name="flac"),
    # by default a page has a second of audio, which would delay the stream
    "opus": _Codec(
        container="ogg", name="libopus", bit_rate=40_000, stream={"page_duration": "80000"}
    ),
    "aac": _Codec(container="adts", name="aac", bit_rate=64_000),
}


class Encoder(Protocol):
    """Encoder of PCM16 audio into a file, piece by piece. `feed` takes whole samples; `feed` and
    `finish` return the next bytes of the file, which may be empty. `finish` is called once, at the
    end.
    """

    def feed(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...


def open_encoder(kind: FileFormat, rate_hz: int, speed: float = 1.0) -> Encoder:
    """Return an encoder of mono PCM16 little-endian at `rate_hz`. `speed`: factor by which playback
    becomes faster, at the same pitch. FLAC and WAV headers contain no length, since the length is
    unknown at the beginning. G.711 audio is resampled to 8 kHz.
    """
    encoder = _encoder(kind, rate_hz, _Sink())
    return _TempoChange(encoder, rate_hz, speed) if speed != 1 else encoder


def _encoder(kind: FileFormat, rate_hz: int, sink: "_Sink | io.BytesIO") -> Encoder:
    if kind in ("wav", "pcm"):
        return _Uncompressed(kind, rate_hz)
    if (law := _LAWS.get(kind)) is not None:
        return _Telephone(law, rate_hz)
    return _Compressed(kind, rate_hz, sink)


def encode_whole(pcm: bytes, rate_hz: int, kind: FileFormat) -> bytes:
    """Return mono PCM16 as a complete audio file, with its length in the header if the format has
    one.
    """
    if kind == "pcm":
        return pcm
    if kind == "wav":
        return wav_header(rate_hz, len(pcm)) + pcm
    file = io.BytesIO()
    encoder = _encoder(kind, rate_hz, file)
    data = encoder.feed(pcm) + encoder.finish()
    return file.getvalue() or data


def wav_header(rate_hz: int, data_len: int = UNKNOWN_LEN) -> bytes:
    file_len = min(data_len + 36, UNKNOWN_LEN)
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, 1, rate_hz, rate_hz * BYTES_PER_SAMPLE, BYTES_PER_SAMPLE, 16
    )
    return (
        struct.pack("<4sI4s", b"RIFF", file_len, b"WAVE")
        + form
        + struct.pack("<4sI", b"data", data_len)
    )


class _Uncompressed:
    """Encoder of WAV and raw PCM: the samples are unchanged, a WAV header comes first."""

    def __init__(self, kind: FileFormat, rate_hz: int) -> None:
        self._header = wav_header(rate_hz) if kind == "wav" else b""

    def feed(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.feed(b"")


class _Telephone:
    """Encoder of G.711 at 8 kHz. Holds back what the resampler needs."""

    def __init__(self, law: g711.Law, rate_hz: int) -> None:
        self._law: g711.Law = law
        self._resampler = soxr.ResampleStream(rate_hz, g711.RATE_HZ, 1, "float32")

    def feed(self, pcm: bytes) -> bytes:
        return self._encode(np.frombuffer(pcm, "<i2").astype(np.float32))

    def finish(self) -> bytes:
        return self._encode(np.empty(0, np.float32), last=True)

    def _encode(self, samples: NDArray[np.float32], *, last: bool = False) -> bytes:
        narrow = self._resampler.resample_chunk(samples, last=last)
        return g711.encode(np.clip(np.rint(narrow), -32_768, 32_767).astype(np.int16), self._law)


class _Sink:
    """Write-only file for the encoder's container: a buffer of the bytes written since the last
    `take`. Cannot seek.
    """

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        data, self._written = bytes(self._written), bytearray()
        return data


class _Compressed:
    """Encoder of MP3, FLAC, Opus and AAC. Holds back less than a codec frame, and the codec's
    lookahead.
    """

    def __init__(self, kind: FileFormat, rate_hz: int, sink: _Sink | io.BytesIO) -> None:
        codec = _CODECS[kind]
        self._rate_hz, self._sink = rate_hz, sink
        options = codec.stream if isinstance(sink, _Sink) else {}
        self._container = av.open(sink, "w", format=codec.container, options=options)
        self._stream = cast(AudioStream, self._container.add_stream(codec.name, rate=rate_hz))
        context = self._stream.codec_context
        context.layout = "mono"
        if codec.bit_rate:
            context.bit_rate = codec.bit_rate
        context.open()
        self._cut = AudioResampler(
            format=context.format.name,
            layout="mono",
            rate=rate_hz,
            frame_size=context.frame_size or None,
        )
        self._num_samples = 0

    def feed(self, pcm: bytes) -> bytes:
        if pcm:
            self._write(_frame(pcm, self._rate_hz, self._num_samples))
            self._num_samples += len(pcm) // BYTES_PER_SAMPLE
        return self._take()

    def finish(self) -> bytes:
        self._write(None)
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        self._container.close()
        return self._take()

    def _write(self, frame: av.AudioFrame | None) -> None:
        for cut in self._cut.resample(frame):
            for packet in self._stream.encode(cut):
                self._container.mux(packet)

    def _take(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Sink) else b""


class _TempoChange:
    """Encoder that changes the tempo at constant pitch and passes the audio to another encoder."""

    def __init__(self, encoder: Encoder, rate_hz: int, speed: float) -> None:
        self._encoder, self._rate_hz = encoder, rate_hz
        self._graph = Graph()
        self._num_samples = 0
        base = Fraction(1, rate_hz)
        last = self._source = self._graph.add_abuffer(
            sample_rate=rate_hz, format="s16", layout="mono", channels=1, time_base=base
        )
        for factor in _tempos(speed):
            node = self._graph.add("atempo", f"{factor:.6f}")
            last.link_to(node)
            last = node
        form = self._graph.add(
            "aformat", f"sample_fmts=s16:channel_layouts=mono:sample_rates={rate_hz}"
        )
        last.link_to(form)
        self._sink = self._graph.add("abuffersink")
        form.link_to(self._sink)
        self._graph.configure()

    def feed(self, pcm: bytes) -> bytes:
        if not pcm:
            return b""
        self._source.push(_frame(pcm, self._rate_hz, self._num_samples))
        self._num_samples += len(pcm) // BYTES_PER_SAMPLE
        return b"".join([self._encoder.feed(pcm) for pcm in self._pull()])

    def finish(self) -> bytes:
        self._source.push(None)
        rest = [self._encoder.feed(pcm) for pcm in self._pull()]
        return b"".join([*rest, self._encoder.finish()])

    def _pull(self) -> Iterator[bytes]:
        """Yield the PCM16 output that the filters have ready."""
        while True:
            try:
                frame = self._sink.pull()
            except (errors.BlockingIOError, errors.EOFError):
                return
            assert isinstance(frame, av.AudioFrame)
            yield frame.to_ndarray().astype("<i2").tobytes()


def _tempos(speed: float) -> list[float]:
    return [speed] if speed >= MIN_TEMPO else [MIN_TEMPO, speed / MIN_TEMPO]


def _frame(pcm: bytes, rate_hz: int, start: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = rate_hz
    frame.pts = start
    frame.time_base = Fraction(1, rate_hz)
    return frame
