"""Whole decode steps of a Thinker and a Talker by fused kernels, in Triton's interpreter; and
answers of a Thinker in invariant numerics.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import REPO
from tests.unit.kernels.interpreted_step import NUM_ROWS, compute_step, make_program

pytestmark = pytest.mark.one_file_in(3, "parts with processes")
Steps = dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]


def interpret(module: str, folder: Path) -> Any:
    """Return what a module of this folder saves when it runs with Triton's interpreter."""
    out = folder / "out.pt"
    subprocess.run(
        [sys.executable, "-m", f"tests.unit.kernels.{module}", out],
        check=True,
        cwd=REPO,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return interpret("interpreted_step", tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("stage", ["thinker", "talker"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_kernels_compute_the_step_of_torch(interpreted: Steps, stage: str, num_rows: int) -> None:
    last, codes, rows = compute_step(make_program(stage), num_rows, is_fused=False)
    fused_last, fused_codes, fused_rows = interpreted[stage, num_rows]
    torch.testing.assert_close(fused_last, last, rtol=1e-4, atol=1e-5)
    assert fused_codes.tolist() == codes.tolist()
    torch.testing.assert_close(fused_rows, rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_row_has_the_same_bytes_whatever_is_beside_it(interpreted: Steps, stage: str) -> None:
    alone, beside = (interpreted[stage, num_rows] for num_rows in NUM_ROWS)
    for one, many in zip(alone, beside, strict=True):
        assert torch.equal(one, many[: len(one)])


def test_answer_leaves_the_same_bytes_alone_and_beside_others(tmp_path: Path) -> None:
    (alone, rows_alone), (beside, rows_beside) = interpret("interpreted_answers", tmp_path)
    assert alone and alone == beside
    assert rows_alone.keys() == rows_beside.keys()
    for position, row in rows_alone.items():
        assert torch.equal(row, rows_beside[position]), f"position {position}"
