"""Trains the Thinker and its audio tower together: to answer what is spoken, to write it down, and still to answer what is typed.

Begins with what both have learnt apart. Knows no speech of its own: what Pocket says is the Talker's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from fleet.core.errors import ConfigError
from fleet.pocket import shape
from fleet.pocket.corpus import Dialogue, dialogues, encode, is_right
from fleet.pocket.hearing.augment import augment
from fleet.pocket.hearing.recordings import Recordings, SpeechRecording, SpokenDialogue, load
from fleet.pocket.train import thinker
from fleet.pocket.train.hearing import evenly, to_float
from fleet.pocket.train.listening import (
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
from fleet.pocket.train.loop import Schedule, compiled
from fleet.pocket.train.thinker import Block, PackedBatch, Sample, decoder_block, pack
from fleet.pocket.train.tower import ctc_loss

NUM_ROWS = 4
ANSWER_SHARE, TRANSCRIBE_SHARE = 0.5, 0.2
"""Of what is drawn; the rest is typed."""
EARLIER_SPOKEN_SHARE = 0.5
ASK_FIRST_SHARE = 0.25
CTC_WEIGHT = 0.3
TRANSCRIBE_ASKS = (
    "transcribe", "transcribe this", "transcribe the audio", "please transcribe this", "please transcribe the audio",
    "write this down", "write down what you hear", "write down what i said", "what did i just say", "what did i say here",
    "what do you hear", "what was said", "tell me what you hear", "repeat what you hear",
)  # fmt: skip
NUM_SPOKEN, NUM_WRITTEN, NUM_TYPED, NUM_SOLVED = 60, 40, 60, 240
SCHEDULE = Schedule(steps=2200, learning_rate=5e-4, warmup=60, weight_decay=0.05, evaluate_every=150)


class SampleSource:
    """Dialogues and transcriptions drawn from the recordings, spoilt anew each time."""

    def __init__(self, recordings: Recordings) -> None:
        self._talks = recordings.dialogues
        self._all = recordings.all()
        self._others = [each.samples for each in self._all]

    def samples(self, rng: np.random.Generator, clips: Clips) -> Iterator[Sample]:
        """Without end; sounds are put into `clips`."""
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
        talk = self._talk(rng)
        is_spoken = [*(rng.random(len(talk.recordings) - 1) < EARLIER_SPOKEN_SHARE), True]
        sounds = [
            self._spoilt(each, rng) if is_sound else None for each, is_sound in zip(talk.recordings, is_spoken, strict=True)
        ]
        return spoken_turns(talk, clips, sounds)

    def _talk(self, rng: np.random.Generator) -> SpokenDialogue:
        """Of each family as many as of the typed ones."""
        while True:
            talk = self._talks[int(rng.integers(len(self._talks)))]
            if rng.random() < thinker.KEPT[talk.dialogue.family]:
                return talk

    def _written(self, rng: np.random.Generator, clips: Clips) -> list[PromptTurn]:
        recording = self._all[int(rng.integers(len(self._all)))]
        ask = str(rng.choice(TRANSCRIBE_ASKS))
        return transcription(recording, clips, self._spoilt(recording, rng), ask, is_first=bool(rng.random() < ASK_FIRST_SHARE))

    def _spoilt(self, recording: SpeechRecording, rng: np.random.Generator) -> NDArray[np.float32]:
        return augment(recording.samples, self._others, rng)


def spoken_turns(talk: SpokenDialogue, clips: Clips, sounds: Sequence[NDArray[np.float32] | None]) -> list[PromptTurn]:
    """The dialogue with a sound, or none where it is typed, for each of the user's turns."""
    turns: list[PromptTurn] = []
    left = iter(sounds)
    for turn in talk.dialogue.turns:
        sound = next(left) if turn.role == "user" else None
        spoken = () if sound is None else clips.rows(sound, turn.text)
        turns.append(PromptTurn(role=turn.role, rows=spoken, after="" if spoken else turn.text))
    return turns


def transcription(
    recording: SpeechRecording, clips: Clips, samples: NDArray[np.float32], ask: str, *, is_first: bool = False
) -> list[PromptTurn]:
    rows = clips.rows(samples, recording.text)
    before, after = (ask, "") if is_first else ("", ask)
    return [PromptTurn(role="user", rows=rows, before=before, after=after), PromptTurn(role="assistant", after=recording.text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointExam:
    """Held-out questions, spoken and typed, and held-out sentences to write down; the sounds of all are in `clips`."""

    talks: Sequence[SpokenDialogue]
    spoken: Sequence[Sequence[int]]
    texts: Sequence[str]
    written: Sequence[Sequence[int]]
    typed: Sequence[Dialogue]
    clips: Clips


def make_joint_exam(
    recordings: Recordings, num_spoken: int = NUM_SPOKEN, num_written: int = NUM_WRITTEN, num_typed: int = NUM_TYPED
) -> JointExam:
    """Return an exam in which every turn of the user is spoken."""
    clips = Clips()

    talks = evenly(recordings.dialogues, num_spoken)
    spoken = [prompt(spoken_turns(talk, clips, [to_float(each) for each in talk.recordings])) for talk in talks]
    to_write = evenly(recordings.all(), num_written)
    written = [prompt(transcription(each, clips, to_float(each), TRANSCRIBE_ASKS[1])) for each in to_write]
    typed = list(dialogues("held_out", num_typed, shape.SEED))
    return JointExam(
        talks=talks, spoken=spoken, texts=[each.text for each in to_write], written=written, typed=typed, clips=clips
    )  # fmt: skip


def grade(listener: ListeningThinker, of: JointExam) -> dict[str, float]:
    """The share right of the spoken and of the typed questions, and the error rate of what was written down."""
    figures: dict[str, float] = {}
    if of.talks:
        answers = answer(listener, of.spoken, of.clips)
        right = [is_right(talk.dialogue, said) for talk, said in zip(of.talks, answers, strict=True)]
        figures["spoken"] = sum(right) / len(right)
    if of.texts:
        figures["wer"] = float(jiwer.wer(list(of.texts), answer(listener, of.written, of.clips)))
    if of.typed:
        answers = thinker.answer(listener, [thinker.prompt(each) for each in of.typed])
        figures["typed"] = thinker.scores(of.typed, answers)["right"]
    return figures


class JointPart:
    """Both, as the training loop sees them.

    Raises: ConfigError where one of them is not yet trained.
    """

    name = "joint"

    def __init__(self, recordings: Path, parts: Path, seed: int, *, may_compile: bool = True) -> None:
        self._listener = ListeningThinker(seed)
        known = load(recordings, "train")
        if load_parts(self._listener, parts):
            solve_projection(self._listener, [to_float(each) for each in evenly(known.all(), NUM_SOLVED)])
        self._draw = SampleSource(known)
        self._exam = make_joint_exam(load(recordings, "held_out"))
        self._block = compiled(decoder_block) if may_compile else decoder_block

    @property
    def module(self) -> ListeningThinker:
        return self._listener

    def loss(self, rng: np.random.Generator, step: int) -> tuple[Tensor, Mapping[str, float]]:
        """Cross-entropy per weighted symbol, of pointing where it is typed, and CTC of the sounds. `clips`: in the batch."""
        clips = Clips()
        batch = pack(self._draw.samples(rng, clips), NUM_ROWS)
        embedded = embed(self._listener, batch.ids, clips)
        text, pointer = text_losses(self._listener, batch, embedded, self._block)
        ctc = sound_loss(embedded)
        figures = {"text": float(text.detach()), "pointer": float(pointer.detach()), "ctc": float(ctc.detach())}
        total = text + thinker.POINTER_WEIGHT * pointer + CTC_WEIGHT * ctc
        return total, figures | {"clips": sum(len(texts) for _, _, texts in embedded.heard)}

    def evaluate(self) -> Mapping[str, float]:
        """On what is held out, by known voices and without noise."""
        return grade(self._listener, self._exam)


def load_parts(listener: ListeningThinker, parts: Path) -> bool:
    """Returns whether the tower was trained alone: only then are there slots, and it does not yet speak to the Thinker."""
    weights: dict[str, Tensor] = {}
    for name in ("thinker", "hearing"):
        file = parts / f"{name}.safetensors"
        if not file.is_file():
            raise ConfigError(f"{file} is missing; train {name} first", param="parts")
        weights |= load_file(file)
    slots = {key: value for key, value in listener.state_dict().items() if key.startswith("slots.")}
    listener.load_state_dict(slots | weights)
    return slots.keys() <= weights.keys()


def text_losses(listener: ListeningThinker, batch: PackedBatch, embedded: EmbeddedPrompts, block: Block) -> tuple[Tensor, Tensor]:
    """Of the next symbol, and of pointing, as `thinker.losses` has them."""
    states, pointing = thinker.run_layers(listener, embedded.states, batch, block)
    weights = batch.weights[:, 1:]
    # Only where there is something to learn: most positions are sound.
    is_scored = weights > 0
    logits = listener.lm_head(states[:, :-1][is_scored])
    each = functional.cross_entropy(logits, batch.ids[:, 1:][is_scored], reduction="none")
    return (each * weights[is_scored]).sum() / weights.sum(), thinker.pointer_loss(listener, batch, pointing)


def sound_loss(embedded: EmbeddedPrompts) -> Tensor:
    """Per symbol, over all groups of clips."""
    counts = [sum(len(encode(text)) for text in texts) for _, _, texts in embedded.heard]
    losses = [ctc_loss(scores, lengths, [encode(text) for text in texts]) for scores, lengths, texts in embedded.heard]
    weighted = [loss * count for loss, count in zip(losses, counts, strict=True)]
    return torch.stack(weighted).sum() / sum(counts) if weighted else embedded.states.new_zeros(())
