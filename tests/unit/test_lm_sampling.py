"""Token sampling: logits processors equal the ones of `transformers`, and noise is a pure function
of its key.
"""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.core.request import Sampling
from fleet.engine.torch import sampling
from fleet.engine.torch.noise import gumbel, noise_key
from fleet.engine.torch.sampling import RowSampling, TokenCounts, draw, keep_likely, keep_top

CPU = torch.device("cpu")


def processor(name: str, *arguments: Any) -> Any:
    return getattr(import_module("transformers"), name)(*arguments)


def logits(rows: int = 4, vocabulary: int = 97, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (50, 0.8), (1, 0.1), (500, 0.3)]
)
def test_top_k_and_top_p_cut_matches_transformers(top_k: int, top_p: float) -> None:
    scores = logits()
    want = scores
    if top_k:
        want = processor("TopKLogitsWarper", top_k)(None, want)
    if top_p < 1:
        want = processor("TopPLogitsWarper", top_p)(None, want)
    assert torch.equal(keep_top(scores, [top_k] * 4, [top_p] * 4), want)


@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.1), (0.8, 0.3), (0.3, 0.01), (1.0, 1.0)])
def test_min_p_cut_after_top_p_matches_transformers(top_p: float, min_p: float) -> None:
    scores = logits()
    kept = processor("TopPLogitsWarper", top_p)(None, scores)
    want = processor("MinPLogitsWarper", min_p)(None, kept)
    made = keep_likely(keep_top(scores, [0] * 4, [top_p] * 4), [min_p, 0.0, min_p, min_p])
    assert torch.equal(made[[0, 2, 3]], want[[0, 2, 3]]) and torch.equal(made[1], kept[1])


def test_each_row_has_its_own_cut() -> None:
    scores = logits()
    mixed = keep_top(scores, [0, 5, 50, 5], [1.0, 1.0, 0.8, 0.5])
    for row, (top_k, top_p) in enumerate(((0, 1.0), (5, 1.0), (50, 0.8), (5, 0.5))):
        assert torch.equal(mixed[row : row + 1], keep_top(scores[row : row + 1], [top_k], [top_p]))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_cuts_a_large_vocabulary_alike_sorted_in_part_or_whole(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows from peaked, of which few ids are left, to flat, of which most are."""
    scores = logits(5, 6000) * torch.tensor([3.0, 1.0, 0.3, 0.1, 0.0])[:, None]
    alone = [keep_top(scores[row : row + 1], [0], [top_p]) for row in range(5)]
    assert torch.equal(keep_top(scores, [0] * 5, [top_p] * 5), torch.cat(alone))
    monkeypatch.setattr(sampling, "FEW_BEST", 6000)
    assert torch.equal(keep_top(scores, [0] * 5, [top_p] * 5), torch.cat(alone))
    kept = torch.cat(alone).isfinite()
    shares = scores.double().softmax(-1)
    assert torch.all((shares * kept).sum(-1) >= top_p - 1e-9)
    highest_cut = scores.masked_fill(kept, -torch.inf).amax(-1)
    lowest_kept = scores.masked_fill(~kept, torch.inf).amin(-1)
    assert torch.all(lowest_kept > highest_cut)
    without_lowest = shares * (scores > lowest_kept[:, None])
    assert torch.all(without_lowest.sum(-1) < top_p + 1e-9)


def test_penalties_apply_before_suppression_and_argmax() -> None:
    scores, seen = logits(rows=1), [3, 8, 41]
    counts = TokenCounts(seen)
    suppressed = torch.zeros(97)
    suppressed[int(scores[0].argmax())] = -torch.inf
    want = (
        processor("RepetitionPenaltyLogitsProcessor", 1.9)(torch.tensor([seen]), scores.clone())
        + suppressed
    )
    plan = RowSampling(sampling=Sampling(repetition_penalty=1.9), counts=counts)
    assert (
        draw(scores.clone(), [plan], suppressed_V=suppressed).tolist() == want.argmax(-1).tolist()
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_not_drawn_by_their_row_only(temperature: float) -> None:
    scores = torch.zeros(2, 8)
    scores[:, 3] = 50.0
    sampling = Sampling(temperature=temperature, top_k=2, top_p=0.9)
    plans = [
        RowSampling(sampling=sampling, banned=frozenset([3]), noise_key=n) for n in range(1)
    ] + [RowSampling(sampling=sampling)]
    banned, free = draw(scores, plans).tolist()
    assert banned != 3 and free == 3


def test_frequency_penalty_counts_each_occurrence_and_presence_penalty_one() -> None:
    counts = TokenCounts()
    for token in (1, 1, 1, 2):
        counts.add(token)
    scores = torch.tensor([[0.0, 3.0, 1.5, 0.9]])
    assert draw(
        scores.clone(), [RowSampling(sampling=Sampling(frequency_penalty=0.5), counts=counts)]
    ).tolist() == [1]
    assert draw(
        scores.clone(), [RowSampling(sampling=Sampling(frequency_penalty=0.8), counts=counts)]
    ).tolist() == [3]
    assert draw(
        scores.clone(), [RowSampling(sampling=Sampling(presence_penalty=2.0), counts=counts)]
    ).tolist() == [1]


def test_ties_go_to_the_lowest_id_and_nan_is_reported() -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0], [1.0, torch.nan, 2.0], [1.0, torch.inf, 0.0]])
    assert draw(scores, [RowSampling(sampling=Sampling())] * 3).tolist() == [1, -1, -1]


def test_draw_of_a_row_is_independent_of_other_rows() -> None:
    scores = logits(rows=6)
    plans = [
        RowSampling(
            sampling=Sampling(
                temperature=0.0 if n == 2 else 0.5 + n, top_k=n * 7, top_p=0.7 + 0.05 * n
            ),
            noise_key=n,
        )
        for n in range(6)
    ]
    together = draw(scores.clone(), plans, one_by_one=True).tolist()
    assert together == [
        draw(scores[n : n + 1].clone(), [plans[n]], one_by_one=True).item() for n in range(6)
    ]
    assert together[2] == scores[2].argmax().item()


def test_sample_frequencies_match_probabilities() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    num_draws = 20_000
    keys = [noise_key(5, 1, 0, index) for index in range(num_draws)]
    drawn = (scores + gumbel(keys, 4, CPU)).argmax(-1)
    shares = np.bincount(drawn.numpy(), minlength=4) / num_draws
    assert np.abs(shares - scores[0].softmax(-1).numpy()).max() < 0.01


def test_noise_is_independent_over_tokens_and_draws() -> None:
    made = gumbel([noise_key(1, 2, 3, index) for index in range(200)], 200, CPU).double().numpy()
    assert abs(made.mean() - 0.5772) < 0.03
    assert abs(made.var() - np.pi**2 / 6) < 0.06
    assert np.abs(np.corrcoef(made)[np.triu_indices(200, 1)]).mean() < 0.08
    assert np.abs(np.corrcoef(made.T)[np.triu_indices(200, 1)]).mean() < 0.08


def test_noise_depends_on_every_part_of_its_key_only() -> None:
    parts = (7, 8, 9, 10)
    keys = {noise_key(*parts)} | {
        noise_key(*(p + (n == m) for m, p in enumerate(parts))) for n in range(4)
    }
    assert len(keys) == 5
    assert noise_key(-1, 0, 0, 0) != noise_key(1, 0, 0, 0)
    alone = gumbel([noise_key(*parts)], 33, CPU)
    among = gumbel([1, noise_key(*parts), 2], 33, CPU)
    assert torch.equal(alone[0], among[1])
    assert torch.equal(alone[0], gumbel([noise_key(*parts)], 64, CPU)[0, :33])
