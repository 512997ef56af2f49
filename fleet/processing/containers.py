"""Decoding of containers that libsndfile does not read, by PyAV, to mono samples: recordings of browsers and phones.

The demuxer is named from the first bytes, and only the demuxers and codecs listed here are ever opened: no playlist, network,
device or video. The input is in memory, and only its first audio track is decoded. Knows no model and no request.
"""

import io
import re
import struct
from collections.abc import Iterator
from typing import Literal, cast

import av
import numpy as np
from av import error as errors
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from av.stream import Stream

from fleet.core.errors import BadInput, InputTooLarge
from fleet.processing.base import Samples

MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 192_000
MAX_CHANNELS = 8
MAX_TRACKS = 64
MAX_PLANES = 7
CODECS = (
    "opus", "vorbis", "aac", "alac", "mp3float", "flac", "amrnb", "amrwb",
    "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le",
)  # fmt: skip
"""FFmpeg's names of decoders. The container's probe is limited to them too, so that video is not decoded."""
MAX_PACKETS_PER_S = 2_000
"""The shortest packets (Opus) last 2.5 ms. Beyond this rate a file holds packets that decode to nothing."""
_OPTIONS = {"protocol_whitelist": "", "codec_whitelist": ",".join(CODECS), "max_streams": str(MAX_TRACKS)}
MP4_PADDING_S = 1.0
"""Excess of an MP4 file's declared duration over its audio: the samples that encoders add."""
_DECODERS_WITH_DTX = {"amrnb": "libopencore_amrnb"}
"""FFmpeg's own AMR decoder refuses the frames that phones send for silence."""
_ID3_HEADER_LEN = 10
MAX_TAGS = 16
"""ID3v2 tags that may stand before the audio."""
_OGG_HEADER_LEN, _OGG_NUM_LACES = 27, 26
MAX_MP4_BOXES = 100_000
_BOX_HEADER, _LONG_SIZE = struct.Struct(">I4s"), struct.Struct(">Q")
_SAMPLE_COUNT = re.compile(rb"(?:st(?:sz|z2).{8}|trun.{4})(.{4})", re.DOTALL)
"""Sample counts of MP4 boxes. Samples of one common size take no bytes in the box, so a small file can declare many."""
_CHUNK_HEADER = struct.Struct("<4sI")
_CHUNK_NAME = re.compile(rb"[A-Za-z0-9_ ]{4}")
_RIFF_HEADER_LEN = 12
MAX_WAV_CHUNKS = 1_000
MAX_UINT32 = 0xFFFFFFFF


Reader = Literal["libsndfile", "matroska", "mp4", "amr", "flac", "ogg", "aac"]
"""The reader of a file: libsndfile, or one of PyAV's demuxers."""


class NotReadable(Exception):
    """The file is damaged, or does not match its first bytes."""


def reader_of(raw: bytes) -> Reader:
    """Return the reader for a file, from its first bytes.

    FLAC is libsndfile's, unless it was streamed: STREAMINFO then counts 0 samples, and libsndfile fails at the end. Of the
    codecs in Ogg, libsndfile reads Vorbis and Opus. Raises: NotReadable for any format that is not listed here.
    """
    demuxer = _demuxer_of(raw)
    if demuxer is not None:
        return demuxer
    if raw.startswith((b"fLaC", b"OggS", b"ID3")) or raw[8:12] == b"WAVE" or _is_mpeg_frame(raw[:2]):
        return "libsndfile"
    raise NotReadable("has an unknown format")


def _demuxer_of(raw: bytes) -> Reader | None:
    if raw.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if raw[4:8] == b"ftyp":
        return "mp4"
    if raw.startswith((b"#!AMR\n", b"#!AMR-WB\n")):
        return "amr"
    if raw.startswith(b"fLaC"):
        total_samples = int.from_bytes(raw[21:26], "big") & (1 << 36) - 1
        return "flac" if total_samples == 0 else None
    if raw.startswith(b"OggS"):
        first_packet = _OGG_HEADER_LEN + raw[_OGG_NUM_LACES] if len(raw) > _OGG_NUM_LACES else len(raw)
        return None if raw.startswith((b"OpusHead", b"\x01vorbis"), first_packet) else "ogg"
    return "aac" if _is_adts(raw[:2]) else None


def without_tags(raw: bytes) -> bytes:
    """Return the FLAC, MPEG or AAC audio behind ID3v2 tags, of which decoders skip at most one; all other files unchanged."""
    at = 0
    for _ in range(MAX_TAGS):
        if not raw.startswith(b"ID3", at):
            break
        at += _id3_len(raw[at : at + _ID3_HEADER_LEN])
    audio = raw[at : at + 4]
    return raw[at:] if at and (_is_mpeg_frame(audio) or audio == b"fLaC") else raw


def complete_wav(raw: bytes) -> bytes:
    """Return a WAV file with the sizes that its header lacks; all other files unchanged.

    A streaming recorder leaves a size of 0; the samples then last until the end of the file.
    """
    if raw[:4] != b"RIFF" or raw[8:_RIFF_HEADER_LEN] != b"WAVE":
        return raw
    at = _RIFF_HEADER_LEN
    for _ in range(MAX_WAV_CHUNKS):
        if not _is_wav_chunk(raw, at):
            break
        name, size = _CHUNK_HEADER.unpack_from(raw, at)
        samples = at + _CHUNK_HEADER.size
        if name == b"data":
            # a chunk follows: the file holds metadata and no samples
            if size or _is_wav_chunk(raw, samples):
                break
            riff = _CHUNK_HEADER.pack(b"RIFF", min(len(raw) - _CHUNK_HEADER.size, MAX_UINT32))
            data = _CHUNK_HEADER.pack(b"data", min(len(raw) - samples, MAX_UINT32))
            return b"".join((riff, raw[_CHUNK_HEADER.size : at], data, raw[samples:]))
        at = samples + size + size % 2
    return raw


def check_format(rate_hz: int, num_channels: int, where: str) -> None:
    """Raises: BadInput naming `where`."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadInput(f"{where}: sample rate {rate_hz} Hz; use {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz", param=where)
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise BadInput(f"{where}: {num_channels} channels of audio; use at most {MAX_CHANNELS}", param=where)


def check_same_rate(frame_rate_hz: int, rate_hz: int, where: str) -> None:
    """Raises: BadInput naming `where`."""
    if frame_rate_hz != rate_hz:
        raise BadInput(f"{where}: the sample rate changes within the clip; send one clip per rate", param=where)


def check_length(num_samples: float, rate_hz: int, max_s: float, where: str) -> None:
    """Raises: InputTooLarge naming `where`."""
    if num_samples > max_s * rate_hz:
        raise InputTooLarge(f"{where}: the audio is longer than {max_s:g} s", param=where)


def read_blocks(raw: bytes, demuxer: str, max_s: float, where: str) -> Iterator[tuple[int, Samples]]:
    """Yield the rate and the samples of each frame, averaged over the channels. A cut recording is read up to the cut.

    Raises: NotReadable; BadInput, InputTooLarge naming `where`.
    """
    if demuxer == "mp4" and _num_mp4_samples(raw) > len(raw):
        raise NotReadable("counts more samples than it has bytes")
    rate_hz = num_samples = 0
    packing = _Packing()
    try:
        with av.open(io.BytesIO(raw), "r", format=demuxer, options=_OPTIONS, metadata_errors="ignore") as container:
            for frame in _frames(container, max_s, where):
                rate_hz = rate_hz or frame.sample_rate
                check_format(rate_hz, frame.layout.nb_channels, where)
                check_same_rate(frame.sample_rate, rate_hz, where)
                num_samples += frame.samples
                check_length(num_samples, rate_hz, max_s, where)
                yield from ((rate_hz, _mono(readable)) for readable in packing.frames(frame))
    except errors.FFmpegError as error:
        raise NotReadable(str(error)) from error
    if not rate_hz:
        raise NotReadable("no frame could be decoded")


class _Packing:
    """Interleaves the channels of a frame that has so many planes that PyAV would read beyond the last one.

    Source: PyAV 18.1, audio/frame.py (`planes` counts up to a null pointer, which only the first `MAX_PLANES` are followed by).
    """

    def __init__(self) -> None:
        self._resampler = AudioResampler()
        self._made_for = ""

    def frames(self, frame: AudioFrame) -> list[AudioFrame]:
        if not frame.format.is_planar or frame.layout.nb_channels <= MAX_PLANES:
            return [frame]
        if self._made_for != frame.layout.name:
            self._made_for = frame.layout.name
            self._resampler = AudioResampler(frame.format.packed.name, frame.layout, frame.sample_rate)
        return self._resampler.resample(frame)


def _frames(container: InputContainer, max_s: float, where: str) -> Iterator[AudioFrame]:
    """Yield the frames of the first audio track. The last packet of a cut recording may be undecodable; an earlier one is damage.

    Raises: NotReadable, errors.FFmpegError; BadInput, InputTooLarge naming `where`.
    """
    if not container.streams.audio:
        raise BadInput(f"{where}: the file has no audio track", param=where)
    stream = container.streams.audio[0]
    decoder = _decoder(stream.codec_context, where)
    check_length(_declared_s(container, stream), 1, max_s, where)
    max_packets = round(max_s * MAX_PACKETS_PER_S)
    is_cut = False
    for num_packets, packet in enumerate(container.demux(stream)):
        if num_packets > max_packets or (is_cut and packet.size):
            raise NotReadable("damaged")
        try:
            yield from decoder.decode(packet)
        except errors.FFmpegError:
            is_cut = True


def _decoder(context: AudioCodecContext | None, where: str) -> AudioCodecContext:
    name = context.codec.name if context is not None else "unknown"
    if context is None or name not in CODECS:
        raise BadInput(f"{where}: audio of codec {name} is not read; use Opus, AAC, MP3, FLAC, AMR or PCM", param=where)
    # 0 if only frames have the value; each frame is checked too
    check_format(context.sample_rate or MIN_RATE_HZ, context.layout.nb_channels or 1, where)
    if name not in _DECODERS_WITH_DTX:
        return context
    decoder = cast(AudioCodecContext, AudioCodecContext.create(_DECODERS_WITH_DTX[name], "r"))
    decoder.sample_rate, decoder.layout = context.sample_rate, "mono"
    return decoder


def _declared_s(container: InputContainer, stream: Stream) -> float:
    """Return the least duration that the header declares; 0 for containers without a declared duration."""
    if stream.duration is None or stream.time_base is None or "mp4" not in container.format.name.split(","):
        return 0.0
    return float(stream.duration * stream.time_base) - MP4_PADDING_S


def _num_mp4_samples(raw: bytes) -> int:
    """Count the samples that the headers declare, since FFmpeg reserves memory for all of them. Raises: NotReadable."""
    start = total = 0
    for _ in range(MAX_MP4_BOXES):
        if start + _LONG_SIZE.size + _BOX_HEADER.size > len(raw):
            return total
        size, kind = _BOX_HEADER.unpack_from(raw, start)
        if size == 1:
            (size,) = _LONG_SIZE.unpack_from(raw, start + _BOX_HEADER.size)
        end = start + max(size, _BOX_HEADER.size) if size else len(raw)
        if kind != b"mdat":
            total += sum(int.from_bytes(count, "big") for count in _SAMPLE_COUNT.findall(raw, start, min(end, len(raw))))
        start = end
    raise NotReadable("has too many boxes")


def _is_wav_chunk(raw: bytes, at: int) -> bool:
    """Return True if a chunk begins at this byte and ends within the file."""
    if at + _CHUNK_HEADER.size > len(raw):
        return False
    name, size = _CHUNK_HEADER.unpack_from(raw, at)
    return _CHUNK_NAME.fullmatch(name) is not None and at + _CHUNK_HEADER.size + size <= len(raw)


def _mono(frame: AudioFrame) -> Samples:
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    mono = samples.mean(axis=0, dtype=np.float64)
    if samples.dtype.kind == "i":
        mono /= 1 << 8 * samples.dtype.itemsize - 1
    return mono.astype(np.float32)


def _id3_len(header: bytes) -> int:
    """Return the length of a tag from its header; the size is written in 7 bits a byte, and excludes header and footer."""
    size = 0
    for byte in header[6:]:
        size = size << 7 | byte & 0x7F
    has_footer = len(header) > 5 and header[5] & 0x10
    return _ID3_HEADER_LEN * (2 if has_footer else 1) + size


def _is_mpeg_frame(start: bytes) -> bool:
    return len(start) > 1 and start[0] == 0xFF and start[1] & 0xE0 == 0xE0


def _is_adts(start: bytes) -> bool:
    """Return True for twelve set bits and layer 0, which MPEG audio does not use."""
    return len(start) == 2 and start[0] == 0xFF and start[1] & 0xF6 == 0xF0
