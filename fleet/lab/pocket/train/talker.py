"""Training of the Talker to predict the next frame of codes from the text and the codes so far.

The silent lead keeps text ahead of speech, and pointer supervision trains two heads to find the
symbols being spoken. Half of the utterances, and all near the end of the training, have earlier
user turns as a prefix, so that the Talker learns to ignore them. The data folder is checked for new
shards now and then; a resumed run is identical only if the data set was complete. Greedy generation
during training measures whether the speech ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import encode
from fleet.lab.pocket.shape import LEAD_FRAMES, NUM_CODE_GROUPS, SEED, text_table
from fleet.lab.pocket.speech.shards import CODES, Utterance, load_utterances
from fleet.lab.pocket.train.loop import Loss, Schedule
from fleet.lab.pocket.train.pointer import PointerHeads, pointer_accuracy
from fleet.lab.pocket.train.talker_batch import (
    CODEC_ROW,
    END,
    FIRST_ROW,
    IGNORED,
    Prefixes,
    Sampler,
    TalkerBatch,
    controls,
    make_batch,
    text_side,
)
from fleet.lab.pocket.train.talker_forward import Lean, Past, Trunk, new_talker

SCHEDULE = Schedule(steps=3000, evaluate_every=250)
BATCH, NUM_PREFIXES = 32, 4
PREFIX_SHARE, ALWAYS_FROM = 0.5, 0.9
DROPOUT = 0.05
RESIDUAL_SHARE = 1 / 3
POINTER_WEIGHT = 0.3
REFRESH_EVERY_STEPS = 100
NUM_HELD_OUT, NUM_SPOKEN = 100, 16
LONGEST = 1.3
"""Generated speech longer than this factor times the teacher's speech counts as not ended."""


class TalkerPart:
    """Trainable part: the Talker and its auxiliary heads. The Talker's weights are named
    `talker.*`, as in the checkpoint. The constructor seeds torch's global generator.

    Raises: ConfigError from `loss` if there is no utterance to train on.
    """

    name = "talker"

    def __init__(self, data: Path, *, steps: int, seed: int = SEED) -> None:
        torch.manual_seed(seed)
        self._talker, self._pointer = new_talker(seed), PointerHeads()
        self.module = nn.ModuleDict({"talker": self._talker, "pointer": self._pointer})
        self._lean = Lean(self._talker)
        self._table = text_table()
        self._prefixes = Prefixes(seed)
        self._data, self._steps = data, steps
        self._listed: tuple[tuple[str, int], ...] = ()
        self._sampler: Sampler | None = None
        self._held_out: list[Utterance] = []

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        if self._sampler is None or step % REFRESH_EVERY_STEPS == 0:
            self._refresh_data()
        assert self._sampler is not None
        # Dropout draws from the global generator.
        torch.manual_seed(int(rng.integers(2**31)))
        share = 1.0 if step >= ALWAYS_FROM * self._steps else PREFIX_SHARE
        prefixes = self._prefixes.draw(rng, NUM_PREFIXES) if rng.random() < share else None
        batch = make_batch(self._sampler.draw(rng, BATCH), prefixes, rng)
        losses = self._losses(batch, self._forward(batch, DROPOUT), rng)
        total = (
            losses["code0"]
            + losses["residual"]
            + POINTER_WEIGHT * (losses["lag"] + losses["symbol"] + losses["pointer"])
        )
        return total, losses

    def _refresh_data(self) -> None:
        """Load all utterances again if coded shards were added or changed since the last check.
        Raises: ConfigError if there are no coded shards.
        """
        listed = tuple(
            (file.name, file.stat().st_mtime_ns) for file in sorted(self._data.glob(f"*.{CODES}"))
        )
        if listed == self._listed and self._sampler is not None:
            return
        utterances = load_utterances(self._data, "train")
        if not utterances:
            raise ConfigError(
                f"no coded speech in {self._data}; run `fleet pocket train speech`", param="data"
            )
        self._listed, self._sampler = listed, Sampler(utterances)
        self._held_out = load_utterances(self._data, "held_out")[:NUM_HELD_OUT]

    def _forward(self, batch: TalkerBatch, dropout: float) -> Trunk:
        text_embeddings = self._lean.text_embeddings(self._table.to(torch.get_default_device()))
        past: Past | None = None
        if batch.prefix_GP is not None:
            times = len(batch.text_BL) // len(batch.prefix_GP)
            past = self._lean.trunk(
                F.embedding(batch.prefix_GP, text_embeddings), dropout=dropout
            ).past.repeated(times)
        rows = F.embedding(batch.text_BL, text_embeddings)
        controls = self._lean.control_embeddings(batch.controls_B6)
        fed_back = self._lean.code_embeddings(batch.input_BTQ, batch.first_only_BT)
        codec = torch.cat([torch.zeros_like(rows[:, :CODEC_ROW]), controls, fed_back], 1)
        return self._lean.trunk(rows + codec, past, dropout=dropout, tap=True)

    def _losses(
        self, batch: TalkerBatch, trunk: Trunk, rng: np.random.Generator
    ) -> dict[str, Tensor]:
        assert trunk.tapped is not None
        hidden = trunk.hidden_BLH[:, FIRST_ROW:]
        first = F.cross_entropy(
            self._lean.first_logits(hidden).flatten(0, 1),
            batch.first_BF.flatten(),
            ignore_index=IGNORED,
        )
        frames = batch.is_frame_BT & torch.as_tensor(
            rng.random(batch.is_frame_BT.shape) < RESIDUAL_SHARE
        )
        codes = batch.codes_BTQ[frames]
        logits = self._lean.residual_logits(hidden[:, :-1][frames], codes[:, :-1], dropout=DROPOUT)
        residual = torch.stack(
            [
                F.cross_entropy(each, code)
                for each, code in zip(logits, codes.unbind(1)[1:], strict=True)
            ]
        )
        pointed = self._pointer(trunk.tapped, batch.spoken)
        return {"code0": first, "residual": residual.mean(), **pointed}

    def evaluate(self) -> Mapping[str, float]:
        """Return statistics of teacher-forced prediction, with and without a prefix, and of greedy
        generation.
        """
        if not self._held_out:
            return {}
        rng = np.random.default_rng(SEED)
        plain = self._forced(None)
        prefixed = self._forced(self._prefixes.draw(rng, 1))
        after = {
            f"{name}_prefixed": prefixed[name]
            for name in ("code0_ce", "code0_accuracy", "pointer_accuracy")
        }
        return plain | after | self._generated(self._prefixes.draw(rng, 1)[0].tolist())

    def _forced(self, prefix_GP: NDArray[np.int64] | None) -> dict[str, float]:
        """Return statistics of teacher-forced prediction over the held-out utterances. Accuracies
        exclude the silent lead.
        """
        held_out = sorted(self._held_out, key=lambda each: len(each.codes))
        parts = [held_out[at : at + BATCH] for at in range(0, len(held_out), BATCH)]
        stats = [self._forced_part(make_batch(part, prefix_GP, None)) for part in parts]
        weights = [sum(len(each.codes) for each in part) for part in parts]
        return {
            name: float(np.average([each[name] for each in stats], weights=weights))
            for name in stats[0]
        }

    def _forced_part(self, batch: TalkerBatch) -> dict[str, float]:
        trunk = self._forward(batch, 0.0)
        assert trunk.tapped is not None
        hidden = trunk.hidden_BLH[:, FIRST_ROW:]
        logits = self._lean.first_logits(hidden)
        real = batch.first_BF != IGNORED
        late = real.clone()
        late[:, :LEAD_FRAMES] = False
        frames = batch.is_frame_BT.clone()
        frames[:, :LEAD_FRAMES] = False
        codes = batch.codes_BTQ[frames]
        residual = torch.stack(self._lean.residual_logits(hidden[:, :-1][frames], codes[:, :-1]), 1)
        return {
            "code0_ce": float(F.cross_entropy(logits[real], batch.first_BF[real])),
            "code0_accuracy": _share(logits.argmax(-1)[late] == batch.first_BF[late]),
            "residual_ce": float(F.cross_entropy(residual.flatten(0, 1), codes[:, 1:].flatten())),
            "residual_accuracy": _share(residual.argmax(-1) == codes[:, 1:]),
            "cycles_accuracy": _share(residual[:, NUM_CODE_GROUPS - 2].argmax(-1) == codes[:, -1]),
            "pointer_accuracy": pointer_accuracy(trunk.tapped, batch.spoken, LEAD_FRAMES),
        }

    def _generated(self, prefix_P: Sequence[int]) -> dict[str, float]:
        held_out = self._held_out[:NUM_SPOKEN]
        teacher_lengths = np.array([LEAD_FRAMES + len(each.codes) for each in held_out])
        texts, voices = [each.text for each in held_out], [each.voice for each in held_out]
        generated = speak(
            self._lean,
            self._table.to(torch.get_default_device()),
            texts,
            voices,
            prefix_P,
            int(LONGEST * teacher_lengths.max()),
        )
        lengths = np.array([len(each.codes) for each in generated])
        ended = np.array([each.ended for each in generated]) & (
            lengths <= LONGEST * teacher_lengths
        )
        return {
            "ended": float(ended.mean()),
            "length_ratio": float((lengths / teacher_lengths).mean()),
        }


def _share(right: Tensor) -> float:
    return float(right.float().mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenCodes:
    """Generated codes [T, Q] of a text, with the silent lead. `ended`: False if generation stopped
    at the length limit.
    """

    codes: NDArray[np.int64]
    ended: bool


@torch.no_grad()
def speak(
    lean: Lean,
    table_VH: Tensor,
    texts: Sequence[str],
    voices: Sequence[str],
    prefix_P: Sequence[int],
    max_frames: int,
) -> list[SpokenCodes]:
    """Generate the codes of each text with the Talker. `prefix_P`: ids before every text, as in
    `TalkerBatch.prefix_GP`; may be empty.
    """
    text_embeddings = lean.text_embeddings(table_VH)
    ids = torch.tensor([text_side(encode(text), FIRST_ROW + 1 + max_frames) for text in texts])
    rows_BLH = text_embeddings[ids]
    opening = rows_BLH[:, : FIRST_ROW + 1].clone()
    opening[:, CODEC_ROW:] += lean.control_embeddings(
        torch.tensor([controls(voice) for voice in voices])
    )
    past = _prefix_rows(lean, text_embeddings, prefix_P, len(texts))
    trunk = lean.trunk(opening, past)
    frames: list[Tensor] = []
    ended_B = torch.zeros(len(texts), dtype=torch.bool)
    lengths_B = torch.full((len(texts),), max_frames)
    for frame in range(max_frames):
        codes_BQ, is_end_B = _frame(lean, trunk)
        lengths_B[is_end_B & ~ended_B] = frame
        ended_B |= is_end_B
        if bool(ended_B.all()):
            break
        frames.append(codes_BQ)
        row_B1H = lean.code_embeddings(codes_BQ[:, None]) + rows_BLH[:, FIRST_ROW + 1 + frame, None]
        trunk = lean.trunk(row_B1H, trunk.past)
    codes = (
        torch.stack(frames, 1).cpu().numpy()
        if frames
        else np.zeros((len(texts), 0, NUM_CODE_GROUPS), np.int64)
    )
    return [
        SpokenCodes(codes=each[:length], ended=ended)
        for each, length, ended in zip(codes, lengths_B.tolist(), ended_B.tolist(), strict=True)
    ]


def _prefix_rows(
    lean: Lean, text_embeddings: Tensor, prefix_P: Sequence[int], times: int
) -> Past | None:
    if not prefix_P:
        return None
    return lean.trunk(text_embeddings[torch.tensor([list(prefix_P)])]).past.repeated(times)


def _frame(lean: Lean, trunk: Trunk) -> tuple[Tensor, Tensor]:
    """Return the codes of the next frame of each sequence, and True where the first code is the end
    (the frame's other codes are then undefined).
    """
    hidden_BH = trunk.hidden_BLH[:, -1]
    first_B = lean.first_logits(hidden_BH).argmax(-1)
    is_end_B = first_B == END
    codes = [first_B.masked_fill(is_end_B, 0)]
    for _ in range(NUM_CODE_GROUPS - 1):
        codes.append(lean.residual_logits(hidden_BH, torch.stack(codes, 1))[-1].argmax(-1))
    return torch.stack(codes, 1), is_end_B
