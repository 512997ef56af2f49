"""The kernel of the snake activation, run by Triton's interpreter on a CPU, against torch
operations.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fleet.models.qwen3_omni.code2wav_operations import DecoderOperations

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

SHAPES = ((1, 3), (700, 96), (5, 1536), (2048, 1))
RUN = """
import sys, torch
from fleet.engine.torch.snake_kernel import activate_snake
torch.save([activate_snake(*each) for each in torch.load(sys.argv[1])], sys.argv[2])
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_torch_operations(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = [
        [
            torch.randn(num_rows, columns, generator=generator).to(dtype),
            torch.randn(columns, generator=generator).exp().to(dtype),
            torch.randn(columns, generator=generator).exp().to(dtype),
        ]
        for num_rows, columns in SHAPES
    ]
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when the kernel is defined
    subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "inputs.pt", tmp_path / "out.pt"],
        check=True,
        env=environment,
    )
    outs = torch.load(tmp_path / "out.pt", weights_only=True)
    for out, given in zip(outs, inputs, strict=True):
        want = DecoderOperations().snake(*(each.float() for each in given))
        assert out.dtype == dtype
        # the kernel computes in float32 and rounds its result once
        rtol = 1e-5 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(out.float(), want, rtol=rtol, atol=1e-5)
