"""Training of the audio tower to recognise speech in any voice and in noise, with CTC on the
symbols of the text.

Recordings are augmented anew each time they are used. Answers are trained later, together with the
Thinker (`joint`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import jiwer
import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import decode, encode
from fleet.lab.pocket.hearing.augment import add_noise, augment, coloured
from fleet.lab.pocket.hearing.features import LogMelBatch, log_mel
from fleet.lab.pocket.hearing.recordings import SAMPLE_RATE_HZ, SpeechRecording, load
from fleet.lab.pocket.train.loop import Loss, Schedule
from fleet.lab.pocket.train.tower import (
    Hearing,
    compute_states,
    ctc_loss,
    positions,
    slot_scores,
    symbols,
)

BATCH_S = 40.0
"""Length of clean speech per batch."""
NUM_GROUPS = 24
"""Number of groups into which recordings are sorted by length."""
NUM_HELD_OUT, EXAM_CHUNK = 96, 32
CLEAN_STEPS = 300
"""Number of first steps without augmentation, so that CTC finds the alignment sooner."""
NOISY_DB = 15.0

SCHEDULE = Schedule(
    steps=9000, learning_rate=1.2e-3, warmup=150, weight_decay=0.05, evaluate_every=150
)
"""Schedule of the training: long, because the error rate of held-out symbols was 9.7 % after 5,400
steps and 4.5 % after 10,300, without overfitting.
"""

Item = TypeVar("Item")


class Batches:
    """Source of random batches: recordings of about the same length, every recording equally
    often.
    """

    def __init__(self, recordings: Sequence[SpeechRecording]) -> None:
        ordered = sorted(recordings, key=lambda each: len(each.samples))
        bounds = np.linspace(0, len(ordered), NUM_GROUPS + 1).astype(int)
        self._groups = [
            ordered[start:end]
            for start, end in zip(bounds, bounds[1:], strict=False)
            if end > start
        ]
        lengths_s = [
            np.mean([len(each.samples) for each in group]) / SAMPLE_RATE_HZ
            for group in self._groups
        ]
        self._sizes = [max(1, round(BATCH_S / length_s)) for length_s in lengths_s]
        shares = np.array(
            [len(group) / size for group, size in zip(self._groups, self._sizes, strict=True)]
        )
        self._shares = shares / shares.sum()

    def draw(self, rng: np.random.Generator) -> list[SpeechRecording]:
        index = int(rng.choice(len(self._groups), p=self._shares))
        group = self._groups[index]
        return [group[each] for each in rng.integers(len(group), size=self._sizes[index])]


HearingExam = Sequence[tuple[LogMelBatch, Sequence[str]]]
"""Features and texts of held-out recordings, in batches of about the same length."""


def make_hearing_exam(
    recordings: Sequence[SpeechRecording], *, noise_db: float | None = None
) -> HearingExam:
    ordered = sorted(recordings, key=lambda each: len(each.samples))
    chunks = [ordered[start : start + EXAM_CHUNK] for start in range(0, len(ordered), EXAM_CHUNK)]
    rng = np.random.default_rng(shape.SEED)
    prepare = to_float if noise_db is None else partial(with_pink_noise, rng=rng, snr_db=noise_db)
    return [
        (log_mel([prepare(each) for each in chunk]), [each.text for each in chunk])
        for chunk in chunks
    ]


def to_float(recording: SpeechRecording) -> NDArray[np.float32]:
    return (recording.samples / 32768).astype(np.float32)


def with_pink_noise(
    recording: SpeechRecording, *, rng: np.random.Generator, snr_db: float
) -> NDArray[np.float32]:
    samples = to_float(recording)
    return add_noise(samples, coloured("pink", len(samples), rng), snr_db)


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at even distances in the list, or all items if there are fewer."""
    return [
        items[index] for index in np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)
    ]


class HearingPart:
    """Trainable part: the audio tower with its CTC head."""

    name = "hearing"

    def __init__(self, recordings: Path, seed: int) -> None:
        self.module = Hearing(seed)
        known = load(recordings, "train").all()
        self._others = [each.samples for each in known]
        self._batches = Batches(known)
        held_out, unseen = (
            evenly(load(recordings, kind).all(), NUM_HELD_OUT) for kind in ("held_out", "unseen")
        )
        self._exams = {
            "": make_hearing_exam(held_out),
            "_unseen_15db": make_hearing_exam(unseen, noise_db=NOISY_DB),
        }

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        """Return the CTC loss per symbol of a random batch. The statistic `clips` is the number of
        recordings in the batch.
        """
        drawn = self._batches.draw(rng)
        is_clean = step < CLEAN_STEPS
        clips = [
            to_float(each) if is_clean else augment(each.samples, self._others, rng)
            for each in drawn
        ]
        features = log_mel(clips)
        scores = slot_scores(self.module.slots, compute_states(self.module.audio_tower, features))
        loss = ctc_loss(
            scores, positions(features.num_frames), [encode(each.text) for each in drawn]
        )
        return loss, {"clips": len(drawn)}

    def evaluate(self) -> Mapping[str, float]:
        """Return `wer` and `cer` on held-out texts: without a suffix for training voices, and with
        the suffix `_unseen_15db` for unseen voices in noise.
        """
        stats: dict[str, float] = {}
        for name, exam in self._exams.items():
            texts, transcripts = zip(*transcribe(self.module, exam), strict=True)
            stats |= {
                f"{key}{name}": value for key, value in error_rates(texts, transcripts).items()
            }
        return stats


def transcribe(hearing: Hearing, exam: HearingExam) -> Iterator[tuple[str, str]]:
    """Yield the text and the transcript of each recording of an exam."""
    for batch, texts in exam:
        features = batch.to_default_device()
        scores = slot_scores(hearing.slots, compute_states(hearing.audio_tower, features))
        yield from zip(
            texts, map(decode, symbols(scores, positions(features.num_frames))), strict=True
        )


def error_rates(texts: Sequence[str], transcripts: Sequence[str]) -> dict[str, float]:
    return {
        "wer": float(jiwer.wer(list(texts), list(transcripts))),
        "cer": float(jiwer.cer(list(texts), list(transcripts))),
    }
