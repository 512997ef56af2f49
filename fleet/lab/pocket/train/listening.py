"""The Thinker with its audio tower: sequence layout, embedding and answers of dialogues with spoken
turns.

In a sequence of ids, a position of audio has an id beyond the vocabulary that encodes clip and
position, so that spoken and typed dialogues are packed alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import encode
from fleet.lab.pocket.hearing.features import log_mel
from fleet.lab.pocket.train import thinker
from fleet.lab.pocket.train.thinker import USER_WEIGHT, Sample, ThinkerModel, opening
from fleet.lab.pocket.train.tower import (
    BLANK,
    SLOTS,
    Hearing,
    compute_states,
    positions,
    slot_scores,
)

FIRST_ROW = shape.VOCAB_SIZE
MAX_CLIP_ROWS = 1024
CLIPS_AT_ONCE = 12
ANSWER_BATCH = 32
_HOP_SAMPLES = 160
_END = shape.TOKEN_ID["<|im_end|>"]
_AUDIO_START, _AUDIO_END = shape.TOKEN_ID["<|audio_start|>"], shape.TOKEN_ID["<|audio_end|>"]
_AUDIO_PAD = shape.TOKEN_ID["<|audio_pad|>"]


class ListeningThinker(ThinkerModel):
    """Module of the Thinker and its audio tower. Weights are named as in the Thinker of
    `transformers`: `model.*`, `lm_head.weight`, `audio_tower.*`; `slots.*` is for training only.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        hearing = Hearing(seed)
        self.audio_tower: Any = hearing.audio_tower
        self.slots: nn.Linear = hearing.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Clips:
    """Audio clips of a batch, in the order in which `rows` added them. Units: samples at 16 kHz, in
    whole frames of 10 ms.
    """

    samples: list[NDArray[Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def rows(self, samples: NDArray[Any], text: str) -> list[int]:
        """Add a clip, cut to its longest allowed length, and return the ids of its audio positions.
        `text`: transcript of the clip.
        """
        num_frames = min(len(samples) // _HOP_SAMPLES, MAX_CLIP_ROWS * 7)
        first = FIRST_ROW + len(self.samples) * MAX_CLIP_ROWS
        self.samples.append(samples[: num_frames * _HOP_SAMPLES])
        self.texts.append(text)
        return list(range(first, first + int(positions(torch.tensor(num_frames)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
    """A turn of a prompt. `rows`: ids of the audio positions, empty for a typed turn. `before` and
    `after`: text before and after the audio; a typed turn has its text in `after`.
    """

    role: str
    after: str = ""
    rows: Sequence[int] = ()
    before: str = ""

    def ids(self) -> list[int]:
        audio = [_AUDIO_START, *self.rows, _AUDIO_END] if self.rows else []
        return [*opening(self.role), *encode(self.before), *audio, *encode(self.after), _END]


def sample(turns: Sequence[PromptTurn]) -> Sample:
    """Build a training sample with the loss weights of a typed dialogue. Spoken turns, which cannot
    be predicted, have weight 0.
    """
    ids: list[int] = []
    weights: list[float] = []
    for turn in turns:
        new = turn.ids()
        weight = 1.0 if turn.role == "assistant" else 0.0 if turn.rows else USER_WEIGHT
        ids += new
        weights += [0.0] * len(opening(turn.role)) + [weight] * (len(new) - len(opening(turn.role)))
    return Sample(ids=ids, weights=weights)


def prompt(turns: Sequence[PromptTurn]) -> list[int]:
    """Return the ids of the dialogue up to its last answer."""
    return [symbol for turn in turns[:-1] for symbol in turn.ids()] + opening("assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPrompts:
    """Embedded input of the Thinker, and the slot scores, lengths and texts of each group of clips.

    Shapes: `states` rows x row length x hidden.
    """

    states: Tensor
    group_scores: Sequence[tuple[Tensor, Tensor, Sequence[str]]]


def embed(listener: ListeningThinker, ids: Tensor, clips: Clips) -> EmbeddedPrompts:
    """Embed rows of ids. Only the clips whose ids occur in the rows are encoded."""
    is_audio = ids >= FIRST_ROW
    states: Tensor = listener.model.embed_tokens(ids.masked_fill(is_audio, _AUDIO_PAD))
    if not is_audio.any():
        return EmbeddedPrompts(states=states, group_scores=())
    numbers, offsets = (
        (ids[is_audio] - FIRST_ROW) // MAX_CLIP_ROWS,
        (ids[is_audio] - FIRST_ROW) % MAX_CLIP_ROWS,
    )
    firsts = torch.zeros(len(clips.samples), dtype=torch.int64)
    rows: list[Tensor] = []
    group_scores: list[tuple[Tensor, Tensor, Sequence[str]]] = []
    num_rows = 0
    for group in _groups(numbers.unique().tolist(), clips):
        states_of_group, lengths = _encode(listener, [clips.samples[number] for number in group])
        for number, clip_states, length in zip(
            group, listener.audio_tower.proj2(states_of_group), lengths.tolist(), strict=True
        ):
            firsts[number] = num_rows
            num_rows += length
            rows.append(clip_states[:length])
        group_scores.append(
            (
                slot_scores(listener.slots, states_of_group),
                lengths,
                [clips.texts[number] for number in group],
            )
        )
    states = states.masked_scatter(is_audio[..., None], torch.cat(rows)[firsts[numbers] + offsets])
    return EmbeddedPrompts(states=states, group_scores=group_scores)


def _encode(listener: ListeningThinker, samples: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor]:
    features = log_mel(samples)
    return compute_states(listener.audio_tower, features), positions(features.num_frames)


def _groups(numbers: Sequence[int], clips: Clips) -> Iterator[Sequence[int]]:
    """Yield groups of clip numbers, with clips of about the same length in a group."""
    ordered = sorted(numbers, key=lambda number: len(clips.samples[number]))
    yield from (
        ordered[start : start + CLIPS_AT_ONCE] for start in range(0, len(ordered), CLIPS_AT_ONCE)
    )


@torch.no_grad()
def solve_projection(
    listener: ListeningThinker, samples: Sequence[NDArray[Any]], ridge: float = 1e-3
) -> None:
    """Fit the tower's last layer by ridge regression: its target at a position is the sum of the
    embeddings of the position's symbols. Replaces the weights of this layer.

    At the start of the joint training, the tower's output is then close to embedded text, which the
    Thinker can read.
    """
    table = listener.model.embed_tokens.weight
    inputs_by_clip: list[Tensor] = []
    targets_by_clip: list[Tensor] = []
    for start in range(0, len(samples), CLIPS_AT_ONCE):
        states, lengths = _encode(listener, samples[start : start + CLIPS_AT_ONCE])
        symbols = slot_scores(listener.slots, states).argmax(-1)
        targets = symbol_rows(symbols, table)
        for clip_states, target, length in zip(states, targets, lengths.tolist(), strict=True):
            inputs_by_clip.append(clip_states[:length])
            targets_by_clip.append(target[:length])
    inputs = _with_ones(torch.cat(inputs_by_clip))
    gram = inputs.T @ inputs + ridge * len(inputs) * torch.eye(inputs.shape[1])
    solved = torch.linalg.solve(gram, inputs.T @ torch.cat(targets_by_clip))
    listener.audio_tower.proj2.weight.copy_(solved[:-1].T)
    listener.audio_tower.proj2.bias.copy_(solved[-1])


def _with_ones(states: Tensor) -> Tensor:
    return torch.cat((states, states.new_ones(len(states), 1)), 1)


def symbol_rows(symbols: Tensor, table: Tensor) -> Tensor:
    """Return for each position the sum of the embeddings of its symbols, after CTC's removal of
    blanks and repetitions; a position without symbols has the embedding of audio padding. Shapes:
    clips x slots -> clips x positions x hidden.
    """
    before = torch.cat((torch.full_like(symbols[:, :1], BLANK), symbols[:, :-1]), 1)
    is_new = (symbols != BLANK) & (symbols != before)
    rows = table[symbols.masked_fill(~is_new, 0)] * is_new[..., None]
    summed = rows.unflatten(1, (-1, SLOTS)).sum(2)
    return torch.where(
        is_new.unflatten(1, (-1, SLOTS)).any(-1)[..., None], summed, table[_AUDIO_PAD]
    )


def answer(
    listener: ListeningThinker,
    prompts: Sequence[Sequence[int]],
    clips: Clips,
    *,
    max_len: int = thinker.MAX_ANSWER_LEN,
) -> list[str]:
    """Return the greedily decoded answer to each prompt."""
    return thinker.answer(
        listener,
        prompts,
        embed_ids=lambda ids: embed(listener, ids, clips).states,
        batch_size=ANSWER_BATCH,
        max_len=max_len,
    )
