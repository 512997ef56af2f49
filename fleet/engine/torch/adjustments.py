"""Sampling settings that few requests have, about single tokens: biases, allowed tokens, words and
stop tokens that may not follow, and the request for log probabilities. A request without them has
no `Adjustments`.

Order as in vllm 0.32, v1/sample/sampler.py: allowed ids, bad words, biases, then the penalties of
every request. Knows no rule for an answer and no other row. Legend: V vocabulary.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from fleet.core.errors import BadInput
from fleet.core.request import Sampling


class RowAdjustment(msgspec.Struct, frozen=True, kw_only=True):
    """Adjustment of one row. `refused`: ids that may not be sampled at this place of the answer."""

    sampling: Sampling
    refused: tuple[int, ...] = ()

    def apply(self, logits_V: Tensor) -> None:
        """Apply the adjustment to a row's logits in place."""
        sampling = self.sampling
        if sampling.allowed_token_ids:
            ids = _index(sampling.allowed_token_ids, logits_V)
            kept = logits_V[ids]
            logits_V.fill_(-torch.inf)
            logits_V[ids] = kept
        if self.refused:
            logits_V[_index(self.refused, logits_V)] = -torch.inf
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            added = torch.tensor(biases, dtype=logits_V.dtype, device=logits_V.device)
            logits_V[_index(ids, logits_V)] += added


class Adjustments:
    """Adjustments of the rows of one answer."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._num_context = max((len(word) for word in sampling.bad_words), default=1) - 1

    @staticmethod
    def of(sampling: Sampling) -> "Adjustments | None":
        """Return the adjustments of a request's sampling; None if it has none."""
        return None if sampling.is_plain else Adjustments(sampling)

    def row(self, ids: Sequence[int], drafts: Sequence[int] = ()) -> RowAdjustment:
        """Return the adjustment of the token that follows the answer's `ids` and `drafts`."""
        return RowAdjustment(sampling=self._sampling, refused=self._refused(ids, drafts))

    def check(self, ids: Sequence[int], token: int) -> BadInput | None:
        """Return an error if a sampled token may not follow the answer's `ids`, which means that no
        permitted token was left; None if the token may follow.
        """
        allowed = self._sampling.allowed_token_ids
        if token not in self._refused(ids, ()) and (not allowed or token in allowed):
            return None
        where = "allowed_token_ids" if allowed else "bad_words"
        return BadInput(f"{where}: no token is left to continue the answer with", param=where)

    def _refused(self, ids: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
        sampling, num = self._sampling, self._num_context
        context = (*ids[max(0, len(ids) - num) :], *drafts)
        words = {
            word[-1]
            for word in sampling.bad_words
            if len(word) - 1 <= len(context)
            and word[:-1] == context[len(context) - len(word) + 1 :]
        }
        if len(ids) + len(drafts) < sampling.min_tokens:
            words.update(sampling.stop_token_ids)
        return tuple(sorted(words))


def _index(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, device=like.device)
