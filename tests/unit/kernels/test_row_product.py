"""The fused product of a few rows: its kernel in Triton's interpreter against its slow twin, and
the twin against the decoder's own operations.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.kernels.row_product import row_product
from fleet.models.qwen3_omni.decoder import GatedMlp, RmsNorm
from tests.unit.kernels.interpreted import Call, run_interpreted

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

LAUNCH = "fleet.engine.torch.kernels.row_product_triton:launch_row_product"
EPS = 1e-6
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
"""Relative and absolute tolerance by dtype; bfloat16 has steps of 0.8 %."""
CASES = {
    "plain": (3, 64, 48, ""),
    "one row, odd widths": (1, 50, 37, "bias norm residual"),
    "odd rows over two tiles": (19, 72, 20, "norm"),
    "one input": (2, 1, 5, "bias"),
    "gated": (5, 96, 40, "gated norm"),
    "gated with everything, odd widths": (17, 33, 21, "gated bias norm residual"),
    "many outputs per program": (2, 24, 8200, "norm residual"),
}
"""Cases by name: rows, inputs, outputs, parts besides the product."""
WIDE = {
    torch.float32: (2, 1024, 3072, "gated norm"),
    torch.bfloat16: (2, 2048, 5120, "residual"),
}
"""Published widths by dtype: the code predictor's MLP and the Thinker's query, key and value."""


def make_inputs(
    num_rows: int, inputs: int, outputs: int, parts: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return arguments of `row_product` whose results are of order 1."""
    generator = torch.Generator().manual_seed(inputs + outputs)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    gated = "gated" in parts
    num_weights = outputs * (2 if gated else 1)
    return {
        "rows_NH": 2 * random(num_rows, inputs),
        "weight_OH": random(num_weights, inputs) / inputs**0.5,
        "bias_O": random(num_weights) if "bias" in parts else None,
        "norm_H": 1 + random(inputs) / 4 if "norm" in parts else None,
        "eps": EPS if "norm" in parts else None,
        "residual_NO": random(num_rows, outputs) if "residual" in parts else None,
        "gated": gated,
    }


def kernel_call(inputs: dict[str, Any]) -> Call:
    names = ("rows_NH", "weight_OH", "bias_O", "norm_H", "eps", "residual_NO", "gated")
    arguments = inputs | {"eps": inputs["eps"] or 0.0}
    return LAUNCH, tuple(arguments[name] for name in names)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_row_product_kernel_agrees_with_its_twin(dtype: torch.dtype, tmp_path: Path) -> None:
    cases = CASES | {"published widths": WIDE[dtype]}
    inputs = {name: make_inputs(*case, dtype) for name, case in cases.items()}
    outs = run_interpreted([kernel_call(given) for given in inputs.values()], tmp_path)
    rtol, atol = TOLERANCES[dtype]
    for (name, given), out in zip(inputs.items(), outs, strict=True):
        want = row_product(**given)
        torch.testing.assert_close(
            out, want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_row_product_kernel_reads_rows_and_residual_that_are_apart(tmp_path: Path) -> None:
    given = make_inputs(3, 48, 20, "norm residual", torch.float32)
    apart = given | {
        name: torch.cat([given[name], torch.full((3, 5), torch.nan)], 1)[:, :-5]
        for name in ("rows_NH", "residual_NO")
    }
    (out,) = run_interpreted([kernel_call(apart)], tmp_path)
    torch.testing.assert_close(out, row_product(**given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_row_product_kernel_gives_a_row_equal_bytes_beside_any_number_of_rows(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    given = make_inputs(64, 300, 40, "gated bias norm residual", dtype)
    starts = [(0, 1), (63, 64), (0, 2), (0, 17), (20, 37), (0, 32), (0, 64)]

    def part(start: int, stop: int) -> dict[str, Any]:
        return given | {name: given[name][start:stop] for name in ("rows_NH", "residual_NO")}

    outs = run_interpreted([kernel_call(part(*bounds)) for bounds in starts], tmp_path)
    for (start, stop), out in zip(starts, outs, strict=True):
        assert torch.equal(out, outs[-1][start:stop])


def test_row_product_equals_the_decoder_on_a_cpu() -> None:
    given = make_inputs(5, 96, 40, "gated norm", torch.float32)
    rows, weight, norm = given["rows_NH"], given["weight_OH"], given["norm_H"]
    down = torch.randn(96, 40) / 40**0.5
    normed = RmsNorm(96, EPS, rows)(rows) * norm
    act = row_product(rows, weight, norm_H=norm, eps=EPS, gated=True)
    out = row_product(act, down, residual_NO=rows)
    assert torch.equal(out, rows + GatedMlp(gate_up=weight, down=down)(normed))


def test_row_product_is_one_operation_with_a_known_shape() -> None:
    given = make_inputs(5, 96, 40, "gated bias norm residual", torch.float32)
    names = {name for name, value in given.items() if isinstance(value, Tensor)}
    _, arguments = kernel_call(given)
    torch.library.opcheck(torch.ops.fleet.row_product.default, arguments)
    on_meta = given | {name: given[name].to("meta") for name in names}
    assert row_product(**on_meta).shape == (5, 40)
