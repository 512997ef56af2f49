"""Pointer supervision: two attention heads of a middle layer are taught to look at the symbols being spoken.

In training only: at inference nothing of it is left but what the heads have learnt. Legend as in `talker_forward`; F is the rows
that predict a frame or the end, S the symbols of the text side.
Knows nothing of codes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.pocket.shape import HIDDEN, VOCAB_SIZE
from fleet.pocket.train.talker_forward import Tapped

NUM_LAGS, FIRST_LAG = 48, -12
LOOKS_AHEAD = ((0, 1), (2, 3))
"""For each supervised head, the symbols it looks at, counted from the one being spoken."""
NEAR = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerTargets:
    """What each row is about to speak.

    Shapes: `symbol_BF` the index in the text of the symbol spoken in the frame to be predicted, the text's length at the end;
    `is_real_BF` False where there is no frame; `num_symbols_B` and `ids_BF`, the text side: symbol f is fed in row f.
    Units: `first_row` is the row that symbol 0 is fed in, and the first that predicts a frame.
    """

    symbol_BF: Tensor
    is_real_BF: Tensor
    num_symbols_B: Tensor
    ids_BF: Tensor
    first_row: int

    def fed(self, ahead: int) -> Tensor:
        """[B, F]: the index of the symbol so many ahead, or the last one that has been fed, the text's end included."""
        length = self.symbol_BF.shape[1]
        return (self.symbol_BF + ahead).minimum(self.num_symbols_B[:, None]).minimum(torch.arange(length))


class PointerHeads(nn.Module):
    """The linear readings that help the heads find their place: how far text is ahead, and which symbols are spoken."""

    def __init__(self) -> None:
        super().__init__()
        self.lag = nn.Linear(HIDDEN, NUM_LAGS)
        self.symbols = nn.Linear(HIDDEN, 2 * VOCAB_SIZE)

    def forward(self, tapped: Tapped, spoken: PointerTargets) -> dict[str, Tensor]:
        """The three losses: `lag`, `symbol` and `pointer`."""
        real = spoken.is_real_BF
        ahead = torch.arange(real.shape[1]) - spoken.symbol_BF - FIRST_LAG
        lag = self.lag(tapped.into_BLH[:, spoken.first_row :])[real]
        symbols = self.symbols(tapped.out_BLH[:, spoken.first_row :])[real].chunk(2, -1)
        targets = [spoken.ids_BF.gather(1, spoken.fed(offset))[real] for offset in LOOKS_AHEAD[0]]
        named = [F.cross_entropy(logits, target) for logits, target in zip(symbols, targets, strict=True)]
        return {
            "lag": F.cross_entropy(lag, ahead.clamp(0, NUM_LAGS - 1)[real]),
            "symbol": torch.stack(named).mean(),
            "pointer": -torch.stack([mass[real].mean() for mass in _masses(tapped, spoken)]).mean(),
        }


def _masses(tapped: Tapped, spoken: PointerTargets) -> list[Tensor]:
    """[B, F] a head: the log of the attention on its two symbols, which may be one where text is short."""
    scores_BhFK, first_key = _scores(tapped, spoken)
    masses: list[Tensor] = []
    for head, (near, far) in enumerate(LOOKS_AHEAD):
        first, second = spoken.fed(near), spoken.fed(far)
        on_first, on_second = (
            scores_BhFK[:, head].gather(2, (first_key + symbol)[..., None])[..., 0] for symbol in (first, second)
        )
        masses.append(torch.where(first == second, on_first, torch.logaddexp(on_first, on_second)))
    return masses


def pointer_accuracy(tapped: Tapped, spoken: PointerTargets, first_frame: int) -> float:
    """How often the first head looks hardest within a symbol of the truth, from a frame on."""
    scores_BhFK, first_key = _scores(tapped, spoken)
    is_near = (scores_BhFK[:, 0].argmax(-1) - first_key - spoken.fed(0)).abs() <= NEAR
    return float(is_near[:, first_frame:][spoken.is_real_BF[:, first_frame:]].float().mean())


def _scores(tapped: Tapped, spoken: PointerTargets) -> tuple[Tensor, int]:
    """Those of the rows that predict, and the key of symbol 0: keys end with the rows, whatever came before them."""
    num_before = tapped.scores_BhLK.shape[-1] - tapped.scores_BhLK.shape[-2]
    return tapped.scores_BhLK[:, :, spoken.first_row :], num_before + spoken.first_row
