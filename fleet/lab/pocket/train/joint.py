"""Joint training of the Thinker and its audio tower: to answer spoken questions, to transcribe, and
to answer typed questions.

Starts from the weights of their separate trainings. The Talker, which speaks the answers, is not
involved.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jiwer
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from fleet.core.errors import ConfigError
from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import dialogues, encode
from fleet.lab.pocket.hearing.augment import augment
from fleet.lab.pocket.hearing.recordings import Recordings, SpeechRecording, SpokenDialogue, load
from fleet.lab.pocket.train import thinker
from fleet.lab.pocket.train.hearing import evenly, to_float
from fleet.lab.pocket.train.listening import (
    Clips,
    EmbeddedPrompts,
    ListeningThinker,
    PromptTurn,
    answer,
    embed,
    prompt,
    sample,
    solve_projection,
)
from fleet.lab.pocket.train.loop import Loss, Schedule, compiled
from fleet.lab.pocket.train.thinker import Block, PackedBatch, Sample, decoder_block, pack
from fleet.lab.pocket.train.tower import ctc_loss

NUM_ROWS = 4
ANSWER_SHARE, TRANSCRIBE_SHARE = 0.5, 0.2
"""Shares of spoken questions and of transcriptions among the training samples; the rest is
typed.
"""
EARLIER_SPOKEN_SHARE = 0.5
ASK_FIRST_SHARE = 0.25
CTC_WEIGHT = 0.3
TRANSCRIBE_ASKS = (
    "transcribe",
    "transcribe this",
    "transcribe the audio",
    "please transcribe this",
    "please transcribe the audio",
    "write this down",
    "write down what you hear",
    "write down what i said",
    "what did i just say",
    "what did i say here",
    "what do you hear",
    "what was said",
    "tell me what you hear",
    "repeat what you hear",
)
NUM_SPOKEN, NUM_WRITTEN, NUM_TYPED, NUM_SOLVED = 60, 40, 60, 240
SCHEDULE = Schedule(
    steps=2200, learning_rate=5e-4, warmup=60, weight_decay=0.05, evaluate_every=150
)


class SampleSource:
    """Source of random training samples: spoken dialogues and transcriptions made from recordings,
    augmented anew each time, and typed dialogues.
    """

    def __init__(self, recordings: Recordings) -> None:
        self._dialogues = recordings.dialogues
        self._all = recordings.all()
        self._others = [each.samples for each in self._all]

    def samples(self, rng: np.random.Generator, clips: Clips) -> Iterator[Sample]:
        """Yield random samples endlessly; their audio is added to `clips`."""
        typed = thinker.draw_samples(rng)
        while True:
            kind = rng.random()
            if kind < ANSWER_SHARE:
                yield sample(self._answered(rng, clips))
            elif kind < ANSWER_SHARE + TRANSCRIBE_SHARE:
                yield sample(self._written(rng, clips))
            else:
                yield next(typed)

    def _answered(self, rng: np.random.Generator, clips: Clips) -> list[PromptTurn]:
        dialogue = self._draw_dialogue(rng)
        is_spoken = [*(rng.random(len(dialogue.recordings) - 1) < EARLIER_SPOKEN_SHARE), True]
        audio = [
            self._augmented(each, rng) if has_audio else None
            for each, has_audio in zip(dialogue.recordings, is_spoken, strict=True)
        ]
        return spoken_turns(dialogue, clips, audio)

    def _draw_dialogue(self, rng: np.random.Generator) -> SpokenDialogue:
        """Choose a random spoken dialogue. The families have the same shares as among typed
        dialogues.
        """
        while True:
            dialogue = self._dialogues[int(rng.integers(len(self._dialogues)))]
            if rng.random() < thinker.FAMILY_SHARE[dialogue.dialogue.family]:
                return dialogue

    def _written(self, rng: np.random.Generator, clips: Clips) -> list[PromptTurn]:
        recording = self._all[int(rng.integers(len(self._all)))]
        ask = str(rng.choice(TRANSCRIBE_ASKS))
        return transcription(
            recording,
            clips,
            self._augmented(recording, rng),
            ask,
            is_first=bool(rng.random() < ASK_FIRST_SHARE),
        )

    def _augmented(
        self, recording: SpeechRecording, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        return augment(recording.samples, self._others, rng)


def spoken_turns(
    dialogue: SpokenDialogue, clips: Clips, audio: Sequence[NDArray[np.float32] | None]
) -> list[PromptTurn]:
    """Return the dialogue's turns. `audio`: samples of each turn of the user, None for a typed
    turn.
    """
    turns: list[PromptTurn] = []
    remaining = iter(audio)
    for turn in dialogue.dialogue.turns:
        samples = next(remaining) if turn.role == "user" else None
        rows = () if samples is None else clips.rows(samples, turn.text)
        turns.append(PromptTurn(role=turn.role, rows=rows, after="" if rows else turn.text))
    return turns


def transcription(
    recording: SpeechRecording,
    clips: Clips,
    samples: NDArray[np.float32],
    ask: str,
    *,
    is_first: bool = False,
) -> list[PromptTurn]:
    rows = clips.rows(samples, recording.text)
    before, after = (ask, "") if is_first else ("", ask)
    return [
        PromptTurn(role="user", rows=rows, before=before, after=after),
        PromptTurn(role="assistant", after=recording.text),
    ]


class JointExam:
    """Held-out data for evaluation: dialogues with spoken user turns, sentences to transcribe, and
    typed dialogues.
    """

    def __init__(self, recordings: Recordings) -> None:
        self._clips = Clips()
        spoken = evenly(recordings.dialogues, NUM_SPOKEN)
        self._dialogues = [each.dialogue for each in spoken]
        self._spoken = [
            prompt(spoken_turns(each, self._clips, [to_float(turn) for turn in each.recordings]))
            for each in spoken
        ]
        written = evenly(recordings.all(), NUM_WRITTEN)
        self._texts = [each.text for each in written]
        self._written = [
            prompt(transcription(each, self._clips, to_float(each), TRANSCRIBE_ASKS[1]))
            for each in written
        ]
        self._typed = list(dialogues("held_out", NUM_TYPED, shape.SEED))

    def grade(self, listener: ListeningThinker) -> dict[str, float]:
        """Return the shares of right answers to spoken and to typed questions, and the WER of the
        transcripts.
        """
        spoken = thinker.scores(self._dialogues, answer(listener, self._spoken, self._clips))[
            "right"
        ]
        wer = float(jiwer.wer(self._texts, answer(listener, self._written, self._clips)))
        answers = thinker.answer(listener, [thinker.prompt(each) for each in self._typed])
        return {
            "spoken": spoken,
            "wer": wer,
            "typed": thinker.scores(self._typed, answers)["right"],
        }


class JointPart:
    """Trainable part: Thinker and audio tower together.

    Raises: ConfigError if either is not trained yet.
    """

    name = "joint"

    def __init__(self, recordings: Path, parts: Path, seed: int) -> None:
        self.module = ListeningThinker(seed)
        known = load(recordings, "train")
        if load_parts(self.module, parts):
            solve_projection(
                self.module, [to_float(each) for each in evenly(known.all(), NUM_SOLVED)]
            )
        self._source = SampleSource(known)
        self._exam = JointExam(load(recordings, "held_out"))
        self._block = compiled(decoder_block)

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        """Return the weighted sum of text loss, pointer loss (typed samples) and CTC loss. The
        statistic `clips` is the number of clips in the batch.
        """
        clips = Clips()
        batch = pack(self._source.samples(rng, clips), NUM_ROWS)
        embedded = embed(self.module, batch.ids, clips)
        text, pointer = text_losses(self.module, batch, embedded, self._block)
        ctc = audio_loss(embedded)
        num_clips = sum(len(texts) for _, _, texts in embedded.group_scores)
        total = text + thinker.POINTER_WEIGHT * pointer + CTC_WEIGHT * ctc
        return total, {"text": text, "pointer": pointer, "ctc": ctc, "clips": num_clips}

    def evaluate(self) -> Mapping[str, float]:
        """Return statistics on held-out dialogues, in training voices and without noise."""
        return self._exam.grade(self.module)


def load_parts(listener: ListeningThinker, parts: Path) -> bool:
    """Load the trained weights of Thinker and tower. Return True if the tower's weights include
    `slots`, that is, if the tower was not yet trained together with the Thinker.

    Raises: ConfigError if a file is missing.
    """
    weights: dict[str, Tensor] = {}
    for name in ("thinker", "hearing"):
        file = parts / f"{name}.safetensors"
        if not file.is_file():
            raise ConfigError(f"{file} is missing; train {name} first", param="parts")
        weights |= load_file(file)
    slots = {key: value for key, value in listener.state_dict().items() if key.startswith("slots.")}
    listener.load_state_dict(slots | weights)
    return slots.keys() <= weights.keys()


def text_losses(
    listener: ListeningThinker, batch: PackedBatch, embedded: EmbeddedPrompts, block: Block
) -> tuple[Tensor, Tensor]:
    """Return the losses of the next symbol and of the pointer, as `thinker.losses` does."""
    states, pointing = thinker.run_layers(listener, embedded.states, batch, block)
    weights = batch.weights[:, 1:]
    # Logits only for positions with a loss: most positions are audio.
    is_scored = weights > 0
    logits = listener.lm_head(states[:, :-1][is_scored])
    each = functional.cross_entropy(logits, batch.ids[:, 1:][is_scored], reduction="none")
    return (each * weights[is_scored]).sum() / weights.sum(), thinker.pointer_loss(
        listener, batch, pointing
    )


def audio_loss(embedded: EmbeddedPrompts) -> Tensor:
    """Return the CTC loss per symbol over all groups of clips, 0 if there are no clips."""
    counts = [sum(len(encode(text)) for text in texts) for _, _, texts in embedded.group_scores]
    losses = [
        ctc_loss(scores, lengths, [encode(text) for text in texts])
        for scores, lengths, texts in embedded.group_scores
    ]
    weighted = [loss * count for loss, count in zip(losses, counts, strict=True)]
    return torch.stack(weighted).sum() / sum(counts) if weighted else embedded.states.new_zeros(())
