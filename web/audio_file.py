"""A whole answer's PCM16 as a file of the wanted format. Knows no request."""

import io
import wave

import numpy as np
import soundfile

from web.schema import AudioFormat

_SOUNDFILE = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}


def encode_audio(pcm: bytes, rate_hz: int, kind: AudioFormat) -> bytes:
    """`pcm` is mono PCM16 little-endian; `pcm16` returns it as it is."""
    if kind == "pcm16":
        return pcm
    buffer = io.BytesIO()
    if kind == "wav":
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate_hz)
            file.writeframes(pcm)
        return buffer.getvalue()
    container, subtype = _SOUNDFILE[kind]
    soundfile.write(buffer, np.frombuffer(pcm, "<i2"), rate_hz, format=container, subtype=subtype)
    return buffer.getvalue()
