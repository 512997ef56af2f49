"""Decoding to mono, by PyAV, of audio containers that libsndfile cannot read, or cannot read to
their end.

The demuxer is chosen from the first bytes, and only the demuxers and codecs listed here are ever
opened: no playlist, network, device or video. The input is in memory, and has one recording with
one audio track. Knows no model and no request.
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
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Stream

from fleet.core.errors import BadInput
from fleet.processing.audio_limits import MIN_RATE_HZ, LengthLimit, NotReadable, check_format
from fleet.processing.base import Samples
from fleet.processing.joined_recordings import is_mpeg_frame, mp4_boxes, num_ogg_streams

MAX_TRACKS = 64
MAX_PLANES = 7
CODECS = (
    "opus",
    "vorbis",
    "aac",
    "alac",
    "mp1float",
    "mp2float",
    "mp3float",
    "flac",
    "amrnb",
    "amrwb",
    "pcm_s16le",
    "pcm_s24le",
    "pcm_s32le",
    "pcm_f32le",
)
"""Accepted codecs, by FFmpeg's names of decoders. Probing of the container is limited to them too,
so that video is not decoded.
"""
MAX_PACKETS_PER_S = 2_000
"""The shortest packets (Opus) last 2.5 ms. Beyond this rate a file holds packets that decode to
nothing.
"""
_OPTIONS = {
    "protocol_whitelist": "",
    "codec_whitelist": ",".join(CODECS),
    "max_streams": str(MAX_TRACKS),
}
MP4_PADDING_S = 1.0
"""Most seconds by which an MP4 file's declared duration may exceed its audio, because of samples
that encoders add.
"""
_DECODERS_WITH_DTX = {"amrnb": "libopencore_amrnb"}
"""Decoders to use instead of FFmpeg's own, by codec. FFmpeg's AMR decoder refuses the frames that
phones send for silence.
"""
_OGG_HEADER_LEN, _OGG_NUM_LACES = 27, 26
_SAMPLE_COUNT = re.compile(rb"(?:st(?:sz|z2).{8}|trun.{4})(.{4})", re.DOTALL)
"""Pattern of the sample counts in MP4 boxes. Samples of one common size take no bytes in the box,
so a small file can declare many.
"""
_CHUNK_HEADER = struct.Struct("<4sI")
_CHUNK_NAME = re.compile(rb"[A-Za-z0-9_ ]{4}")
_RIFF_HEADER_LEN = 12
MAX_WAV_CHUNKS = 1_000
MAX_UINT32 = 0xFFFFFFFF


Reader = Literal["libsndfile", "matroska", "mp4", "amr", "flac", "ogg", "aac", "mp3"]
"""Library that reads a file: libsndfile, or PyAV with the named demuxer."""
_MPEG_CODECS = ("mp1float", "mp2float", "mp3float")


def reader_of(raw: bytes) -> Reader:
    """Return the reader to use for a recording, chosen by its first bytes.

    FLAC and MP3 go to PyAV, since libsndfile stops at the length that their headers declare. Of the
    codecs in Ogg, libsndfile reads Vorbis and Opus, if the file has a single stream.

    Raises: NotReadable if no reader supports the format.
    """
    demuxer = _demuxer_of(raw)
    if demuxer is not None:
        return demuxer
    if raw.startswith(b"OggS"):
        return "libsndfile" if _is_vorbis_or_opus(raw) and num_ogg_streams(raw) == 1 else "ogg"
    if raw[8:_RIFF_HEADER_LEN] == b"WAVE":
        return "libsndfile"
    raise NotReadable("has an unknown format")


def _is_vorbis_or_opus(ogg: bytes) -> bool:
    if len(ogg) <= _OGG_NUM_LACES:
        return False
    first_packet = _OGG_HEADER_LEN + ogg[_OGG_NUM_LACES]
    return ogg.startswith((b"OpusHead", b"\x01vorbis"), first_packet)


def _demuxer_of(raw: bytes) -> Reader | None:
    if raw.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if raw[4:8] == b"ftyp":
        return "mp4"
    if raw.startswith((b"#!AMR\n", b"#!AMR-WB\n")):
        return "amr"
    if raw.startswith(b"fLaC"):
        return "flac"
    if _is_adts(raw[:2]):
        return "aac"
    return "mp3" if is_mpeg_frame(raw[:2]) else None


def complete_wav(raw: bytes) -> bytes:
    """Return a WAV file with the sizes filled in that a streaming recorder left at 0: the samples
    then last until the end of the file. All other files are returned unchanged.
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


def read_blocks(raw: bytes, demuxer: str, limit: LengthLimit) -> Iterator[tuple[int, Samples]]:
    """Yield (sample rate, mono samples) of each decoded frame of a recording, averaged over the
    channels. A truncated recording is read up to its end.

    Raises: NotReadable; BadInput, InputTooLarge naming the limit's field.
    """
    if demuxer == "mp4" and _num_mp4_samples(raw) > len(raw):
        raise NotReadable("counts more samples than it has bytes")
    is_empty = True
    packing = _Packing()
    try:
        with _opened(raw, demuxer) as container:
            for frame in _frames(container, limit):
                is_empty = False
                check_format(frame.sample_rate, frame.layout.nb_channels, limit.where)
                limit.add(frame.samples, frame.sample_rate)
                readable = packing.frames(frame)
                yield from ((frame.sample_rate, _mono(each)) for each in readable)
    except errors.FFmpegError as error:
        raise NotReadable(str(error)) from error
    if is_empty:
        raise NotReadable("no frame could be decoded")


def _opened(raw: bytes, demuxer: str) -> InputContainer:
    file = io.BytesIO(raw)
    return av.open(file, "r", format=demuxer, options=_OPTIONS, metadata_errors="ignore")


class _Packing:
    """Converter of frames with many channels from planar to interleaved samples, since PyAV reads
    memory beyond the last plane if there are more than `MAX_PLANES`.

    Source: PyAV 18.1, audio/frame.py (`planes` counts up to a null pointer, which follows only the
    first `MAX_PLANES` planes).
    """

    def __init__(self) -> None:
        self._resampler = AudioResampler()
        self._made_for = ("", 0)

    def frames(self, frame: AudioFrame) -> list[AudioFrame]:
        if not frame.format.is_planar or frame.layout.nb_channels <= MAX_PLANES:
            return [frame]
        if self._made_for != (frame.layout.name, frame.sample_rate):
            self._made_for = (frame.layout.name, frame.sample_rate)
            self._resampler = AudioResampler(
                frame.format.packed.name, frame.layout, frame.sample_rate
            )
        return self._resampler.resample(frame)


def _frames(container: InputContainer, limit: LengthLimit) -> Iterator[AudioFrame]:
    """Yield the decoded frames of the audio track.

    An undecodable last packet means that the recording was cut off, and is ignored; an earlier one
    means damage. In MPEG audio, which has no container, bytes that are not a frame are skipped, as
    players do. Raises: NotReadable, errors.FFmpegError; BadInput, InputTooLarge naming the limit's
    field.
    """
    stream = _track(container, limit.where)
    decoder = _decoder(stream.codec_context, limit.where)
    limit.expect(_declared_s(container, stream))
    max_packets = round(limit.max_s * MAX_PACKETS_PER_S)
    is_cut = False
    for num_packets, packet in enumerate(container.demux(stream)):
        if num_packets > max_packets or (is_cut and packet.size):
            raise NotReadable("damaged")
        try:
            yield from decoder.decode(packet)
        except errors.FFmpegError:
            is_cut = decoder.codec.name not in _MPEG_CODECS


def _track(container: InputContainer, where: str) -> AudioStream:
    """Return the only audio track with an accepted codec; the first audio track if there is none.
    Raises: BadInput naming the field `where` for a file with no track, or several accepted ones.
    """
    tracks = container.streams.audio
    if not tracks:
        raise BadInput(f"{where}: the file has no audio track", param=where)
    readable = [track for track in tracks if _codec_name(track.codec_context) in CODECS]
    if len(readable) > 1:
        reason = f"the file has {len(readable)} audio tracks; send a file with one, or mix them"
        raise BadInput(f"{where}: {reason}", param=where)
    return (readable or tracks)[0]


def _codec_name(context: AudioCodecContext | None) -> str:
    return context.codec.name if context is not None else "unknown"


def _decoder(context: AudioCodecContext | None, where: str) -> AudioCodecContext:
    name = _codec_name(context)
    if context is None or name not in CODECS:
        raise BadInput(
            f"{where}: audio of codec {name} is not read; use Opus, AAC, MP3, FLAC, AMR or PCM",
            param=where,
        )
    # 0 if only frames have the value; each frame is checked too
    check_format(context.sample_rate or MIN_RATE_HZ, context.layout.nb_channels or 1, where)
    if name not in _DECODERS_WITH_DTX:
        return context
    decoder = cast(AudioCodecContext, AudioCodecContext.create(_DECODERS_WITH_DTX[name], "r"))
    decoder.sample_rate, decoder.layout = context.sample_rate, "mono"
    return decoder


def _declared_s(container: InputContainer, stream: Stream) -> float:
    """Return the shortest duration in seconds that is consistent with an MP4 file's header; 0 for
    other containers, and if the header has no duration.
    """
    if (
        stream.duration is None
        or stream.time_base is None
        or "mp4" not in container.format.name.split(",")
    ):
        return 0.0
    return float(stream.duration * stream.time_base) - MP4_PADDING_S


def _num_mp4_samples(raw: bytes) -> int:
    """Return the number of samples that an MP4 file's headers declare, since FFmpeg reserves memory
    for all of them. Raises: NotReadable for a file with too many boxes.
    """
    total = 0
    for kind, start, end in mp4_boxes(raw):
        if kind != b"mdat":
            counts = _SAMPLE_COUNT.findall(raw, start, end)
            total += sum(int.from_bytes(count, "big") for count in counts)
    return total


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


def _is_adts(start: bytes) -> bool:
    """Return True if the first bytes are an ADTS header of AAC: twelve set bits and layer 0, which
    MPEG audio does not use.
    """
    return len(start) == 2 and start[0] == 0xFF and start[1] & 0xF6 == 0xF0
