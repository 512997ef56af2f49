"""Pointer supervision of the Talker: two attention heads of a middle layer are trained to attend to
the symbols being spoken.

Used in training only. Legend as in `talker_forward`; F is the positions that predict a frame or the
end, S the symbols of the text side.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.lab.pocket.shape import HIDDEN, VOCAB_SIZE
from fleet.lab.pocket.train.talker_forward import Tapped

NUM_LAGS, FIRST_LAG = 48, -12
LOOKS_AHEAD = ((0, 1), (2, 3))
"""Symbols to which each supervised head attends, as offsets from the symbol being spoken."""
NEAR = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerTargets:
    """Targets of the pointer supervision: for each position, the symbol that is spoken in the frame
    that the position predicts. The F positions are counted from `first_row`.

    `symbol_BF`: index of that symbol in the text; the text's length after the last word.
    `is_real_BF`: False for padding. `num_symbols_B`: the text's length in symbols. `ids_BF`: id
    that the text side feeds in at each position: the text's symbols, an end symbol, padding.
    `first_row`: position in the whole input at which the text's first symbol is fed in and the
    first frame is predicted.
    """

    symbol_BF: Tensor
    is_real_BF: Tensor
    num_symbols_B: Tensor
    ids_BF: Tensor
    first_row: int

    def fed(self, ahead: int) -> Tensor:
        """Return the index [B, F] of the symbol `ahead` places after the spoken one, limited to
        symbols already input and to the text's end.
        """
        length = self.symbol_BF.shape[1]
        return (
            (self.symbol_BF + ahead)
            .minimum(self.num_symbols_B[:, None])
            .minimum(torch.arange(length))
        )


class PointerHeads(nn.Module):
    """Auxiliary linear layers of the pointer supervision. Predicting the lead of the text and the
    spoken symbols from hidden states helps the attention heads to find these symbols.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lag = nn.Linear(HIDDEN, NUM_LAGS)
        self.symbols = nn.Linear(HIDDEN, 2 * VOCAB_SIZE)

    def forward(self, tapped: Tapped, spoken: PointerTargets) -> dict[str, Tensor]:
        """Return the three losses of the pointer supervision by name: `lag` (lead of the text),
        `symbol` (spoken symbols) and `pointer` (attention).
        """
        real = spoken.is_real_BF
        ahead = torch.arange(real.shape[1]) - spoken.symbol_BF - FIRST_LAG
        lag = self.lag(tapped.into_BLH[:, spoken.first_row :])[real]
        symbols = self.symbols(tapped.out_BLH[:, spoken.first_row :])[real].chunk(2, -1)
        targets = [spoken.ids_BF.gather(1, spoken.fed(offset))[real] for offset in LOOKS_AHEAD[0]]
        symbol_losses = [
            F.cross_entropy(logits, target) for logits, target in zip(symbols, targets, strict=True)
        ]
        return {
            "lag": F.cross_entropy(lag, ahead.clamp(0, NUM_LAGS - 1)[real]),
            "symbol": torch.stack(symbol_losses).mean(),
            "pointer": -torch.stack([mass[real].mean() for mass in _masses(tapped, spoken)]).mean(),
        }


def _masses(tapped: Tapped, spoken: PointerTargets) -> list[Tensor]:
    """Return for each supervised head the log attention [B, F] on its two symbols, which coincide
    near the end of the input.
    """
    scores_BhFK, first_key = _scores(tapped, spoken)
    masses: list[Tensor] = []
    for head, (near, far) in enumerate(LOOKS_AHEAD):
        first, second = spoken.fed(near), spoken.fed(far)
        on_first, on_second = (
            scores_BhFK[:, head].gather(2, (first_key + symbol)[..., None])[..., 0]
            for symbol in (first, second)
        )
        masses.append(torch.where(first == second, on_first, torch.logaddexp(on_first, on_second)))
    return masses


def pointer_accuracy(tapped: Tapped, spoken: PointerTargets, first_frame: int) -> float:
    """Return the share of frames, from `first_frame` on, at which the maximum of the first head's
    attention is within one symbol of the right one.
    """
    scores_BhFK, first_key = _scores(tapped, spoken)
    is_near = (scores_BhFK[:, 0].argmax(-1) - first_key - spoken.fed(0)).abs() <= NEAR
    return float(is_near[:, first_frame:][spoken.is_real_BF[:, first_frame:]].float().mean())


def _scores(tapped: Tapped, spoken: PointerTargets) -> tuple[Tensor, int]:
    """Return the attention scores of the predicting positions, and the key index of symbol 0: keys
    of earlier positions come first.
    """
    num_before = tapped.scores_BhLK.shape[-1] - tapped.scores_BhLK.shape[-2]
    return tapped.scores_BhLK[:, :, spoken.first_row :], num_before + spoken.first_row
