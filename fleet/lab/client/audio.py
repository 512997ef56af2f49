"""Audio as the API sends it: `pcm16`. Source: OpenAI's reference, "24kHz, mono, little-endian"."""

import io
import wave

PCM_RATE_HZ = 24_000
BYTES_PER_SAMPLE = 2
BYTES_PER_S = PCM_RATE_HZ * BYTES_PER_SAMPLE


def read_wav(file: bytes) -> bytes:
    """Return the samples of a WAV file with 16-bit PCM."""
    with wave.open(io.BytesIO(file)) as opened:
        return opened.readframes(opened.getnframes())
