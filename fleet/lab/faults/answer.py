"""A streamed answer as a client received it, and its comparison with another answer byte by byte.
Pure.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from fleet.lab.client.audio import BYTES_PER_S, BYTES_PER_SAMPLE
from fleet.lab.client.chat import Piece, read_stream
from fleet.lab.measure.answer_timing import AudioChunk, simulate_playback

TEXT, AUDIO = "text", "audio"
ROUNDING_STEPS = 32
"""Largest difference between samples that counts as rounding, in steps of 16-bit PCM: 60 dB below
full scale. A different code frame differs by hundreds of times as much.
"""


class ReceivedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as a client received it.

    `audio`: 16-bit little-endian mono PCM at 24 kHz. `chunks_s`: arrival times of the audio chunks,
    or of the text chunks if the answer has no audio, in seconds since the request. `stalled_s`:
    total time with an empty buffer in a playback that starts with the first chunk; None without
    audio.
    """

    text: bytes
    audio: bytes
    chunks_s: tuple[float, ...]
    stalled_s: float | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """First difference between two answers. `medium`: text or audio. `offset`: first byte at which
    they differ, or the length of the shorter answer if it is a prefix of the longer.

    `peak`: largest difference between samples, in steps of 16-bit PCM; None if the texts differ or
    the audio lengths differ.
    """

    medium: str
    offset: int
    expected_bytes: int
    received_bytes: int
    peak: int | None = None

    @property
    def is_rounding(self) -> bool:
        """True if the answers differ only in the last bits of samples."""
        return self.peak is not None and self.peak <= ROUNDING_STEPS


def read_answer(pieces: list[Piece]) -> ReceivedAnswer:
    """Decode a recorded stream to its end. Raises: StreamError if it carries an error or stops
    before its end.
    """
    stream = read_stream(pieces)
    chunks = [AudioChunk(at_s, len(pcm) / BYTES_PER_S) for at_s, pcm in stream.audio]
    return ReceivedAnswer(
        text="".join(text for _, text in stream.text).encode(),
        audio=b"".join(pcm for _, pcm in stream.audio),
        chunks_s=tuple(at_s for at_s, _ in stream.audio or stream.text),
        stalled_s=simulate_playback(chunks).stalled_s if chunks else None,
    )


def first_difference(expected: ReceivedAnswer, received: ReceivedAnswer) -> Difference | None:
    """Return the first difference between two answers, None if they are equal. Text is compared
    first, since different text also makes the audio differ.
    """
    for medium, a, b in (
        (TEXT, expected.text, received.text),
        (AUDIO, expected.audio, received.audio),
    ):
        if a != b:
            shorter = min(len(a), len(b))
            offset = next((at for at in range(shorter) if a[at] != b[at]), shorter)
            peak = _peak(a, b) if medium == AUDIO and len(a) == len(b) else None
            return Difference(
                medium=medium,
                offset=offset,
                expected_bytes=len(a),
                received_bytes=len(b),
                peak=peak,
            )
    return None


def _peak(a: bytes, b: bytes) -> int:
    """Return the largest difference between the samples of two pieces of PCM of equal length."""
    whole = len(a) // BYTES_PER_SAMPLE * BYTES_PER_SAMPLE
    first, second = (np.frombuffer(pcm[:whole], "<i2").astype(np.int32) for pcm in (a, b))
    return int(np.abs(first - second).max(initial=0))


def longest_gap_s(
    chunks_s: Sequence[float], from_s: float = -math.inf, to_s: float = math.inf
) -> float | None:
    """Return the longest time between two successive chunks, among gaps that began before `to_s`
    and ended after `from_s`; None if there is none.
    """
    gaps = (
        (earlier, later)
        for earlier, later in pairwise(chunks_s)
        if later > from_s and earlier < to_s
    )
    return max((later - earlier for earlier, later in gaps), default=None)
