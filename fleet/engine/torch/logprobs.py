"""Log probabilities of sampled tokens, for the requests that ask for them: the model's own, before
biases, penalties, temperature, rules and cuts (vllm 0.32, `logprobs_mode: raw_logprobs`).

Legend: A rows that ask, K alternatives, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.engine.base import Arrays
from fleet.engine.torch.sampling import RowSampling


class RawLogits:
    """Copy of the logits of the rows that ask, made before sampling changes the logits.

    `wanted`: number of alternatives by row. `named`: ids that are the alternatives of a row, in
    place of the most likely ones. `one_by_one`: True to compute each row by itself, so
    that no other row changes its last bits.
    """

    def __init__(
        self,
        logits_SV: Tensor,
        wanted: Mapping[int, int],
        *,
        named: Mapping[int, Sequence[int]] | None = None,
        one_by_one: bool,
    ) -> None:
        self._wanted = wanted
        self._named = named or {}
        index = torch.tensor(list(wanted), device=logits_SV.device)
        self._logits_AV = logits_SV.index_select(0, index).float()
        self._one_by_one = one_by_one

    @staticmethod
    def of(
        logits_SV: Tensor, draws: Sequence[RowSampling], *, one_by_one: bool
    ) -> "RawLogits | None":
        """Return the logits of the rows that ask for log probabilities; None if no row does."""
        wanted = {
            row: num
            for row, plan in enumerate(draws)
            if plan.adjustment is not None
            and (num := plan.adjustment.sampling.top_logprobs) is not None
        }
        named = {
            row: ids
            for row in wanted
            if (plan := draws[row].adjustment) is not None and (ids := plan.sampling.logprob_ids)
        }
        return RawLogits(logits_SV, wanted, named=named, one_by_one=one_by_one) if wanted else None

    def of_tokens(self, tokens: Sequence[int]) -> dict[int, Arrays]:
        """Return the output arrays of each row that asks, by row: `logprobs` float32 [1, 1 + K],
        the log probabilities of the sampled token and of the K alternatives; `top_ids` int32 [1,
        K], the ids of the alternatives.

        `tokens`: sampled token of each row; a negative token (the row's logits were not finite)
        counts as 0.
        """
        num_top = list(self._wanted.values())
        chosen_A1 = torch.tensor(
            [[max(0, tokens[row])] for row in self._wanted], device=self._logits_AV.device
        )
        size = 1 if self._one_by_one else len(num_top)
        arrays: list[Arrays] = []
        for first in range(0, len(num_top), size):
            own = slice(first, first + size)
            arrays += _arrays(self._logits_AV[own], chosen_A1[own], num_top[own])
        made = dict(zip(self._wanted, arrays, strict=True))
        for number, row in enumerate(self._wanted):
            if ids := self._named.get(row):
                made[row] = _named_arrays(self._logits_AV[number], tokens[row], ids)
        return made


def _named_arrays(logits_V: Tensor, token: int, ids: Sequence[int]) -> Arrays:
    index = torch.tensor([max(0, token), *ids], device=logits_V.device)
    logprobs = logits_V.log_softmax(-1)[index].cpu().numpy()
    return {LOGPROBS: logprobs[None], TOP_IDS: np.array([ids], np.int32)}


def _arrays(logits_AV: Tensor, chosen_A1: Tensor, num_top: Sequence[int]) -> list[Arrays]:
    log_AV = logits_AV.log_softmax(-1)
    best = log_AV.topk(max(num_top), -1)
    logprobs = torch.cat([log_AV.gather(-1, chosen_A1), best.values], -1).cpu().numpy()
    top_ids = best.indices.cpu().numpy().astype(np.int32)
    return [
        {LOGPROBS: logprobs[row : row + 1, : 1 + num], TOP_IDS: top_ids[row : row + 1, :num]}
        for row, num in enumerate(num_top)
    ]
