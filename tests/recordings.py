"""Audio files as browsers and phones record them, written by PyAV: their containers, codecs, and
unfinished headers.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

Wave = NDArray[np.float32]


class Pipe:
    """A file object without `seek`, like the stream that a recorder writes: headers cannot be
    completed later.
    """

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """Format in which a browser or phone records, and a writer of such files.

    `options`: options of the container. `streamed`: whether the output cannot seek. `video`: codec
    of an additional video track. `num_tracks`: number of audio tracks, all with equal samples.
    `other_codec`: codec of the audio tracks after the first.
    """

    name: str
    container: str
    codec: str
    rate_hz: int = 48_000
    layout: str = "mono"
    streamed: bool = False
    video: str | None = None
    num_tracks: int = 1
    other_codec: str | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    def record(self, wave: Wave) -> bytes:
        """Return a file with these samples, at the recorder's rate. `wave` is mono, or has one row
        per channel of the recorder's layout.
        """
        sink = Pipe() if self.streamed else io.BytesIO()
        with av.open(sink, "w", format=self.container, options=dict(self.options)) as container:
            streams = [self._track(container, number) for number in range(self.num_tracks)]
            pictures = _pictures(container, self.video) if self.video is not None else None
            for stream in streams:
                stream.codec_context.open()
            for stream in streams:
                for frame in self._frames(stream, wave):
                    container.mux(stream.encode(frame))
                container.mux(stream.encode(None))
            if pictures is not None:
                _draw(container, pictures)
        return bytes(sink.data) if isinstance(sink, Pipe) else sink.getvalue()

    def _track(self, container: OutputContainer, number: int) -> AudioStream:
        codec = self.codec if number == 0 or self.other_codec is None else self.other_codec
        stream = cast(AudioStream, container.add_stream(codec, rate=self.rate_hz))
        stream.codec_context.layout = self.layout
        return stream

    def _frames(self, stream: AudioStream, wave: Wave) -> Iterator[AudioFrame]:
        """Cut the samples into frames of the encoder's size, or of a tenth of a second."""
        context = stream.codec_context
        size = context.frame_size or self.rate_hz // 10
        cut = AudioResampler(
            format=context.format.name, layout=self.layout, rate=self.rate_hz, frame_size=size
        )
        layout = "mono" if wave.ndim == 1 else self.layout
        whole = AudioFrame.from_ndarray(np.atleast_2d(wave), format="fltp", layout=layout)
        whole.sample_rate, whole.pts = self.rate_hz, 0
        yield from cut.resample(whole)
        yield from cut.resample(None)


def _pictures(container: OutputContainer, codec: str) -> VideoStream:
    stream = cast(VideoStream, container.add_stream(codec, rate=10))
    stream.width = stream.height = 32
    stream.pix_fmt = "yuv420p"
    return stream


def _draw(container: OutputContainer, stream: VideoStream) -> None:
    for index in range(3):
        frame = av.VideoFrame(32, 32, "yuv420p")
        frame.pts = index
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "200000"}
RECORDERS = (
    Recorder(
        name="webm of Chromium",
        container="webm",
        codec="libopus",
        streamed=True,
        options={"live": "1"},
    ),
    Recorder(
        name="webm with pictures", container="webm", codec="libopus", streamed=True, video="libvpx"
    ),
    Recorder(name="webm with its length", container="webm", codec="libopus", layout="stereo"),
    Recorder(name="matroska of samples", container="matroska", codec="pcm_f32le", streamed=True),
    Recorder(name="Ogg of Firefox", container="ogg", codec="libopus", streamed=True),
    Recorder(
        name="fragmented mp4 of Safari",
        container="mp4",
        codec="aac",
        streamed=True,
        options=FRAGMENTED,
    ),
    Recorder(
        name="fragmented mp4 of Opus",
        container="mp4",
        codec="libopus",
        streamed=True,
        options=FRAGMENTED,
    ),
    Recorder(name="m4a of a phone", container="ipod", codec="aac", rate_hz=44_100, layout="stereo"),
    Recorder(name="m4a without loss", container="ipod", codec="alac", rate_hz=44_100),
    Recorder(name="mp4 with pictures", container="mp4", codec="aac", video="mpeg4"),
    Recorder(name="aac", container="adts", codec="aac", rate_hz=44_100, streamed=True),
    Recorder(name="amr", container="amr", codec="libopencore_amrnb", rate_hz=8_000),
    Recorder(name="3gp of a phone", container="3gp", codec="libopencore_amrnb", rate_hz=8_000),
    Recorder(name="Ogg of FLAC", container="ogg", codec="flac", rate_hz=24_000, streamed=True),
    Recorder(name="streamed FLAC", container="flac", codec="flac", rate_hz=24_000, streamed=True),
)
