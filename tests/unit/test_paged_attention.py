"""The paged-attention kernel, run by Triton's interpreter on a CPU, against the gathered pages of
`StepLayout`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import AttentionParams, Extent
from fleet.engine.torch.sampling import RowSampling, Sampling
from fleet.engine.torch.step_inputs import StepBuffers, StepShape

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

CASES = {
    "grouped heads": (8, 2, 32, 16, [0, 36, 200]),
    "one position a page": (6, 2, 24, 1, [2, 129]),
    "own heads, odd pages": (4, 4, 64, 5, [63]),
    "true sizes": (32, 4, 128, 16, [256, 999]),
}
"""Cases by name: query heads, key/value heads, head size, page size, positions of the rows."""
RUN = """
import sys, torch
from fleet.engine.torch.paged_attention import attend_in_place
inputs = torch.load(sys.argv[1], weights_only=True)
torch.save(attend_in_place(*inputs), sys.argv[2])
"""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_reads_each_context_from_its_pages(
    case: tuple[int, int, int, int, list[int]], tmp_path: Path
) -> None:
    heads, kv_heads, dim, page_size, positions = case
    shape, generator = (
        KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=dim),
        torch.Generator().manual_seed(1),
    )
    num_pages = sum(position // page_size + 1 for position in positions) + 3
    pool = KVPool(
        shape,
        num_pages=num_pages,
        page_size=page_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tables = [pool.open_table() for _ in positions]
    # the contexts grow in turn, so that their pages alternate
    for wanted in range(max(positions) + 1):
        for table, position in zip(tables, positions, strict=True):
            assert pool.grow(table, min(wanted, position) + 1)
    pool.data.normal_(generator=generator)
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
    heads_of_rows = torch.randn(len(positions) + 1, heads + 2 * kv_heads, dim, generator=generator)
    query, kv = heads_of_rows[:, :heads], heads_of_rows[:, heads:]
    want = StepLayout(pool, buffers.inputs).attend(0, query, kv, AttentionParams(scale=0.3))
    inputs = buffers.inputs
    given = [query, pool.slots_of_layer[0], inputs.pages_BP, inputs.positions_B + 1, page_size, 0.3]
    torch.save(given, tmp_path / "inputs.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when the kernel is defined
    subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "inputs.pt", tmp_path / "out.pt"],
        check=True,
        env=environment,
    )
    torch.testing.assert_close(
        torch.load(tmp_path / "out.pt", weights_only=True), want, rtol=1e-5, atol=1e-5
    )
