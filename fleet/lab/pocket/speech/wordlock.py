"""Alignment of words to the frame grid: every word lasts a whole number of 80 ms frames, so that
its codes are the same in any sentence.

A frame of silence precedes the words, and two follow them. Words are stretched in time without a
change of pitch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.speech.analysis import HOP_S, Track, silence

HOPS_PER_FRAME: Final = 8
SILENT_BEFORE, SILENT_AFTER = 1, 2
FRAME_S: Final = HOPS_PER_FRAME * HOP_S
CYCLES_RANGE: Final = (6, 31)
_SILENCE = 0.004
_RELEASE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFrames:
    """A sentence on the grid of T frames.

    Shapes: features [T, 8, 51]; pitch_hz [T, 8], 0 where unvoiced; cycles [T] glottal cycles, 0 in
    silence; pointer [T], the index of the symbol that is spoken, -1 before the first word.
    Invariants: the first frame is silence, the same in every sentence; pointer never decreases.
    """

    features: NDArray[np.float16]
    pitch_hz: NDArray[np.float16]
    cycles: NDArray[np.int16]
    pointer: NDArray[np.int16]


def speech_end_s(samples: NDArray[np.float32], rate_hz: int) -> float:
    """Return the time at which speech ends: the last audible sample plus a short release."""
    audible = np.flatnonzero(np.abs(samples) > _SILENCE)
    return (int(audible[-1]) if len(audible) else len(samples)) / rate_hz + _RELEASE_S


def lock(track: Track, text: str, word_starts_s: Sequence[float], end_s: float) -> SentenceFrames:
    """Return the sentence with each word of `text` stretched to whole frames, at least one.
    `word_starts_s`: time at which each word starts in `track`. `end_s`: time at which the last word
    ends.
    """
    starts_s = [*word_starts_s, max(end_s, word_starts_s[-1] + HOP_S)]
    durations = np.maximum(1, np.round(np.diff(starts_s) / FRAME_S)).astype(int)
    edges = SILENT_BEFORE + np.concatenate([[0], np.cumsum(durations)])
    num_frames = int(edges[-1]) + SILENT_AFTER
    hops = np.arange(num_frames * HOPS_PER_FRAME)
    tail_s = starts_s[-1] + SILENT_AFTER * FRAME_S
    source = np.interp(hops / HOPS_PER_FRAME, [*edges, num_frames], [*starts_s, tail_s]) / HOP_S
    is_spoken = (hops >= edges[0] * HOPS_PER_FRAME) & (hops < edges[-1] * HOPS_PER_FRAME)
    pitch = np.interp(source, np.arange(len(track.pitch_hz)), track.pitch_hz)
    is_voiced = (
        is_spoken
        & track.is_voiced[np.minimum(np.round(source).astype(int), len(track.is_voiced) - 1)]
    )
    return SentenceFrames(
        features=_features(track, source, hops >= edges[0] * HOPS_PER_FRAME).astype(np.float16),
        pitch_hz=np.where(is_voiced, pitch, 0).reshape(-1, HOPS_PER_FRAME).astype(np.float16),
        cycles=_cycles(pitch, is_voiced, is_spoken),
        pointer=pointer(text, edges.tolist(), num_frames),
    )


def _features(
    track: Track, source: NDArray[np.float64], is_sound: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return features [T, 8, 51], interpolated at each position of `source` (hops of the track),
    and silence where `is_sound` is False.
    """
    known = np.concatenate([track.features, silence(1)])
    before = np.minimum(source.astype(int), len(known) - 1)
    after = np.minimum(before + 1, len(known) - 1)
    part = (source - source.astype(int))[:, None].astype(np.float32)
    stretched = known[before] * (1 - part) + known[after] * part
    return np.where(is_sound[:, None], stretched, silence(1)).reshape(
        -1, HOPS_PER_FRAME, known.shape[1]
    )


def _cycles(
    pitch: NDArray[np.float64], is_voiced: NDArray[np.bool_], is_spoken: NDArray[np.bool_]
) -> NDArray[np.int16]:
    """Return the number of glottal cycles of each frame, from its voiced hops if it has any, else
    from the interpolated pitch.
    """
    by_frame = pitch.reshape(-1, HOPS_PER_FRAME)
    voiced = is_voiced.reshape(-1, HOPS_PER_FRAME)
    of_voiced = (by_frame * voiced).sum(1) / np.maximum(1, voiced.sum(1))
    mean = np.where(voiced.any(1), of_voiced, by_frame.mean(1))
    cycles = np.clip(np.round(mean * FRAME_S), *CYCLES_RANGE)
    return np.where(is_spoken.reshape(-1, HOPS_PER_FRAME)[:, 0], cycles, 0).astype(np.int16)


def pointer(text: str, edges: Sequence[int], num_frames: int) -> NDArray[np.int16]:
    """Return the index of the symbol spoken at the middle of each frame [T]. The symbols of a word
    share its frames evenly; the last one lasts to the end. `edges`: frames at which words begin and
    end.
    """
    symbols = np.full(num_frames, -1, np.int16)
    first = 0
    for word, begin, end in zip(text.split(), edges[:-1], edges[1:], strict=True):
        middles = (np.arange(end - begin) + 0.5) / (end - begin)
        symbols[begin:end] = first + (middles * len(word)).astype(int)
        first += len(word)
    symbols[edges[-1] :] = first - 1
    return symbols
