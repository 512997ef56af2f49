"""Attention over KV pages: both layouts against the plain formula, and bit equality of the
invariant layout.
"""

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.experts import ExpertWeights, grouped_experts, looped_experts, tiled_experts
from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable
from fleet.engine.torch.layout import AttentionParams, Extent, Layout
from fleet.engine.torch.tiles import TILE_ROWS, in_tiles, padded

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 8, 23
ATTENTION_PARAMS = {
    "plain": AttentionParams(scale=0.4),
    "window": AttentionParams(scale=0.4, window=5),
    "softcap": AttentionParams(scale=0.4, softcap=2.0),
    "both": AttentionParams(scale=0.4, window=5, softcap=2.0),
}


def make_pool(page_size: int = 4) -> KVPool:
    shape = KVShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM)
    pool = KVPool(
        shape, num_pages=64, page_size=page_size, dtype=torch.float32, device=torch.device("cpu")
    )
    pool.data.fill_(1e6)
    return pool


def states(seed: int, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(length, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )  # type: ignore[return-value]


def plain(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Return the attention output of all rows of one request, computed by the plain formula."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    row, at = torch.arange(len(q))[:, None], torch.arange(len(k))
    hidden = (at > row) | (at <= row - (params.window or len(k) + 1))
    return torch.einsum(
        "hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v
    ).flatten(1)


def run_fast(
    pool: KVPool, parts: list[tuple[PageTable, int, int, int]], params: AttentionParams
) -> list[Tensor]:
    """Compute attention for `parts` in one step; a part is (page table, seed of the hidden states,
    first row, end row).
    """
    parts = sorted(parts, key=lambda part: part[3] - part[2] > 1)
    layout: Layout = FastLayout(
        pool, [Extent(table=table, start=start, stop=stop) for table, _, start, stop in parts]
    )
    rows = [
        torch.cat([states(seed)[n][start:stop] for _, seed, start, stop in parts]) for n in range(3)
    ]
    return list(
        layout.attend(0, rows[0], torch.cat(rows[1:], 1), params).split(
            [stop - start for *_, start, stop in parts]
        )
    )


@pytest.mark.parametrize("params", ATTENTION_PARAMS.values(), ids=ATTENTION_PARAMS)
def test_fast_attention_matches_the_formula_in_any_batch(params: AttentionParams) -> None:
    pool = make_pool()
    tables = [pool.open_table() for _ in range(3)]
    for table in tables:
        pool.grow(table, LENGTH)
    cuts = ([0, 5, 6, 7, 20, 23], [0, 1, 2, 3, 4, 23], [0, 22, 23])
    got: list[list[Tensor]] = [[], [], []]
    for step in range(max(map(len, cuts)) - 1):
        there = [n for n in range(3) if step + 1 < len(cuts[n])]
        there.sort(key=lambda n: cuts[n][step + 1] - cuts[n][step] > 1)
        parts = [(tables[n], n, cuts[n][step], cuts[n][step + 1]) for n in there]
        for n, out in zip(there, run_fast(pool, parts, params), strict=True):
            got[n].append(out)
    for n in range(3):
        torch.testing.assert_close(
            torch.cat(got[n]), plain(*states(n), params), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("params", ATTENTION_PARAMS.values(), ids=ATTENTION_PARAMS)
@pytest.mark.parametrize("num_rows", [2, 4])
def test_short_extents_of_several_requests_match_the_formula(
    params: AttentionParams, num_rows: int
) -> None:
    """Short extents of several requests match the formula: requests with different context lengths
    and equal numbers of rows, beside a single row and a prompt.
    """
    pool = make_pool()
    tables = [pool.open_table() for _ in range(5)]
    for table in tables:
        pool.grow(table, LENGTH)
    starts = (1, 7, 17, 19, 0)
    run_fast(pool, [(tables[n], n, 0, starts[n]) for n in range(4)], params)
    stops = (starts[0] + 1, *(start + num_rows for start in starts[1:4]), LENGTH)
    parts = [(tables[n], n, starts[n], stops[n]) for n in range(5)]
    for n, out in enumerate(run_fast(pool, parts, params)):
        torch.testing.assert_close(
            out, plain(*states(n), params)[starts[n] : stops[n]], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("params", ATTENTION_PARAMS.values(), ids=ATTENTION_PARAMS)
def test_row_attention_matches_the_formula_bit_equal_in_any_tile(
    params: AttentionParams, num_threads: int
) -> None:
    length = 70

    def rows_of(cuts: list[int], beside: int, page_size: int = 4) -> Tensor:
        """Return the attention output of one request's rows, computed in the pieces `cuts`, with
        `beside` rows of a second request before them in each tile.
        """
        pool = make_pool(page_size)
        mine, other = pool.open_table(), pool.open_table()
        pool.grow(other, length)
        pool.grow(mine, length)
        outs: list[Tensor] = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            at = start // 2
            extents = [Extent(table=other, start=at, stop=at + beside)] if beside else []
            layout = RowLayout(
                pool, [*extents, Extent(table=mine, start=start, stop=stop)], TILE_ROWS
            )
            pairs = zip(states(1, length), states(2, length), strict=True)
            q, k, v = (padded(torch.cat([b[at : at + beside], a[start:stop]])) for a, b in pairs)
            outs.append(
                layout.attend(0, q, torch.cat([k, v], 1), params)[beside : beside + stop - start]
            )
        return torch.cat(outs)

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = rows_of([0, 16, 32, 48, 64, length], 0)
        torch.testing.assert_close(alone, plain(*states(1, length), params), rtol=1e-4, atol=1e-5)
        assert torch.equal(rows_of(list(range(length + 1)), 0), alone)
        assert torch.equal(rows_of([*range(0, length, 7), length], 9), alone)
        assert torch.equal(rows_of([*range(0, length, 5), length], 5, page_size=16), alone)
        assert torch.equal(rows_of([*range(0, length, 13), length], 0, page_size=5), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("width", "out"), [(64, 64), (128, 256), (128, 1152), (256, 128)])
def test_row_has_the_same_bits_in_every_slot_of_a_tile(
    width: int, out: int, num_threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows, weight = torch.randn(TILE_ROWS, width), torch.randn(out, width)
        made = torch.nn.functional.linear(rows, weight)
        for shift in range(1, TILE_ROWS):
            assert torch.equal(
                torch.nn.functional.linear(rows.roll(shift, 0), weight).roll(-shift, 0), made
            )
        for num_rows in range(1, TILE_ROWS):
            alone = in_tiles(lambda tile: torch.nn.functional.linear(tile, weight), rows[:num_rows])
            assert torch.equal(alone, made[:num_rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("width", [16, 10], ids=["aligned", "unaligned"])
def test_grouped_experts_equal_those_run_one_after_another(
    dtype: torch.dtype, num_rows: int, width: int
) -> None:
    matrices = ExpertWeights(
        gate_up=torch.randn(6, 2 * width, 24).to(dtype), down=torch.randn(6, 24, width).to(dtype)
    )
    rows, ids = torch.randn(num_rows, 24).to(dtype), torch.rand(num_rows, 6).topk(2).indices
    weights = torch.rand(num_rows, 2).to(dtype)
    assert torch.equal(
        grouped_experts(rows, ids, weights, matrices), looped_experts(rows, ids, weights, matrices)
    )


def test_grouped_and_tiled_experts_agree_and_tiles_are_independent() -> None:
    matrices = ExpertWeights(gate_up=torch.randn(6, 20, 12), down=torch.randn(6, 12, 10))
    rows, ids = (
        torch.randn(TILE_ROWS, 12),
        torch.stack([torch.randperm(6)[:2] for _ in range(TILE_ROWS)]),
    )
    weights = torch.rand(TILE_ROWS, 2)
    made = tiled_experts(rows, ids, weights, matrices)
    torch.testing.assert_close(
        grouped_experts(rows, ids, weights, matrices), made, rtol=1e-4, atol=1e-4
    )
    one = grouped_experts(rows[:1], ids[:1], weights[:1], matrices)
    torch.testing.assert_close(one, made[:1], rtol=1e-4, atol=1e-4)
    order = torch.randperm(TILE_ROWS)
    assert torch.equal(
        tiled_experts(rows[order], ids[order], weights[order], matrices), made[order]
    )
    assert torch.equal(
        tiled_experts(padded(rows[:1]), padded(ids[:1]), padded(weights[:1]), matrices)[:1],
        made[:1],
    )
