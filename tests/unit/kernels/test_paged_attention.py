"""Attention over pages: the kernels in Triton's interpreter and their slow twins against the
gathered pages of `StepLayout`.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.kernels.paged_attention import (
    BLOCK,
    NUM_PARTS,
    attend_in_place,
    attend_parts,
    join_parts,
)
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import AttentionParams, Extent
from fleet.engine.torch.sampling import RowSampling, Sampling
from fleet.engine.torch.step_inputs import StepBuffers, StepShape
from tests.unit.kernels.triton_interpreter import Call, interpret

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

SCALE = 0.3
CASES = {
    "grouped heads": (8, 2, 32, 16, [0, 36, 200]),
    "one position a page": (6, 2, 24, 1, [2, 129]),
    "own heads, odd pages": (4, 4, 64, 5, [63]),
    "one key/value head": (3, 1, 80, 16, [31, 32, 33]),
    "more positions than one block a part": (2, 1, 64, 16, [511, 512, 1300]),
    "Thinker": (32, 4, 128, 16, [256, 999]),
    "Talker": (16, 2, 128, 16, [0, 300]),
}
"""Cases by name: query heads, key/value heads, head size, page size, positions of the rows."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_step(
    case: tuple[int, int, int, int, list[int]], dtype: torch.dtype
) -> tuple[KVPool, StepBuffers]:
    """Return a KV pool of random keys and values, with one request per row and one row of padding,
    and the step's inputs.
    """
    _, kv_heads, dim, page_size, positions = case
    num_pages = sum(position // page_size + 1 for position in positions) + 3
    pool = KVPool(
        KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=dim),
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    tables = [pool.open_table() for _ in positions]
    # the contexts grow in turn, so that their pages alternate
    for wanted in range(max(positions) + 1):
        for table, position in zip(tables, positions, strict=True):
            assert pool.grow(table, min(wanted, position) + 1)
    pool.data.normal_(generator=torch.Generator().manual_seed(1))
    buffers = StepBuffers(
        StepShape(hidden_size=4, num_codes=1, num_ids=4, salt=0),
        pool,
        len(positions) + 1,
        num_pages,
    )
    extents = [
        Extent(table=table, start=at, stop=at + 1)
        for table, at in zip(tables, positions, strict=True)
    ]
    draws = [RowSampling(sampling=Sampling())] * len(positions)
    buffers.fill(torch.zeros(len(positions), 4), extents, draws, [0] * len(positions))
    return pool, buffers


def launch_both(*arguments: Any) -> Tensor:
    """Launch both kernels with the arguments of `attend_in_place`."""
    kernels: Any = importlib.import_module("fleet.engine.torch.kernels.paged_attention_triton")
    outs, weights = kernels.launch_attend_parts(*arguments, NUM_PARTS, BLOCK)
    return kernels.launch_join_parts(outs, weights, arguments[0].dtype)


def attend_interpreted(given: list[tuple[Any, ...]], folder: Path) -> list[Tensor]:
    """Return the result of both kernels for each list of arguments of `attend_in_place`."""
    calls: list[Call] = [(f"{__name__}:launch_both", arguments) for arguments in given]
    return [out for out, _ in interpret(calls, folder)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_reads_each_context_from_its_pages(dtype: torch.dtype, tmp_path: Path) -> None:
    given: list[tuple[Any, ...]] = []
    wants: list[Tensor] = []
    for case in CASES.values():
        heads, kv_heads, dim, page_size, positions = case
        pool, buffers = make_step(case, dtype)
        generator = torch.Generator().manual_seed(2)
        shape = (len(positions) + 1, heads + 2 * kv_heads, dim)
        query, kv = (
            torch.randn(shape, generator=generator).to(dtype).split((heads, 2 * kv_heads), 1)
        )
        inputs = buffers.inputs
        layout = StepLayout(pool, inputs)
        wants.append(layout.attend(0, query, kv, AttentionParams(scale=SCALE)))
        slots = pool.slots_of_layer[0]
        given.append((query, slots, inputs.pages_BP, inputs.positions_B, page_size, SCALE))
    tolerance = TOLERANCES[dtype]
    for name, arguments, out, want in zip(
        CASES, given, attend_interpreted(given, tmp_path), wants, strict=True
    ):
        assert out.dtype == dtype and out.isfinite().all(), name
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            attend_in_place(*arguments), want, rtol=tolerance, atol=tolerance
        )


def prompt_arguments(num_rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return arguments of `attend_in_place` for the first positions of one request, which share
    its pages.
    """
    generator = torch.Generator().manual_seed(3)
    page_size, num_slots = 4, 30 * 4
    query = torch.randn(40, 6, 64, generator=generator).to(dtype)[:num_rows]
    kv = torch.randn(num_slots, 4, 64, generator=generator).to(dtype)
    pages = torch.randperm(30, generator=generator)[:10].int()
    return query, kv, pages.repeat(num_rows, 1), torch.arange(num_rows), page_size, SCALE


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_one_prompt_attend_to_the_positions_before_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    arguments = prompt_arguments(40, dtype)
    (query, kv, pages), page_size = arguments[:3], arguments[4]
    slots = (pages[0][:, None] * page_size + torch.arange(page_size)).flatten()
    keys, values = kv[slots].float().repeat_interleave(3, 1).split(6, 1)
    scores = torch.einsum("nhd,lhd->hnl", query.float(), keys) * SCALE
    hidden = torch.ones(40, 40).triu(1).bool()
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    want = torch.einsum("hnl,lhd->nhd", shares, values).flatten(1).to(dtype)
    (out,) = attend_interpreted([arguments], tmp_path)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(attend_in_place(*arguments), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_of_a_row_does_not_depend_on_other_rows(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    query, kv, pages, _, page_size, scale = prompt_arguments(17, dtype)
    positions = (torch.arange(17) * 23 + 36) % 40
    given = [
        (query[rows], kv, pages[rows], positions[rows], page_size, scale)
        for rows in (slice(1), slice(2), slice(16, 17), slice(17))
    ]
    first, two, last, everything = attend_interpreted(given, tmp_path)
    assert torch.equal(first, everything[:1]) and torch.equal(two, everything[:2])
    assert torch.equal(last, everything[16:])


def test_outputs_of_empty_parts_are_not_used() -> None:
    query, *others = prompt_arguments(3, torch.float32)
    outs, weights = attend_parts(query, *others)
    want = join_parts(outs, weights, torch.float32)
    outs[weights.isneginf()] = torch.nan
    assert outs.isnan().any()
    assert torch.equal(join_parts(outs, weights, torch.float32), want)
