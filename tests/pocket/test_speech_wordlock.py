"""Words of a recording stretched onto the grid of codec frames (8 analysis hops each), with feature
tracks in which the first feature of a hop is its number.
"""

from itertools import pairwise

import numpy as np
import pytest

from fleet.lab.pocket.corpus import encode
from fleet.lab.pocket.speech.analysis import NUM_FEATURES, Track, silence
from fleet.lab.pocket.speech.wordlock import (
    HOPS_PER_FRAME,
    SILENT_AFTER,
    SILENT_BEFORE,
    lock,
    pointer,
    speech_end_s,
)


def track(num_hops: int, pitch_hz: float = 125.0) -> Track:
    """Return a feature track in which the first feature of an analysis hop is the hop's number."""
    features = np.zeros((num_hops, NUM_FEATURES), np.float32)
    features[:, 0] = np.arange(num_hops)
    pitch = np.full(num_hops, pitch_hz, np.float32)
    return Track(features=features, pitch_hz=pitch, is_voiced=np.ones(num_hops, np.bool_))


STARTS_S, END_S = (0.0, 0.05, 0.21), 0.45
TEXT = "a bee sings"


def test_words_last_whole_frames() -> None:
    """A word's length in analysis hops is rounded to whole frames of 8 hops: words of 5, 16 and 24
    hops last 1, 2 and 3 frames, with silent frames before and after the sentence.
    """
    frames = lock(track(60), TEXT, STARTS_S, END_S)
    assert len(frames.cycles) == SILENT_BEFORE + 1 + 2 + 3 + SILENT_AFTER
    assert np.flatnonzero(frames.cycles).tolist() == list(range(1, 7))


def test_words_keep_the_teacher_boundaries() -> None:
    hops = lock(track(60), TEXT, STARTS_S, END_S).features[..., 0].astype(float)
    assert [hops[1, 0], hops[2, 0], hops[4, 0], hops[7, 0]] == pytest.approx(
        [0, 5, 21, 45], abs=0.02
    )
    assert hops[1] == pytest.approx(np.arange(HOPS_PER_FRAME) * 5 / HOPS_PER_FRAME, abs=0.01)


def test_first_frame_is_silence() -> None:
    frames = lock(track(60), TEXT, STARTS_S, END_S)
    assert np.array_equal(frames.features[0], silence(HOPS_PER_FRAME).astype(np.float16))
    assert (frames.cycles[0], frames.pointer[0]) == (0, -1)
    assert not frames.pitch_hz[0].any()


def test_frames_after_the_track_are_silence() -> None:
    frames = lock(track(46), TEXT, STARTS_S, END_S)
    assert np.array_equal(frames.features[-1], silence(HOPS_PER_FRAME).astype(np.float16))


def test_stretching_keeps_pitch() -> None:
    frames = lock(track(60, pitch_hz=150), "hi", [0.0], 0.2)
    assert frames.cycles.tolist() == [0, 12, 12, 0, 0]
    assert frames.pitch_hz[1:3].astype(float) == pytest.approx(150)


def test_cycles_count_the_voiced_part_of_a_frame() -> None:
    rising = track(8)
    rising.pitch_hz[:] = [100, 100, 200, 200, 200, 200, 100, 100]
    rising.is_voiced[:] = [False, False, True, True, True, True, False, False]
    assert lock(rising, "a", [0.0], 0.08).cycles[1] == 16


def test_pointer_follows_symbol_order() -> None:
    text = "the quick brown fox"
    symbols = pointer(text, [1, 3, 8, 12, 14], 16)
    assert symbols.tolist() == [-1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 15, 15]
    assert all(before <= after for before, after in pairwise(symbols.tolist()))
    assert symbols[-1] == len(encode(text)) - 1


def test_speech_end_follows_last_audible_sample() -> None:
    samples = np.zeros(24_000, np.float32)
    samples[12_000] = 0.1
    samples[18_000] = 0.001
    assert speech_end_s(samples, 24_000) == pytest.approx(0.52)
