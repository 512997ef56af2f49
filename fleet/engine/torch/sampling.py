"""From logits to token ids: biases, penalties, suppression, temperature, top-k, top-p, min-p, in
`transformers`' order. Knows no request.

Source: transformers 5.23, generation/utils.py `_get_logits_processor`. Logits are float32; ties go
to the lowest id.
Legend: S rows (one sampled token each), V vocabulary.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.request import Sampling
from fleet.engine.torch.adjustments import RowAdjustment
from fleet.engine.torch.noise import gumbel

UNSEEN = -1
SHARE_UNITS = float(1 << 44)
"""Count of the likeliest token's probability, by which top-p adds probabilities. Counts of 2**18
tokens have at most 63 bits together.
"""
FEW_BEST = 1024
"""Number of ids that are sorted first to find what top-p leaves of a vocabulary."""
MAX_COUNT = 32767


class TokenCounts:
    """Counts of token ids for penalties: `seen` for repetition (may include the prompt), `drawn`
    (times sampled) for frequency and presence.
    """

    def __init__(self, seen: Sequence[int] = ()) -> None:
        self.seen = set(seen)
        self.drawn: dict[int, int] = {}
        self._dense: NDArray[np.int16] | None = None

    def add(self, token: int) -> None:
        self.seen.add(token)
        self.drawn[token] = self.drawn.get(token, 0) + 1
        if self._dense is not None:
            self._dense[token] = min(self.drawn[token], MAX_COUNT)

    def followed_by(self, tokens: Sequence[int]) -> "TokenCounts":
        """Return the counts as they will be once these tokens are sampled next; this object stays
        unchanged.
        """
        counts = TokenCounts()
        counts.seen, counts.drawn = set(self.seen), dict(self.drawn)
        for token in tokens:
            counts.add(token)
        return counts

    def dense(self, num_tokens: int) -> NDArray[np.int16]:
        """Return how often each token id was sampled, with `UNSEEN` for ids that no penalty applies
        to: [V]. The array is shared: `add` updates it.
        """
        if self._dense is None:
            self._dense = np.full(num_tokens, UNSEEN, np.int16)
            self._dense[list(self.seen)] = 0
            for token, count in self.drawn.items():
                self._dense[token] = min(count, MAX_COUNT)
        return self._dense


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one row (one token to be sampled). `noise_key` is used only if
    `temperature` > 0. `banned`: token ids that must not be sampled. `allowed`: bool [V], the only
    ids that may be sampled; None for all. `adjustment`: settings about single tokens, if the
    request has any.
    """

    sampling: Sampling
    noise_key: int = 0
    counts: TokenCounts | None = None
    banned: frozenset[int] = frozenset()
    allowed: NDArray[np.bool_] | None = None
    adjustment: RowAdjustment | None = None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature <= 0

    @property
    def penalised(self) -> bool:
        sampling = self.sampling
        return sampling.repetition_penalty != 1.0 or bool(
            sampling.frequency_penalty or sampling.presence_penalty
        )


def banned_ids(
    sampling: Sampling, number: int, end_ids: frozenset[int], allowed: NDArray[np.bool_] | None
) -> frozenset[int]:
    """Return the end tokens if they must not be sampled as token `number` (from 0) of an answer; an
    empty set if the answer may end there, or if its rule allows only end tokens.
    """
    if sampling.may_end(number) or (allowed is not None and _are_all_in(allowed, end_ids)):
        return frozenset()
    return end_ids


def _are_all_in(allowed: NDArray[np.bool_], ids: frozenset[int]) -> bool:
    """Return True if every allowed id is one of `ids`; a set of all that a rule allows would cost
    more than the sampling.
    """
    return np.count_nonzero(allowed) == sum(bool(allowed[number]) for number in ids)


def draw(
    logits_SV: Tensor,
    draws: Sequence[RowSampling],
    *,
    suppressed_V: Tensor | None = None,
    one_by_one: bool = False,
) -> Tensor:
    """Sample one token id per row (int64 [S]); -1 if the row's logits are not finite. May overwrite
    the logits.

    `suppressed_V` is -inf at ids that are never sampled, else 0. If `one_by_one` is True, a row's
    result is independent of other rows' settings, to the last bit.
    """
    logits_SV = logits_SV.float()
    highest = logits_SV.amax(-1)
    tokens = adjusted(logits_SV, draws, suppressed_V=suppressed_V, one_by_one=one_by_one).argmax(-1)
    return torch.where(highest.isfinite(), tokens, -1)


def adjusted(
    logits_SV: Tensor,
    draws: Sequence[RowSampling],
    *,
    suppressed_V: Tensor | None = None,
    one_by_one: bool = False,
) -> Tensor:
    """Return float32 logits with biases, penalties, cuts and noise, whose argmax is the sampled
    token. May overwrite the logits.
    """
    for row, plan in enumerate(draws):
        if plan.adjustment is not None:
            plan.adjustment.apply(logits_SV[row])
        if plan.penalised:
            _penalise(logits_SV[row], plan)
    banned = [(row, token) for row, plan in enumerate(draws) for token in plan.banned]
    if banned:
        rows, tokens = zip(*banned, strict=True)
        logits_SV[_index(rows, logits_SV), _index(tokens, logits_SV)] = -torch.inf
    for row, plan in enumerate(draws):
        if plan.allowed is not None:
            refused_V = torch.from_numpy(~plan.allowed).to(logits_SV.device)
            logits_SV[row].masked_fill_(refused_V, -torch.inf)
    if suppressed_V is not None:
        logits_SV = logits_SV + suppressed_V
    sampled = [row for row, plan in enumerate(draws) if not plan.greedy]
    if sampled:
        rows = logits_SV if len(sampled) == len(logits_SV) else logits_SV[sampled]
        plans = [draws[row] for row in sampled]
        if one_by_one:
            rows = torch.cat([_noisy(rows[at : at + 1], [plan]) for at, plan in enumerate(plans)])
        else:
            rows = _noisy(rows, plans)
        logits_SV = (
            rows
            if len(sampled) == len(logits_SV)
            else logits_SV.index_copy(0, _index(sampled, rows), rows)
        )
    return logits_SV


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


def _penalise(logits_V: Tensor, plan: RowSampling) -> None:
    """Apply one row's penalties to its logits in place."""
    sampling, counts = plan.sampling, plan.counts
    if counts is None:
        return
    if sampling.repetition_penalty != 1.0 and counts.seen:
        ids = torch.tensor(sorted(counts.seen), device=logits_V.device)
        picked = logits_V[ids]
        penalty = sampling.repetition_penalty
        logits_V[ids] = torch.where(picked < 0, picked * penalty, picked / penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and counts.drawn:
        ids = torch.tensor(list(counts.drawn), device=logits_V.device)
        times = torch.tensor(
            list(counts.drawn.values()), dtype=logits_V.dtype, device=logits_V.device
        )
        logits_V[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _noisy(logits_SV: Tensor, draws: Sequence[RowSampling]) -> Tensor:
    """Return logits with temperature, top-k, top-p and min-p cuts and noise applied, whose argmax
    is a sample.
    """
    temperatures = [plan.sampling.temperature for plan in draws]
    scaled_SV = logits_SV / torch.tensor(temperatures, device=logits_SV.device)[:, None]
    kept_SV = keep_top(
        scaled_SV, [plan.sampling.top_k for plan in draws], [plan.sampling.top_p for plan in draws]
    )
    min_p = [plan.sampling.min_p for plan in draws]
    if any(min_p):
        kept_SV = keep_likely(kept_SV, min_p)
    return kept_SV + gumbel(
        [plan.noise_key for plan in draws], logits_SV.shape[-1], logits_SV.device
    )


def keep_likely(scaled_SV: Tensor, min_p: Sequence[float]) -> Tensor:
    """Return the logits, with -inf for each id whose probability is below the row's share `min_p`
    of the highest probability; a share of 0 cuts nothing.
    """
    share_S1 = torch.tensor(min_p, dtype=scaled_SV.dtype, device=scaled_SV.device)[:, None]
    floor_S1 = scaled_SV.amax(-1, keepdim=True) + share_S1.log()
    return scaled_SV.masked_fill(scaled_SV < floor_S1, -torch.inf)


def keep_top(scaled_SV: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Return the logits, with -inf for each id below the row's top-k and top-p cut. Token ids that
    tie with the lowest one above the cut are kept.
    """
    if len(set(top_k)) == 1 and len(set(top_p)) == 1:
        return keep_top_alike(scaled_SV, top_k[0], top_p[0])
    rows = [
        keep_top_alike(row_1V, k, p)
        for row_1V, k, p in zip(scaled_SV.split(1), top_k, top_p, strict=True)
    ]
    return torch.cat(rows)


def keep_top_alike(scaled_SV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the logits, with -inf for each id below the top-k and top-p cut, with the same `top_k`
    and `top_p` in all rows. `top_k` 0 and `top_p` 1 cut nothing.
    """
    num_tokens = scaled_SV.shape[-1]
    limit = top_k if 0 < top_k < num_tokens else num_tokens
    if limit == num_tokens and top_p >= 1.0:
        return scaled_SV
    if top_p >= 1.0:
        floor_S1 = torch.topk(scaled_SV, limit, dim=-1).values[:, -1:]
    else:
        floor_S1 = _floor_of_top_p(scaled_SV, limit, top_p)
    return scaled_SV.masked_fill(scaled_SV < floor_S1, -torch.inf)


def _floor_of_top_p(scaled_SV: Tensor, limit: int, top_p: float) -> Tensor:
    """Return the lowest logit of each row that top-p leaves among its `limit` highest: [S, 1].

    Sorting a whole vocabulary takes most of a draw's time, and top-p mostly leaves few ids.
    """
    if FEW_BEST < limit == scaled_SV.shape[-1]:
        best_SF = torch.topk(scaled_SV, FEW_BEST, dim=-1).values
        total_S1 = _share_counts(scaled_SV, best_SF[:, :1]).sum(-1, keepdim=True)
        beyond_SF = beyond_top_p(best_SF, top_p, total_S1)
        if beyond_SF[:, -1].all():
            return best_SF.masked_fill(beyond_SF, torch.inf).amin(-1, keepdim=True)
    best_SK = torch.topk(scaled_SV, limit, dim=-1).values
    beyond_SK = beyond_top_p(best_SK, top_p)
    return best_SK.masked_fill(beyond_SK, torch.inf).amin(-1, keepdim=True)


def beyond_top_p(best_SK: Tensor, top_p: float | Tensor, total_S1: Tensor | None = None) -> Tensor:
    """Return which of a row's logits, in descending order, top-p cuts: those before which the
    others sum to a probability of at least `top_p`, and so never the first. `top_p`: one number, or
    one per row [S, 1]. `total_S1`: sum of `_share_counts` over all ids, by default over these.

    The counts are whole numbers, whose sum is the same in whatever order a device adds them, and
    for any number of rows.
    """
    counts_SK = _share_counts(best_SK, best_SK[:, :1])
    sums_SK = counts_SK.cumsum(-1)
    total_S1 = sums_SK[:, -1:] if total_S1 is None else total_S1
    return sums_SK - counts_SK >= total_S1.double() * top_p


def _share_counts(logits_SV: Tensor, highest_S1: Tensor) -> Tensor:
    """Return the probabilities of logits in `SHARE_UNITS` of the highest one's, as whole numbers; 0
    for -inf.
    """
    return ((logits_SV - highest_S1).exp() * SHARE_UNITS).long()
