"""Audio prompts: a file to float32 mono samples at the model's rate. Knows no model and no request."""

import base64
import binascii
import io
import re

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from fleet.core.errors import BadInput, InputTooLarge
from fleet.processing.containers import NotReadable, check_rate, complete_wav, demuxer_of, read_mono, without_tags

MIN_CLIP_MS = 50
"""Shorter clips hold fewer samples than the first analysis window reflects."""
MAX_PEAK = 1e5
"""Beyond PCM16-scaled floats; squares of larger samples leave float32's useful range."""
READABLE = "WAV, FLAC, Ogg, MP3, WebM, MP4 (M4A), AAC or AMR"
_BLOCK_FRAMES = 1 << 16
_DATA_URL = re.compile(r"\s*data:", re.IGNORECASE)
_BASE64_MARK = re.compile(r";\s*base64,", re.IGNORECASE)

Samples = NDArray[np.float32]


def decode_clip(data: str | bytes, *, rate_hz: int, max_s: float, where: str) -> Samples:
    """Decode an audio file to mono at `rate_hz`; the container says what it is, whatever the client called it. A text is
    the file's base64, or a `data:` URL of it.

    Units: `max_s` seconds of audio, checked while decoding, so that a small file cannot expand without bound.
    Raises: BadInput, InputTooLarge naming `where`.
    """
    raw = data if isinstance(data, bytes) else _from_base64(data, where)
    if not raw:
        raise BadInput(f"{where}: holds no audio; give a file in {READABLE}", param=where)
    raw = without_tags(raw)
    demuxer = demuxer_of(raw)
    try:
        if demuxer is None:
            mono, source_hz = _read_file(raw, max_s, where)
        else:
            mono, source_hz = read_mono(raw, demuxer, max_s, where)
    except (soundfile.SoundFileError, RuntimeError, NotReadable) as error:
        raise BadInput(f"{where}: not audio that can be read ({READABLE} expected)", param=where) from error
    _check_samples(mono, source_hz, where)
    if source_hz != rate_hz:
        mono = soxr.resample(mono, source_hz, rate_hz)
    return np.ascontiguousarray(mono, dtype=np.float32)


def _from_base64(data: str, where: str) -> bytes:
    if _DATA_URL.match(data):
        # a comma may stand in the media type: `data:video/webm;codecs=vp8,opus;base64,`
        mark = _BASE64_MARK.search(data)
        data = data[mark.end() :] if mark is not None else data.partition(",")[2]
    # MIME encoders break lines every 76 characters.
    compact = "".join(data.split())
    try:
        return base64.b64decode(compact.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadInput(f"{where}: not base64: {error}", param=where) from error


def _read_file(raw: bytes, max_s: float, where: str) -> tuple[Samples, int]:
    with soundfile.SoundFile(io.BytesIO(complete_wav(raw))) as file:
        check_rate(file.samplerate, where)
        return _read_mono(file, max_s, where), int(file.samplerate)


def _read_mono(file: soundfile.SoundFile, max_s: float, where: str) -> Samples:
    max_frames = int(max_s * file.samplerate)
    blocks: list[Samples] = []
    num_frames = 0
    while True:
        block = file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)
        num_frames += len(block)
        if num_frames > max_frames:
            raise InputTooLarge(f"{where}: the audio is longer than {max_s:g} s", param=where)
        if len(block) == 0:
            return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
        # averaged per block, since a file may claim many channels
        blocks.append(block.mean(axis=1, dtype=np.float32))


def _check_samples(mono: Samples, source_hz: int, where: str) -> None:
    if len(mono) * 1000 < MIN_CLIP_MS * source_hz:
        raise BadInput(f"{where}: the audio is shorter than {MIN_CLIP_MS} ms", param=where)
    if not np.isfinite(mono).all():
        raise BadInput(f"{where}: the audio holds samples that are not numbers (NaN or infinity)", param=where)
    if float(np.abs(mono).max()) > MAX_PEAK:
        raise BadInput(f"{where}: the audio's samples are absurdly large; scale them to -1..1", param=where)
