"""Decoding of audio prompts to float32 mono samples at the model's rate. Knows no model and no
request.

The format, channels, rate and duration of a file are bounded before it is decoded, and the duration
again during decoding. The time and memory that codec libraries use are bounded by the limits of the
decoder process, see `decoder.py`.
"""

import base64
import binascii
import io
import re
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import soundfile
import soxr

from fleet.core.errors import BadInput, InputTooLarge
from fleet.processing.audio_limits import LengthLimit, NotReadable, check_format
from fleet.processing.base import AudioSource, Recording, Samples
from fleet.processing.containers import complete_wav, read_blocks, reader_of
from fleet.processing.joined_recordings import recordings_of

MIN_CLIP_MS = 50
"""Shortest accepted clip. Shorter clips have fewer samples than the first analysis window needs."""
MAX_PARTS = 256
"""Largest number of audio parts in one request."""
MAX_PLAIN_BYTES = 8 * 1024 * 1024
"""Largest total size, as sent, of a request's files that the gateway itself decodes: two minutes of
PCM16 at 16 kHz are 5 MiB in base64.
"""
MAX_PEAK = 1e5
"""Largest accepted sample value. Admits floats on the scale of PCM16; squares of larger samples
leave float32's useful range.
"""
READABLE = "WAV, FLAC, Ogg, MP3, WebM, MP4 (M4A), AAC or AMR"
_FORMATS = {"WAV", "WAVEX", "RF64", "OGG"}
_CODECS = {
    "PCM_U8",
    "PCM_16",
    "PCM_24",
    "PCM_32",
    "FLOAT",
    "DOUBLE",
    "ULAW",
    "ALAW",
    "IMA_ADPCM",
    "MS_ADPCM",
    "GSM610",
    "VORBIS",
    "OPUS",
}
"""Accepted containers and codecs, by libsndfile's names; libsndfile itself opens more."""
_BLOCK_FRAMES = 1 << 16
_UNKNOWN_LEN = 1 << 62
"""Number of frames from which a length reported by libsndfile means that the file's length is
unknown.
"""
_DATA_URL = re.compile(r"\s*data:", re.IGNORECASE)
_BASE64_MARK = re.compile(r";\s*base64,", re.IGNORECASE)
_WHITESPACE = b" \t\n\r\v\f"
_PLAIN_WAV = struct.Struct("<4sI8sIHHIIHH4sI")
_PLAIN_WAV_BASE64 = 64
"""Number of base64 characters that hold a plain WAV header; a multiple of 4, so that no byte is cut
in two.
"""
_MAX_PADDING = 2


def decode_parts(
    parts: Sequence[tuple[str, AudioSource]],
    *,
    rate_hz: int,
    max_audio_s: float,
    plain_only: bool = False,
) -> list[Samples]:
    """Decode all audio files of one request as `decode_clip` does. `parts`: (field name, file)
    pairs.

    Units: `max_audio_s` seconds over all files. Raises: BadInput, InputTooLarge naming the field.
    """
    if len(parts) > MAX_PARTS:
        where = parts[MAX_PARTS][0]
        raise InputTooLarge(
            f"{where}: the request has {len(parts)} audio parts; use at most {MAX_PARTS}",
            param=where,
        )
    left_s = max_audio_s
    clips: list[Samples] = []
    for where, data in parts:
        try:
            clip = decode_clip(
                data, rate_hz=rate_hz, max_s=left_s, where=where, plain_only=plain_only
            )
        except InputTooLarge as error:
            message = (
                f"{where}: the request's audio is longer than {max_audio_s:g} s "
                "(limits.max_audio_s)"
            )
            raise InputTooLarge(message, param=where) from error
        left_s -= len(clip) / rate_hz
        clips.append(clip)
    return clips


def decode_clip(
    data: AudioSource, *, rate_hz: int, max_s: float, where: str, plain_only: bool = False
) -> Samples:
    """Decode an audio file to mono samples at `rate_hz`. The format is detected from the content; a
    declared type is ignored. A string is base64, or a `data:` URL.

    `plain_only`: accept only PCM16 WAV files, which need no codec library (see `needs_decoder`).
    Units: `max_s` seconds of audio, checked while decoding, so that a small file cannot expand
    without bound. Raises: BadInput, InputTooLarge naming the field `where`.
    """
    blocks = decode_blocks(data, rate_hz=rate_hz, max_s=max_s, where=where, plain_only=plain_only)
    return np.concatenate([*blocks], dtype=np.float32)


def decode_blocks(
    data: AudioSource, *, rate_hz: int, max_s: float, where: str, plain_only: bool = False
) -> Iterator[Samples]:
    """Yield the samples of `decode_clip` block by block. Raises: as `decode_clip`, possibly after
    some blocks have been yielded.
    """
    limit = LengthLimit(max_s, where)
    clip = _Clip(rate_hz, where)
    try:
        for source_hz, mono in _blocks(data, limit, plain_only):
            yield from clip.add(source_hz, mono)
    except (soundfile.SoundFileError, RuntimeError, NotReadable) as error:
        raise BadInput(
            f"{where}: not audio that can be read ({READABLE} expected)", param=where
        ) from error
    if limit.heard_s * 1000 < MIN_CLIP_MS:
        raise BadInput(f"{where}: the audio is shorter than {MIN_CLIP_MS} ms", param=where)
    yield from clip.finish()


def needs_decoder(parts: Sequence[tuple[str, str | bytes]]) -> bool:
    """Return True if the files of a request must be decoded in a decoder process. Small PCM16 WAV
    files, and requests with too many files, which are refused anyway, need none.
    """
    if len(parts) > MAX_PARTS:
        return False
    return sum(len(data) for _, data in parts) > MAX_PLAIN_BYTES or not all(
        _is_plain_wav(data) for _, data in parts
    )


def _is_plain_wav(data: str | bytes) -> bool:
    if isinstance(data, bytes):
        return _plain_header(data, len(data)) is not None
    start = _base64_start(data)
    num_chars = len(data) - start
    padding = data.count("=", max(start, len(data) - _MAX_PADDING))
    try:
        head = base64.b64decode(data[start : start + _PLAIN_WAV_BASE64])
    except ValueError:
        return False
    # line breaks make it a longer file, which the decoder reads
    return _plain_header(head, num_chars * 3 // 4 - padding) is not None


class _Clip:
    """Resamples a clip block by block, so that memory holds the result and one block of the
    source.
    """

    def __init__(self, rate_hz: int, where: str) -> None:
        self._rate_hz, self._where = rate_hz, where
        self._source_hz = rate_hz
        self._resampler: soxr.ResampleStream | None = None

    def add(self, source_hz: int, mono: Samples) -> Iterator[Samples]:
        """Resample a block of mono samples; yield what is ready. Raises: BadInput for samples that
        are not finite or far too large.
        """
        if not np.isfinite(mono).all():
            message = (
                f"{self._where}: the audio holds samples that are not numbers (NaN or infinity)"
            )
            raise BadInput(message, param=self._where)
        if len(mono) and float(np.abs(mono).max()) > MAX_PEAK:
            raise BadInput(
                f"{self._where}: the audio's samples are absurdly large; scale them to -1..1",
                param=self._where,
            )
        if source_hz != self._source_hz:
            yield from self.finish()
            self._source_hz = source_hz
            if source_hz != self._rate_hz:
                self._resampler = soxr.ResampleStream(source_hz, self._rate_hz, 1, "float32")
        yield mono if self._resampler is None else self._resampler.resample_chunk(mono)

    def finish(self) -> Iterator[Samples]:
        """Yield the samples that the resampler holds back."""
        if self._resampler is not None:
            yield self._resampler.resample_chunk(np.zeros(0, np.float32), last=True)
            self._resampler = None


def _from_base64(data: str, where: str) -> bytes:
    data = data[_base64_start(data) :]
    try:
        # MIME encoders break lines every 76 characters.
        return base64.b64decode(data.encode("ascii").translate(None, _WHITESPACE), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadInput(f"{where}: not base64: {error}", param=where) from error


def _base64_start(data: str) -> int:
    """Return the index at which the base64 of a file begins in a text that may be a `data:` URL."""
    if not _DATA_URL.match(data):
        return 0
    # a comma may stand in the media type: `data:video/webm;codecs=vp8,opus;base64,`
    mark = _BASE64_MARK.search(data)
    comma = data.find(",")
    return mark.end() if mark is not None else comma + 1 if comma >= 0 else len(data)


def _blocks(
    data: AudioSource, limit: LengthLimit, plain_only: bool
) -> Iterator[tuple[int, Samples]]:
    """Yield (sample rate, mono samples) of a file or recording, block by block. Raises errors of
    the limits as soon as a limit is exceeded.
    """
    if isinstance(data, Recording):
        limit.add(len(data.samples), data.rate_hz)
        yield data.rate_hz, data.samples.astype(np.float32) / np.float32(32_768)
        return
    raw = data if isinstance(data, bytes) else _from_base64(data, limit.where)
    if not raw:
        reason = f"holds no audio; give a file in {READABLE}"
        raise BadInput(f"{limit.where}: {reason}", param=limit.where)
    if (plain := _plain_header(raw, len(raw))) is not None:
        yield from _plain_blocks(raw, *plain, limit)
        return
    if plain_only:
        raise NotReadable
    for recording in recordings_of(raw, limit.where):
        if (reader := reader_of(recording)) == "libsndfile":
            yield from _file_blocks(recording, limit)
        else:
            yield from read_blocks(recording, reader, limit)


def _plain_header(start: bytes, file_len: int) -> tuple[int, int] | None:
    """Return the sample rate and the number of channels of a plain WAV file; None for any other
    file.

    A plain WAV file is PCM16, mono or stereo, with only `fmt ` and `data` chunks, and its samples
    last to the end of the file: further bytes may be a second recording, which only the general
    readers find. `start`: first bytes of the file. `file_len`: size of the file in bytes.
    """
    if len(start) < _PLAIN_WAV.size:
        return None
    riff, _, wave, fmt_len, tag, channels, rate_hz, _, align, bits, data, data_len = (
        _PLAIN_WAV.unpack_from(start)
    )
    is_plain = (riff, wave, fmt_len, tag, bits, data) == (b"RIFF", b"WAVEfmt ", 16, 1, 16, b"data")
    is_whole = 0 < data_len == file_len - _PLAIN_WAV.size
    is_served = channels in (1, 2) and align == 2 * channels
    return (rate_hz, channels) if is_plain and is_whole and is_served else None


def _plain_blocks(
    raw: bytes, rate_hz: int, channels: int, limit: LengthLimit
) -> Iterator[tuple[int, Samples]]:
    check_format(rate_hz, channels, limit.where)
    num_frames = (len(raw) - _PLAIN_WAV.size) // (2 * channels)
    limit.add(num_frames, rate_hz)
    frames = np.frombuffer(raw, "<i2", num_frames * channels, _PLAIN_WAV.size).reshape(-1, channels)
    for start in range(0, num_frames, _BLOCK_FRAMES):
        block = frames[start : start + _BLOCK_FRAMES].astype(np.float32) / np.float32(32_768)
        yield rate_hz, block.mean(axis=1, dtype=np.float32)


def _file_blocks(raw: bytes, limit: LengthLimit) -> Iterator[tuple[int, Samples]]:
    with soundfile.SoundFile(io.BytesIO(complete_wav(raw))) as file:
        if file.format not in _FORMATS or file.subtype not in _CODECS:
            raise NotReadable(f"is {file.format} with {file.subtype}")
        check_format(file.samplerate, file.channels, limit.where)
        if file.frames < _UNKNOWN_LEN:
            limit.expect(file.frames / file.samplerate)
        while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
            limit.add(len(block), file.samplerate)
            yield file.samplerate, block.mean(axis=1, dtype=np.float32)
