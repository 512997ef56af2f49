"""PCM16 into the bytes of a sound file while it is made, at another speed where that is wanted. Knows no request."""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, cast

import av
import numpy as np
from av import error as errors
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.filter import Graph

from web.schema.audio import FileFormat

MEDIA_TYPES: dict[FileFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
BYTES_PER_SAMPLE = 2
UNKNOWN_LEN = 0xFFFFFFFF
"""How a WAV header says that the sound goes on to the end of the stream."""
MIN_TEMPO = 0.5
"""What one `atempo` filter slows down to; two of them go to a quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Codec:
    """`stream` are the container's options where it cannot go back to complete its header. Units: `bit_rate` per second."""

    container: str
    name: str
    bit_rate: int = 0
    stream: dict[str, str] = field(default_factory=dict[str, str])


_CODECS = {
    "mp3": _Codec(container="mp3", name="libmp3lame", bit_rate=64_000, stream={"write_xing": "0", "id3v2_version": "0"}),
    "flac": _Codec(container="flac", name="flac"),
    # a page holds a second where nothing is said, which a listener would have to wait for
    "opus": _Codec(container="ogg", name="libopus", bit_rate=40_000, stream={"page_duration": "80000"}),
    "aac": _Codec(container="adts", name="aac", bit_rate=64_000),
}


class Encoder(Protocol):
    """Takes the sound in pieces, whole samples each, and returns what they make certain of the file."""

    def feed(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...


def open_encoder(kind: FileFormat, rate_hz: int, speed: float = 1.0) -> Encoder:
    """For mono PCM16 little-endian. FLAC and WAV come without their length, which nobody knows when they begin."""
    encoder = _Plain(kind, rate_hz) if kind in ("wav", "pcm") else _Compressed(kind, rate_hz, _Sink())
    return _Faster(encoder, rate_hz, speed) if speed != 1 else encoder


def encode_whole(pcm: bytes, rate_hz: int, kind: FileFormat) -> bytes:
    """The whole file, its length in its header where the format has one."""
    if kind == "pcm":
        return pcm
    if kind == "wav":
        return wav_header(rate_hz, len(pcm)) + pcm
    file = io.BytesIO()
    encoder = _Compressed(kind, rate_hz, file)
    encoder.feed(pcm)
    encoder.finish()
    return file.getvalue()


def wav_header(rate_hz: int, data_len: int = UNKNOWN_LEN) -> bytes:
    file_len = min(data_len + 36, UNKNOWN_LEN)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate_hz, rate_hz * BYTES_PER_SAMPLE, BYTES_PER_SAMPLE, 16)
    return struct.pack("<4sI4s", b"RIFF", file_len, b"WAVE") + form + struct.pack("<4sI", b"data", data_len)


class _Plain:
    """Samples as they are, after a header where the format has one."""

    def __init__(self, kind: FileFormat, rate_hz: int) -> None:
        self._header = wav_header(rate_hz) if kind == "wav" else b""

    def feed(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.feed(b"")


class _Sink:
    """A file that cannot go back: what was written since it was last asked."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken, self._written = bytes(self._written), bytearray()
        return taken


class _Compressed:
    """One file of a codec's frames. What it holds back is less than a frame and what the codec looks ahead."""

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
        self._cut = AudioResampler(format=context.format.name, layout="mono", rate=rate_hz, frame_size=context.frame_size or None)
        self._num_samples = 0

    def feed(self, pcm: bytes) -> bytes:
        if pcm:
            self._write(_frame(pcm, self._rate_hz, self._num_samples))
            self._num_samples += len(pcm) // BYTES_PER_SAMPLE
        return self._taken()

    def finish(self) -> bytes:
        self._write(None)
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        self._container.close()
        return self._taken()

    def _write(self, frame: av.AudioFrame | None) -> None:
        for cut in self._cut.resample(frame):
            for packet in self._stream.encode(cut):
                self._container.mux(packet)

    def _taken(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Sink) else b""


class _Faster:
    """Sound of another tempo and the same pitch, before it is encoded."""

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
        form = self._graph.add("aformat", f"sample_fmts=s16:channel_layouts=mono:sample_rates={rate_hz}")
        last.link_to(form)
        self._sink = self._graph.add("abuffersink")
        form.link_to(self._sink)
        self._graph.configure()

    def feed(self, pcm: bytes) -> bytes:
        if not pcm:
            return b""
        self._source.push(_frame(pcm, self._rate_hz, self._num_samples))
        self._num_samples += len(pcm) // BYTES_PER_SAMPLE
        return b"".join([self._encoder.feed(changed) for changed in self._pull()])

    def finish(self) -> bytes:
        self._source.push(None)
        rest = [self._encoder.feed(changed) for changed in self._pull()]
        return b"".join([*rest, self._encoder.finish()])

    def _pull(self) -> Iterator[bytes]:
        """What the filters have ready."""
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
    frame.sample_rate, frame.pts, frame.time_base = rate_hz, start, Fraction(1, rate_hz)
    return frame
