"""Decides whether a clip holds speech at all, so that silence and noise are not transcribed.

A clip is cut into windows, which the detector of voice activity reads as one batch. Windows are
amplified to the level at which the detector is surest, and preceded by their own beginning,
backwards: the detector takes the onset of any steady tone for a voice. For the same reason a short
run of voiced frames counts only if it is found again behind a lead of itself.

Clips taken for speech, of all clips, with `tests/noises.py` (4 s, levels drawn from the range):

| clip | level, dBFS | taken for speech |
|---|---|---|
| zeros | | 0 of 1 |
| white, pink, brown noise | -60..-10 | 0 of 300 |
| hum of 50 and 60 Hz with up to 6 harmonics, also after silence or noise | -50..-6 | 0 of 500 |
| clicks up to 25 ms, taps, 0.5..10 a second | | 0 of 200 |
| chords | -40..-12 | 1 of 100 |
| buzz of 120 Hz with harmonics that begins in quiet noise | -40..-6 | 9 of 100 |
| words of espeak-ng (yes, no, stop, hi, one, okay, thanks), 7 voices | -20, -40, -50 | 168 of 168 |
| the same in pink noise 20 and 10 dB below | -30 | 112 of 112 |
| the same in pink noise 5 dB below | -30 | 55 of 56 |
| the same in white noise 20 and 10 dB below | -40 | 112 of 112 |
| three answers of Pocket | -20..-55 | 12 of 12 |

A whispered word, which has no voice, may be missed. `tests/unit/test_speech_presence.py` draws
other clips of these kinds in each run.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.processing.base import Samples
from fleet.processing.voice_activity import (
    FRAME_SAMPLES,
    RATE_HZ,
    VadState,
    speech_probabilities,
)

THRESHOLD = 0.5
"""Probability of speech from which a frame counts as voiced."""
MIN_FRAMES, CLEAR_FRAMES = 3, 9
"""Shortest run of voiced frames that is speech if a second reading confirms it, and shortest run
that is speech without confirmation. A short vowel fills four frames.
"""
WINDOW_FRAMES, HOP_FRAMES = 125, 94
"""Length of a window (4 s), and distance between the starts of two windows (3 s): a word at the end
of one window is whole in the next.
"""
LEAD_FRAMES, CONFIRM_FRAMES = 10, 31
"""Length of the lead, the reversed beginning put before a window (0.3 s), and of the part that is
read again to confirm a short run (1 s).
"""
LEVEL_DBFS, MAX_GAIN_DB = -15.0, 50.0
"""Level to which the loudest frames of a quieter window are amplified, and the largest gain."""
SILENT_DBFS = -75.0
"""Level up to which a window is skipped as silent; rounding noise of PCM16 is quieter."""
MAX_BATCH = 32


def has_speech(samples: Samples, rate_hz: int) -> bool:
    """Return True if a mono clip holds speech.

    Takes 0.2 s for a minute without speech; with speech, returns at the first word found. Call it
    in a thread: the model runs without the interpreter lock.
    """
    clip = samples if rate_hz == RATE_HZ else soxr.resample(samples, rate_hz, RATE_HZ)
    windows = list(_windows(clip.astype(np.float32, copy=False)))
    batches = range(0, len(windows), MAX_BATCH)
    return any(_is_any_voiced(windows[start : start + MAX_BATCH]) for start in batches)


def _windows(clip: Samples) -> Iterator[NDArray[np.float32]]:
    """Yield the amplified windows of a clip that are not silent, each after its lead. Shapes: a
    window is [frames, 512].
    """
    num_frames = -(-len(clip) // FRAME_SAMPLES)
    frames = np.zeros((num_frames, FRAME_SAMPLES), np.float32)
    frames.reshape(-1)[: len(clip)] = clip
    last = max(0, num_frames - WINDOW_FRAMES)
    for start in [*range(0, last, HOP_FRAMES), last]:
        window = frames[start : start + WINDOW_FRAMES]
        level_dbfs = _level_dbfs(window)
        if level_dbfs > SILENT_DBFS:
            gain_db = min(max(LEVEL_DBFS - level_dbfs, 0.0), MAX_GAIN_DB)
            yield _with_lead((window * np.float32(10 ** (gain_db / 20))).clip(-1, 1))


def _level_dbfs(window: NDArray[np.float32]) -> float:
    """Return the level of a window in dBFS: the mean RMS of the loudest twentieth of its frames."""
    rms = np.sort(np.sqrt(np.square(window).mean(axis=1)))
    return float(20 * np.log10(max(rms[-max(1, len(rms) // 20) :].mean(), 1e-9)))


def _with_lead(window: NDArray[np.float32]) -> NDArray[np.float32]:
    backwards = window[:LEAD_FRAMES].reshape(-1)[::-1].reshape(-1, FRAME_SAMPLES)
    missing = np.zeros((LEAD_FRAMES - len(backwards), FRAME_SAMPLES), np.float32)
    return np.concatenate([missing, backwards, window])


def _is_any_voiced(windows: Sequence[NDArray[np.float32]]) -> bool:
    """Return True if any window has a clear run of voiced frames, or a short run that is confirmed.
    Stops at the first.
    """
    in_a_row = np.zeros(len(windows), np.int64)
    for number, probabilities in enumerate(_probabilities(windows)):
        if number < LEAD_FRAMES:
            continue
        before, in_a_row = in_a_row, np.where(probabilities >= THRESHOLD, in_a_row + 1, 0)
        if in_a_row.max() >= CLEAR_FRAMES:
            return True
        ended = np.where(in_a_row == 0, before, 0)
        if _is_any_confirmed(windows, ended, number):
            return True
    return _is_any_confirmed(windows, in_a_row, len(windows[0]))


def _is_any_confirmed(
    windows: Sequence[NDArray[np.float32]], runs: NDArray[np.int64], end: int
) -> bool:
    """Return True if any short run of voiced frames is confirmed. `runs`: length of each
    window's run whose last frame is `end - 1`; 0 for none.
    """
    lengths = zip(windows, runs.tolist(), strict=True)
    return any(_is_confirmed(window[end - run :]) for window, run in lengths if run >= MIN_FRAMES)


def _is_confirmed(window: NDArray[np.float32]) -> bool:
    """Return True if the detector finds the run of voiced frames at the beginning of `window` again
    when only this part, with a lead of its own, is read.
    """
    in_a_row = 0
    for number, (probability,) in enumerate(_probabilities([_with_lead(window[:CONFIRM_FRAMES])])):
        is_voiced = number >= LEAD_FRAMES and probability >= THRESHOLD
        in_a_row = in_a_row + 1 if is_voiced else 0
        if in_a_row == MIN_FRAMES:
            return True
    return False


def _probabilities(windows: Sequence[NDArray[np.float32]]) -> Iterator[NDArray[np.float64]]:
    """Yield, frame by frame, the probability of speech in each window. All windows are equally
    long.
    """
    streams = [VadState() for _ in windows]
    for number in range(len(windows[0])):
        yield np.array(speech_probabilities(streams, [window[number] for window in windows]))
