"""Sampling in a decode step by tensors equals the slow twin's, in rows with equal and with
different parameters.
"""

from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.core.request import Sampling
from fleet.engine.torch.graph_runner import buckets_up_to
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.noise import gumbel, gumbel_of_halves, noise_key, noise_keys
from fleet.engine.torch.sampling import UNSEEN, RowSampling, TokenCounts, draw, keep_top
from fleet.engine.torch.sampling_rows import draw_rows, keep_top_rows
from fleet.engine.torch.step_inputs import StepBuffers, StepShape

NUM_IDS, HIDDEN, SALT = 97, 4, 11
ENDS = frozenset([3, 5])
CPU = torch.device("cpu")
NOTHING = torch.zeros(NUM_IDS, dtype=torch.bool)
ENDS_V = torch.tensor([token in ENDS for token in range(NUM_IDS)])


def make_buffers(num_rows: int) -> tuple[KVPool, StepBuffers]:
    pool = KVPool(
        KVShape(num_layers=1, num_kv_heads=1, head_dim=1),
        num_pages=32,
        page_size=4,
        dtype=torch.float32,
        device=CPU,
    )
    shape = StepShape(hidden_size=HIDDEN, num_codes=2, num_ids=NUM_IDS, salt=SALT)
    return pool, StepBuffers(shape, pool, num_rows, pool.num_pages)


def extents_of(pool: KVPool, starts: list[int]) -> list[Extent]:
    tables = [pool.open_table() for _ in starts]
    for table, start in zip(tables, starts, strict=True):
        assert pool.grow(table, start + 1)
    return [
        Extent(table=table, start=start, stop=start + 1)
        for table, start in zip(tables, starts, strict=True)
    ]


def logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, NUM_IDS, generator=torch.Generator().manual_seed(seed)) * 3


def plan(sampling: Sampling, index: int, counts: TokenCounts | None = None) -> RowSampling:
    banned = frozenset[int]() if sampling.may_end(index) else ENDS
    key = noise_key(sampling.seed, SALT, 0, index)
    return RowSampling(
        sampling=sampling, noise_key=key, counts=counts or TokenCounts(), banned=banned
    )


def drawn_as_twin(plans: list[RowSampling], num_rows: int, scores: Tensor) -> None:
    """Sample one token per plan by tensors, in a batch padded to `num_rows` rows, and compare the
    tokens with the slow twin's.
    """
    pool, buffers = make_buffers(num_rows)
    used = len(plans)
    buffers.fill(torch.zeros(used, HIDDEN), extents_of(pool, [0] * used), plans, list(range(used)))
    padded = torch.cat([scores, torch.zeros(num_rows - used, NUM_IDS)])
    never_V = torch.arange(NUM_IDS) > 90
    made = draw_rows(padded, buffers.inputs.draws, never_V=never_V, ends_V=ENDS_V)
    suppressed_V = torch.zeros(NUM_IDS).masked_fill(never_V, -torch.inf)
    assert made[:used].tolist() == draw(scores.clone(), plans, suppressed_V=suppressed_V).tolist()


def mixed_plans() -> list[RowSampling]:
    counts = TokenCounts([1, 2, 3])
    for token in (2, 2, 40, 41):
        counts.add(token)
    every = [
        Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition,
            seed=7 - 3 * seed,
        )
        for seed, (temperature, top_k, top_p, repetition) in enumerate(
            product((0.0, 0.8), (0, 5), (1.0, 0.7), (1.0, 1.4))
        )
    ]
    every += [
        Sampling(frequency_penalty=0.7, presence_penalty=0.4),
        Sampling(temperature=1.0, min_tokens=99),
        Sampling(ignore_eos=True),
    ]
    plans = [plan(sampling, index, counts) for index, sampling in enumerate([*every, *every[::2]])]
    rules = np.random.default_rng(0).random((len(plans), NUM_IDS)) < 0.2
    return [
        msgspec.structs.replace(one, allowed=rule) if index >= len(every) else one
        for index, (one, rule) in enumerate(zip(plans, rules, strict=True))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_draws_of_mixed_parameters_equal_the_twins(seed: int) -> None:
    plans = mixed_plans()
    drawn_as_twin(plans, 32, logits(len(plans), seed))


def test_draw_of_a_padded_step_leaves_no_trace_in_the_next_one() -> None:
    pool, buffers = make_buffers(4)
    counts = TokenCounts([int(logits(1).argmax())])
    penalised = plan(Sampling(repetition_penalty=9.0, temperature=1.0, top_k=1), 0, counts)
    buffers.fill(
        torch.full((3, HIDDEN), torch.nan), extents_of(pool, [2, 5, 9]), [penalised] * 3, [4, 5, 6]
    )
    greedy = plan(Sampling(), 0)
    ruled = msgspec.structs.replace(greedy, allowed=np.arange(NUM_IDS) == 7)
    buffers.fill(torch.ones(2, HIDDEN), extents_of(pool, [1, 1]), [ruled] * 2, [0, 0])
    scores = logits(1).expand(4, -1)
    drawn = draw_rows(scores, buffers.inputs.draws, never_V=NOTHING, ends_V=NOTHING).tolist()
    assert drawn == [7, 7, *[int(scores[0].argmax())] * 2]
    buffers.fill(torch.ones(1, HIDDEN), extents_of(pool, [1]), [greedy], [0])
    inputs = buffers.inputs
    assert (
        draw_rows(scores, inputs.draws, never_V=NOTHING, ends_V=NOTHING).tolist()
        == [int(scores[0].argmax())] * 4
    )
    assert inputs.rows_BH.tolist() == [[1.0] * HIDDEN] + [[0.0] * HIDDEN] * 3
    scratch = pool.scratch_page
    assert inputs.slots_B[1:].tolist() == [scratch * pool.page_size] * 3
    assert inputs.pages_BP[1:].unique().tolist() == [scratch]
    assert inputs.positions_B.tolist() == [1, 0, 0, 0]


def test_step_reads_each_requests_own_pages_and_slot() -> None:
    pool, buffers = make_buffers(2)
    extents = extents_of(pool, [6, 3])
    buffers.fill(torch.zeros(2, HIDDEN), extents, [plan(Sampling(), 0)] * 2, [0, 0])
    first, second = (extent.table.pages for extent in extents)
    assert buffers.inputs.slots_B.tolist() == [first[1] * 4 + 2, second[0] * 4 + 3]
    assert buffers.inputs.pages_BP[0, :2].tolist() == first
    assert buffers.inputs.pages_BP[1, 0].tolist() == second[0]
    assert buffers.inputs.pages_BP[:, 2:].unique().tolist() == [pool.scratch_page]


def test_rows_that_are_not_finite_are_reported() -> None:
    scores = logits(3)
    scores[1, 7], scores[2, 8] = torch.nan, torch.inf
    pool, buffers = make_buffers(3)
    buffers.fill(
        torch.zeros(3, HIDDEN),
        extents_of(pool, [0] * 3),
        [plan(Sampling(temperature=1.0), 0)] * 3,
        [0] * 3,
    )
    made = draw_rows(scores, buffers.inputs.draws, never_V=NOTHING, ends_V=NOTHING).tolist()
    assert made[0] >= 0 and made[1:] == [-1, -1]


def test_each_row_has_its_own_cut() -> None:
    cuts = list(product((1, 5, 50, NUM_IDS), (1.0, 0.8, 0.1)))
    scores = logits(len(cuts))
    top_k, top_p = (list(values) for values in zip(*cuts, strict=True))
    made = keep_top_rows(scores, torch.tensor(top_k)[:, None], torch.tensor(top_p)[:, None])
    assert torch.equal(made, keep_top(scores, top_k, top_p))


def test_noise_keys_of_many_draws_equal_single_ones() -> None:
    seeds, indices = [0, -5, 1 << 70, 123], [0, 9, 100_000, 3]
    keys = noise_keys(seeds, SALT, 3, indices)
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        assert keys[row].tolist() == [
            noise_key(seed, SALT, codebook, index) for codebook in range(3)
        ]


def test_noise_of_keys_in_halves_equals_that_of_whole_keys() -> None:
    keys = [noise_key(1, 2, 3, index) for index in range(6)]
    low, high = (
        torch.tensor(half).view(2, 3)
        for half in ([key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys])
    )
    assert torch.equal(gumbel_of_halves(low, high, 20).view(6, 20), gumbel(keys, 20, CPU))


def test_dense_counts_follow_later_draws() -> None:
    counts = TokenCounts([4])
    counts.add(2)
    dense = counts.dense(6)
    counts.add(2)
    counts.add(5)
    assert dense.tolist() == [UNSEEN, UNSEEN, 2, UNSEEN, 0, 1]
    assert msgspec.structs.replace(plan(Sampling(), 0), counts=counts).penalised is False


@pytest.mark.parametrize(
    ("max_batch", "buckets"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32])]
)
def test_buckets_are_powers_of_two_and_the_largest_batch(
    max_batch: int, buckets: list[int]
) -> None:
    assert buckets_up_to(max_batch) == buckets
