"""Training batches of the Talker: text ids, input codes, target codes, and prefixes of earlier user
turns.

Legend: B utterances, T frames (the silent lead included), F = T + 1 positions that predict a frame
or the end, L = F + 8 positions, G prefixes (each before B / G utterances), P positions of a prefix,
Q code groups.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.lab.pocket.corpus import dialogues, encode
from fleet.lab.pocket.shape import (
    CODEBOOK_SIZE,
    CODEC_IDS,
    LEAD_FRAMES,
    NUM_CODE_GROUPS,
    TOKEN_ID,
    VOCAB_SIZE,
)
from fleet.lab.pocket.speech.shards import Utterance
from fleet.lab.pocket.speech.wordlock import SILENT_AFTER
from fleet.lab.pocket.train.pointer import PointerTargets

FIRST_ROW = 8
"""Index of the last of the nine opening positions, which holds the first symbol and predicts the
first frame.
"""
CODEC_ROW = 3
AUDIO_ROW = VOCAB_SIZE
"""Id of every audio position in a prefix, one beyond the vocabulary."""
IGNORED = -100
END = CODEBOOK_SIZE
NOISE = 0.06
AUDIO_SHARE = 0.4
AUDIO_FRAMES = (10, 81)
NUM_TURNS = (1, 1, 1, 2, 2, 3)
NUM_DIALOGUES = 3000
MOST_FAVOURED = 2.0
COMMON_WORD = 200
HEADER = [TOKEN_ID[name] for name in ("<|im_start|>", "<|assistant|>", "<|says|>")]
OPENING = [*HEADER, *[TOKEN_ID["<tts_pad>"]] * 4, TOKEN_ID["<tts_text_bos>"]]
USER = [TOKEN_ID[name] for name in ("<|im_start|>", "<|user|>", "<|says|>")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerBatch:
    """A batch of utterances as input and targets of the Talker.

    Shapes: `text_BL` ids of the text side; `controls_B6` ids of the codec side at positions 3..8;
    `input_BTQ` the codes fed back; `first_only_BT` True where only a frame's first code is fed
    back; `codes_BTQ` the true codes; `first_BF` the first code of the frame to predict, or `END`,
    or `IGNORED` for padding; `prefix_GP` ids of the prefixes, None without prefixes.
    """

    text_BL: Tensor
    controls_B6: Tensor
    input_BTQ: Tensor
    first_only_BT: Tensor
    codes_BTQ: Tensor
    first_BF: Tensor
    prefix_GP: Tensor | None
    spoken: PointerTargets

    @property
    def is_frame_BT(self) -> Tensor:
        first_BT = self.first_BF[:, :-1]
        return (first_BT >= 0) & (first_BT < END)


def text_side(symbols: Sequence[int], num_rows: int) -> list[int]:
    """Return `num_rows` ids of the text side: the opening positions, the symbols, one end symbol,
    then padding.
    """
    ids = [*OPENING, *symbols, TOKEN_ID["<tts_text_eod>"]]
    return (ids + [TOKEN_ID["<tts_pad>"]] * num_rows)[:num_rows]


def controls(voice: str) -> list[int]:
    """Return the control ids of the codec side for a voice, from position 3 to the first frame."""
    ids = CODEC_IDS
    return [ids.nothink, ids.think_bos, ids.think_eos, ids.speakers()[voice], ids.pad, ids.bos]


def with_lead(codes_TQ: NDArray[np.int16]) -> NDArray[np.int64]:
    """Return the codes preceded by the silent lead."""
    return np.concatenate([np.repeat(codes_TQ[:1], LEAD_FRAMES, 0), codes_TQ]).astype(np.int64)


def make_batch(
    utterances: Sequence[Utterance],
    prefix_GP: NDArray[np.int64] | None,
    rng: np.random.Generator | None,
) -> TalkerBatch:
    """Build a batch of utterances. With `rng`, input codes are corrupted, so that the Talker learns
    to continue after its own errors.
    """
    spoken = [with_lead(each.codes) for each in utterances]
    num_frames = max(map(len, spoken))
    codes = np.zeros((len(spoken), num_frames, NUM_CODE_GROUPS), np.int64)
    first = np.full((len(spoken), num_frames + 1), IGNORED, np.int64)
    for row, each in enumerate(spoken):
        codes[row, : len(each)] = each
        first[row, : len(each) + 1] = [*each[:, 0], END]
    input_codes = codes if rng is None else corrupt_codes(codes, rng)
    first_only = (
        np.zeros(codes.shape[:2], bool) if rng is None else rng.random(codes.shape[:2]) < NOISE
    )
    text = torch.tensor(
        [text_side(encode(each.text), FIRST_ROW + num_frames + 1) for each in utterances]
    )
    return TalkerBatch(
        text_BL=text,
        controls_B6=torch.tensor([controls(each.voice) for each in utterances]),
        input_BTQ=torch.as_tensor(input_codes),
        first_only_BT=torch.as_tensor(first_only),
        codes_BTQ=torch.as_tensor(codes),
        first_BF=torch.as_tensor(first),
        prefix_GP=None if prefix_GP is None else torch.as_tensor(prefix_GP),
        spoken=_spoken(utterances, text, torch.as_tensor(first)),
    )


def corrupt_codes(codes_BTQ: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return a copy in which a share of `NOISE` of the codes is replaced by random ones; codes of
    the last group, the number of glottal cycles, change by one instead.
    """
    others = rng.integers(0, CODEBOOK_SIZE, codes_BTQ.shape)
    steps = rng.choice((-1, 1), codes_BTQ.shape[:2])
    others[..., -1] = np.clip(codes_BTQ[..., -1] + steps, 0, CODEBOOK_SIZE - 1)
    return np.where(rng.random(codes_BTQ.shape) < NOISE, others, codes_BTQ)


def _spoken(utterances: Sequence[Utterance], text_BL: Tensor, first_BF: Tensor) -> PointerTargets:
    symbol = np.zeros(first_BF.shape, np.int64)
    for row, each in enumerate(utterances):
        end = LEAD_FRAMES + len(each.pointer) - SILENT_AFTER
        # Before the first word, the first symbol is the next to be spoken.
        symbol[row, LEAD_FRAMES:end] = np.maximum(each.pointer[: end - LEAD_FRAMES], 0)
        symbol[row, end:] = len(encode(each.text))
    return PointerTargets(
        symbol_BF=torch.as_tensor(symbol),
        is_real_BF=first_BF != IGNORED,
        num_symbols_B=torch.tensor([len(encode(each.text)) for each in utterances]),
        ids_BF=text_BL[:, FIRST_ROW:],
        first_row=FIRST_ROW,
    )


class Prefixes:
    """Source of random earlier user turns: text of the corpus, or audio, all positions of which
    have the id `AUDIO_ROW`.
    """

    def __init__(self, seed: int) -> None:
        turns = [
            turn.text
            for dialogue in dialogues("train", NUM_DIALOGUES, seed)
            for turn in dialogue.turns
        ]
        self._questions = [encode(text) for text in turns[::2]]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return `count` random prefixes [count, P]. The first one determines P: the others are cut
        at the start, or extended by further turns.
        """
        first = self._draw_turns(rng)
        rows = [first]
        for _ in range(count - 1):
            row = self._draw_turns(rng)
            while len(row) < len(first):
                row = self._draw_turns(rng) + row
            rows.append(row[len(row) - len(first) :])
        return np.array(rows, np.int64)

    def _draw_turns(self, rng: np.random.Generator) -> list[int]:
        return [each for _ in range(rng.choice(NUM_TURNS)) for each in self._draw_turn(rng)]

    def _draw_turn(self, rng: np.random.Generator) -> list[int]:
        if rng.random() < AUDIO_SHARE:
            audio = [AUDIO_ROW] * int(rng.integers(*AUDIO_FRAMES))
            content = [TOKEN_ID["<|audio_start|>"], *audio, TOKEN_ID["<|audio_end|>"]]
        else:
            content = self._questions[rng.integers(len(self._questions))]
        return [*USER, *content, TOKEN_ID["<|im_end|>"]]


class Sampler:
    """Source of random batches with utterances of similar length; utterances with rare words are
    more frequent.
    """

    def __init__(self, utterances: Sequence[Utterance]) -> None:
        self.utterances = utterances
        count = Counter(word for each in utterances for word in each.text.split())
        rarest = np.array([min(count[word] for word in each.text.split()) for each in utterances])
        weight = np.clip(np.sqrt(COMMON_WORD / rarest), 1.0, MOST_FAVOURED)
        self._share = weight / weight.sum()
        self._frames = np.array([len(each.codes) for each in utterances])

    def draw(self, rng: np.random.Generator, count: int, bins: int = 16) -> list[Utterance]:
        """Return a batch of `count` utterances. To keep the frequency of every length, `bins`
        batches are chosen, sorted by length, and one is returned.
        """
        drawn = rng.choice(len(self._share), count * bins, p=self._share)
        drawn = drawn[np.argsort(self._frames[drawn], kind="stable")]
        at = int(rng.integers(bins)) * count
        return [self.utterances[index] for index in rng.permutation(drawn[at : at + count])]
