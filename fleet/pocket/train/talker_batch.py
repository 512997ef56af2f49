"""Utterances as the Talker is fed them: text ids, codes heard and codes wanted, and what the user said before.

Legend: B utterances, T frames (the silent lead included), F = T + 1 rows that predict a frame or the end, L = F + 8 rows,
G prefixes (each before B / G utterances), P rows of a prefix, Q code groups. Knows no parameters.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.pocket.corpus import dialogues, encode
from fleet.pocket.shape import CODEBOOK_SIZE, CODEC_IDS, LEAD_FRAMES, NUM_CODE_GROUPS, TOKEN_ID, VOCAB_SIZE
from fleet.pocket.speech.shards import Utterance
from fleet.pocket.speech.wordlock import SILENT_AFTER
from fleet.pocket.train.pointer import PointerTargets

FIRST_ROW = 8
"""The last of the nine opening rows: it holds the first symbol and predicts the first frame."""
CODEC_ROW = 3
AUDIO_ROW = VOCAB_SIZE
"""The id, one beyond the vocabulary, of any position of audio."""
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
    """Shapes: `text_BL`, `controls_B6` the codec side of rows 3..8, `heard_BTQ` what is fed back, `alone_BT` where of that only
    the first code is, `codes_BTQ` what is true, `first_BF` the first code to predict, `prefix_GP`.
    """

    text_BL: Tensor
    controls_B6: Tensor
    heard_BTQ: Tensor
    alone_BT: Tensor
    codes_BTQ: Tensor
    first_BF: Tensor
    prefix_GP: Tensor | None
    spoken: PointerTargets

    @property
    def is_frame_BT(self) -> Tensor:
        first_BT = self.first_BF[:, :-1]
        return (first_BT >= 0) & (first_BT < END)


def text_side(symbols: Sequence[int], num_rows: int) -> list[int]:
    """The ids of the text side from the header on: the end once, then padding."""
    ids = [*OPENING, *symbols, TOKEN_ID["<tts_text_eod>"]]
    return (ids + [TOKEN_ID["<tts_pad>"]] * num_rows)[:num_rows]


def controls(voice: str) -> list[int]:
    """The codec side of the opening, which begins at row 3."""
    ids = CODEC_IDS
    return [ids.nothink, ids.think_bos, ids.think_eos, ids.speakers()[voice], ids.pad, ids.bos]


def with_lead(codes_TQ: NDArray[np.int16]) -> NDArray[np.int64]:
    """Codes as they are spoken: the silence before the first word, then the utterance."""
    return np.concatenate([np.repeat(codes_TQ[:1], LEAD_FRAMES, 0), codes_TQ]).astype(np.int64)


def make_batch(
    utterances: Sequence[Utterance],
    prefix_GP: NDArray[np.int64] | None,
    rng: np.random.Generator | None,
) -> TalkerBatch:
    """`rng` spoils what is fed back, so that the Talker learns to go on from its own mistakes; without one, all is true."""
    spoken = [with_lead(each.codes) for each in utterances]
    num_frames = max(map(len, spoken))
    codes = np.zeros((len(spoken), num_frames, NUM_CODE_GROUPS), np.int64)
    first = np.full((len(spoken), num_frames + 1), IGNORED, np.int64)
    for row, each in enumerate(spoken):
        codes[row, : len(each)] = each
        first[row, : len(each) + 1] = [*each[:, 0], END]
    heard = codes if rng is None else corrupt_codes(codes, rng)
    alone = np.zeros(codes.shape[:2], bool) if rng is None else rng.random(codes.shape[:2]) < NOISE
    text = torch.tensor([text_side(encode(each.text), FIRST_ROW + num_frames + 1) for each in utterances])
    return TalkerBatch(
        text_BL=text,
        controls_B6=torch.tensor([controls(each.voice) for each in utterances]),
        heard_BTQ=torch.as_tensor(heard),
        alone_BT=torch.as_tensor(alone),
        codes_BTQ=torch.as_tensor(codes),
        first_BF=torch.as_tensor(first),
        prefix_GP=None if prefix_GP is None else torch.as_tensor(prefix_GP),
        spoken=_spoken(utterances, text, torch.as_tensor(first)),
    )


def corrupt_codes(codes_BTQ: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A few codes replaced by any other; the last, a count of glottal cycles, by the one below or above."""
    others = rng.integers(0, CODEBOOK_SIZE, codes_BTQ.shape)
    steps = rng.choice((-1, 1), codes_BTQ.shape[:2])
    others[..., -1] = np.clip(codes_BTQ[..., -1] + steps, 0, CODEBOOK_SIZE - 1)
    return np.where(rng.random(codes_BTQ.shape) < NOISE, others, codes_BTQ)


def _spoken(utterances: Sequence[Utterance], text_BL: Tensor, first_BF: Tensor) -> PointerTargets:
    symbol = np.zeros(first_BF.shape, np.int64)
    for row, each in enumerate(utterances):
        end = LEAD_FRAMES + len(each.pointer) - SILENT_AFTER
        # Before the first word the first symbol is next to be spoken.
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
    """What users said before: turns of text as in the corpus, or of sound, each position of which is the same row."""

    def __init__(self, seed: int) -> None:
        turns = [turn.text for dialogue in dialogues("train", NUM_DIALOGUES, seed) for turn in dialogue.turns]
        self._questions = [encode(text) for text in turns[::2]]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """[count, P]: as long as the first of them; of the others the beginning is cut off, or further turns come before."""
        first = self._natural(rng)
        rows = [first]
        for _ in range(count - 1):
            row = self._natural(rng)
            while len(row) < len(first):
                row = self._natural(rng) + row
            rows.append(row[len(row) - len(first) :])
        return np.array(rows, np.int64)

    def _natural(self, rng: np.random.Generator) -> list[int]:
        return [each for _ in range(rng.choice(NUM_TURNS)) for each in self._turn(rng)]

    def _turn(self, rng: np.random.Generator) -> list[int]:
        if rng.random() < AUDIO_SHARE:
            sound = [AUDIO_ROW] * int(rng.integers(*AUDIO_FRAMES))
            said = [TOKEN_ID["<|audio_start|>"], *sound, TOKEN_ID["<|audio_end|>"]]
        else:
            said = self._questions[rng.integers(len(self._questions))]
        return [*USER, *said, TOKEN_ID["<|im_end|>"]]


class Sampler:
    """Draws utterances of like length together, those with rare words somewhat more often."""

    def __init__(self, utterances: Sequence[Utterance]) -> None:
        self.utterances = utterances
        count = Counter(word for each in utterances for word in each.text.split())
        rarest = np.array([min(count[word] for word in each.text.split()) for each in utterances])
        favour = np.clip(np.sqrt(COMMON_WORD / rarest), 1.0, MOST_FAVOURED)
        self._share = favour / favour.sum()
        self._frames = np.array([len(each.codes) for each in utterances])

    def draw(self, rng: np.random.Generator, count: int, bins: int = 16) -> list[Utterance]:
        """One bin by length of so many batches drawn at once, so every length comes as often as it is."""
        drawn = rng.choice(len(self._share), count * bins, p=self._share)
        drawn = drawn[np.argsort(self._frames[drawn], kind="stable")]
        at = int(rng.integers(bins)) * count
        return [self.utterances[index] for index in rng.permutation(drawn[at : at + count])]
