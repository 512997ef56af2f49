"""Greedy generation of codes by the Talker, in batches, to measure during training whether its
speech ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.lab.pocket.corpus import encode
from fleet.lab.pocket.shape import NUM_CODE_GROUPS
from fleet.lab.pocket.train.talker_batch import CODEC_ROW, END, FIRST_ROW, controls, text_side
from fleet.lab.pocket.train.talker_forward import Lean, Past, Trunk


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenCodes:
    """Generated codes [T, Q] with the silent lead. `ended`: False if the limit ended them."""

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
    """Generate the codes of each text after the same prefix (ids as in `TalkerBatch.prefix_GP`, may
    be empty).
    """
    text_rows = lean.text_rows(table_VH)
    ids = torch.tensor([text_side(encode(text), FIRST_ROW + 1 + max_frames) for text in texts])
    rows_BLH = text_rows[ids]
    opening = rows_BLH[:, : FIRST_ROW + 1].clone()
    opening[:, CODEC_ROW:] += lean.control_rows(torch.tensor([controls(voice) for voice in voices]))
    past = _prefix_rows(lean, text_rows, prefix_P, len(texts))
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
        row_B1H = lean.code_rows(codes_BQ[:, None]) + rows_BLH[:, FIRST_ROW + 1 + frame, None]
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


def _prefix_rows(lean: Lean, text_rows: Tensor, prefix_P: Sequence[int], times: int) -> Past | None:
    if not prefix_P:
        return None
    return lean.trunk(text_rows[torch.tensor([list(prefix_P)])]).past.repeated(times)


def _frame(lean: Lean, trunk: Trunk) -> tuple[Tensor, Tensor]:
    """Return the codes of one frame, and True where its first code is the end (its other codes are
    undefined).
    """
    hidden_BH = trunk.hidden_BLH[:, -1]
    first_B = lean.first_logits(hidden_BH).argmax(-1)
    is_end_B = first_B == END
    codes = [first_B.masked_fill(is_end_B, 0)]
    for _ in range(NUM_CODE_GROUPS - 1):
        codes.append(lean.residual_logits(hidden_BH, torch.stack(codes, 1))[-1].argmax(-1))
    return torch.stack(codes, 1), is_end_B
