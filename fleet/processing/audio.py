"""Audio prompts: a file to float32 mono samples at the model's rate. Knows no model and no request."""

import base64
import binascii
import io

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from fleet.core.errors import BadInput, InputTooLarge

MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 192_000
MIN_CLIP_MS = 50
"""Shorter clips hold fewer samples than the first analysis window reflects."""
MAX_PEAK = 1e5
"""Beyond PCM16-scaled floats; squares of larger samples leave float32's useful range."""
_BLOCK_FRAMES = 1 << 16

Samples = NDArray[np.float32]


def decode_clip(data: str | bytes, *, rate_hz: int, max_s: float, where: str) -> Samples:
    """Decode WAV, FLAC, Ogg or MP3 to mono at `rate_hz`; the container says what it is, whatever the client called it. A text is
    the file's base64.

    Units: `max_s` seconds of audio, checked while decoding, so that a small file cannot expand without bound.
    Raises: BadInput, InputTooLarge naming `where`.
    """
    raw = data if isinstance(data, bytes) else _from_base64(data, where)
    if not raw:
        raise BadInput(f"{where}: holds no audio; give a WAV, FLAC, Ogg or MP3 file", param=where)
    try:
        with soundfile.SoundFile(io.BytesIO(raw)) as file:
            if not MIN_RATE_HZ <= file.samplerate <= MAX_RATE_HZ:
                raise BadInput(
                    f"{where}: sample rate {file.samplerate} Hz; use {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz", param=where
                )
            mono = _read_mono(file, max_s, where)
            source_hz = int(file.samplerate)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise BadInput(f"{where}: not audio that can be read (WAV, FLAC, Ogg or MP3 expected)", param=where) from error
    _check_samples(mono, source_hz, where)
    if source_hz != rate_hz:
        mono = soxr.resample(mono, source_hz, rate_hz)
    return np.ascontiguousarray(mono, dtype=np.float32)


def _from_base64(data: str, where: str) -> bytes:
    header, comma, rest = data.partition(",")
    if header.startswith("data:") and comma:
        data = rest
    # MIME encoders break lines every 76 characters.
    compact = "".join(data.split())
    try:
        return base64.b64decode(compact.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadInput(f"{where}: not base64: {error}", param=where) from error


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
