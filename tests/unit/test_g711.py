"""G.711 agrees with Python's own coder for every sample, and with FFmpeg's for every byte."""

import importlib
import warnings
from typing import Any

import av
import numpy as np
import pytest

from fleet.processing.g711 import RATE_HZ, Law, decode, encode

EVERY_SAMPLE = np.arange(-32_768, 32_768).astype(np.int16)
EVERY_BYTE = bytes(range(256))
LAWS: list[Law] = ["mu", "a"]


def audioop() -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return importlib.import_module("audioop")


def by_ffmpeg(audio: bytes, law: Law) -> list[int]:
    decoder: Any = av.AudioCodecContext.create(f"pcm_{law}law", "r")
    decoder.sample_rate, decoder.layout = RATE_HZ, "mono"
    (frame,) = decoder.decode(av.Packet(audio))
    return frame.to_ndarray()[0].tolist()


@pytest.mark.parametrize("law", LAWS)
def test_every_sample_is_encoded_as_by_audioop(law: Law) -> None:
    reference = getattr(audioop(), f"lin2{law.removeprefix('m')}law")
    assert encode(EVERY_SAMPLE, law) == reference(EVERY_SAMPLE.astype("<i2").tobytes(), 2)


@pytest.mark.parametrize("law", LAWS)
def test_every_byte_is_decoded_as_by_ffmpeg(law: Law) -> None:
    assert decode(EVERY_BYTE, law).tolist() == by_ffmpeg(EVERY_BYTE, law)


@pytest.mark.parametrize("law", LAWS)
def test_round_trip_errs_by_at_most_a_thirtieth(law: Law) -> None:
    """The error of a sample is at most half a step, and a step a sixteenth of its segment."""
    error = np.abs(decode(encode(EVERY_SAMPLE, law), law).astype(int) - EVERY_SAMPLE)
    assert (error <= np.abs(EVERY_SAMPLE.astype(int)) / 30 + 16).all()
    assert (decode(encode(decode(EVERY_BYTE, law), law), law) == decode(EVERY_BYTE, law)).all()
