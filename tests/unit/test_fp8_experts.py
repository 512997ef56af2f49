"""Experts with weights and activations in 8-bit floating point: rounding, products, loading."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fleet.config import load_config
from fleet.core.errors import ConfigError
from fleet.engine.torch.experts import ExpertWeights, grouped_experts
from fleet.engine.torch.fp8 import E4M3, E4M3_MAX, gated, quantized
from fleet.engine.torch.fp8_experts import (
    Fp8ExpertWeights,
    emulated_product,
    fp8_experts,
    fp8_products,
    scaled_product,
    widened_experts,
)
from fleet.engine.torch.lm_engine import LMEngine
from fleet.graphs.qwen3_omni import TALKER, THINKER
from fleet.models.checkpoint import CheckpointReader
from fleet.models.qwen3_omni.config import DividedStage, read_config
from fleet.models.qwen3_omni.decoder import SparseMlp
from fleet.models.qwen3_omni.span import ALL_LAYERS, OmniSpan, load_omni_span
from fleet.models.qwen3_omni.span_sizes import stage_sizes
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.builders import build_options
from fleet.stages.qwen3_omni.thinker import build, build_span
from tests.stage_options import stage_options

BFLOAT16, CPU = torch.bfloat16, torch.device("cpu")
HALF_STEP = 2.0**-4
"""Largest relative error of rounding to three bits of mantissa."""
NUM_EXPERTS, WIDTH, HIDDEN, NUM_CHOSEN = 6, 32, 48, 2
ROWS = {
    "published widths of the Thinker": (3, 2048, 768),
    "published widths of the Talker": (3, 1024, 384),
    "odd widths": (5, 48, 80),
    "one row": (1, 16, 16),
}
"""Rows of the kernels' inputs by case: number, columns, expert width."""
RUN = """
import sys, torch
from fleet.engine.torch.fp8_triton import launch_gated, launch_rows
rows, gate_up = torch.load(sys.argv[1], weights_only=True)
torch.save([*launch_rows(rows), *launch_gated(gate_up)], sys.argv[2])
"""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn_experts(num_experts: int = NUM_EXPERTS) -> ExpertWeights:
    return ExpertWeights(
        gate_up=(torch.randn(num_experts, 2 * WIDTH, HIDDEN) / HIDDEN**0.5).to(BFLOAT16),
        down=(torch.randn(num_experts, HIDDEN, WIDTH) / WIDTH**0.5).to(BFLOAT16),
    )


def drawn_rows(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [N, H], chosen experts [N, k] and their weights [N, k]."""
    weights, ids = torch.rand(num_rows, NUM_EXPERTS).softmax(-1).topk(NUM_CHOSEN)
    return torch.randn(num_rows, HIDDEN).to(BFLOAT16), ids, weights.to(BFLOAT16)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def test_rows_are_rounded_relative_to_their_largest_value() -> None:
    rows = torch.randn(20, 300) * torch.logspace(-6, 4, 20)[:, None]
    rounded, scale = quantized(rows)
    assert rounded.dtype == E4M3 and scale.dtype == torch.float32
    assert torch.equal(rounded.float().abs().amax(1), torch.full((20,), E4M3_MAX))
    error = (rounded.float() * scale[:, None] - rows).abs()
    smallest_step = 2.0**-9 * scale[:, None]  # of the values that have no exponent of their own
    assert bool((error <= (rows.abs() * HALF_STEP).maximum(smallest_step / 2) * 1.001).all())


def test_zeros_stay_zero_and_missing_numbers_stay_missing() -> None:
    rounded, scale = quantized(torch.tensor([[0.0, 0.0], [float("nan"), 1.0]]))
    assert torch.equal(rounded[0].float() * scale[0], torch.zeros(2))
    assert (rounded[1].float() * scale[1]).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_kernels_round_as_their_twins_do(
    case: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    num_rows, columns, width = case
    rows = torch.randn(num_rows, columns + 3)[:, :columns].to(dtype)  # rows are further apart
    gate_up = torch.randn(num_rows, 2 * width).to(dtype)
    rows[-1] = 0.0
    torch.save((rows, gate_up), tmp_path / "inputs.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when the kernel is defined
    subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "inputs.pt", tmp_path / "out.pt"],
        check=True,
        env=environment,
    )
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    for (rounded, scale), values in zip((got[:2], got[2:]), (rows, gated(gate_up)), strict=True):
        wanted, wanted_scale = quantized(values)
        torch.testing.assert_close(scale, wanted_scale)
        # The interpreter of Triton 3.9 halves values that are rounded up to a power of two.
        exact = values.float() / wanted_scale[:, None]
        is_power = wanted.float().abs().log2() % 1 == 0
        is_comparable = ~(is_power & (wanted.float().abs() > exact.abs()))
        assert is_comparable.float().mean() > 0.9
        differs = rounded.float() != wanted.float()
        # values between two roundings, by the last bit of the sigmoid or of a quotient
        assert (differs & is_comparable).float().mean() < 0.01


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_products_are_those_of_the_rounded_matrices(num_rows: int) -> None:
    matrices = Fp8ExpertWeights.of(drawn_experts())
    rows, ids, weights = drawn_rows(num_rows)
    got = fp8_experts(rows, ids, weights, matrices)
    wide = matrices.widened(torch.float64)
    rounded, scale = quantized(rows)
    wanted = torch.zeros(num_rows, HIDDEN, dtype=torch.float64)
    for row, values in enumerate(rounded.double() * scale[:, None]):
        for weight, expert in zip(weights[row].double(), ids[row].tolist(), strict=True):
            gate_up = (wide.gate_up[expert] @ values).to(BFLOAT16)
            inner, inner_scale = quantized(gated(gate_up[None]))
            wanted[row] += weight * (wide.down[expert] @ (inner.double() * inner_scale)[0])
    assert got.dtype == BFLOAT16
    assert relative_error(got, wanted) < 0.01


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_error_against_bfloat16_is_a_few_percent(num_rows: int) -> None:
    plain = drawn_experts()
    rows, ids, weights = drawn_rows(num_rows)
    wanted = grouped_experts(rows, ids, weights, plain)
    rounded = Fp8ExpertWeights.of(plain)
    assert 0.01 < relative_error(fp8_experts(rows, ids, weights, rounded), wanted) < 0.1
    assert 0.01 < relative_error(widened_experts(rows, ids, weights, rounded), wanted) < 0.08


@pytest.mark.parametrize("num_rows", [1, 2, 3, 40])
def test_widened_experts_are_those_of_the_widened_matrices(num_rows: int) -> None:
    matrices = Fp8ExpertWeights.of(drawn_experts())
    rows, ids, weights = drawn_rows(num_rows)
    wanted = grouped_experts(rows, ids, weights, matrices.widened(BFLOAT16))
    assert relative_error(widened_experts(rows, ids, weights, matrices), wanted) < 0.01


def test_row_does_not_depend_on_other_rows() -> None:
    matrices = Fp8ExpertWeights.of(drawn_experts())
    rows, ids, weights = drawn_rows(9)
    together = fp8_experts(rows, ids, weights, matrices)
    alone = [
        fp8_experts(rows[n : n + 1], ids[n : n + 1], weights[n : n + 1], matrices) for n in range(9)
    ]
    torch.testing.assert_close(torch.cat(alone), together)


def test_expert_without_rows_is_skipped() -> None:
    matrices = Fp8ExpertWeights.of(drawn_experts())
    rows, ids, weights = drawn_rows(4)
    ids[:] = torch.tensor([0, NUM_EXPERTS - 1])
    out = fp8_experts(rows, ids, weights, matrices)
    assert out.isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 5])
def test_products_of_a_gpu_have_the_layout_of_torch_and_read_nothing_on_the_host(
    num_rows: int,
) -> None:
    """Tensors without data: reading one fails, and torch checks shapes, strides and scales."""
    rows, ids, weights = (each.to("meta") for each in drawn_rows(num_rows))
    matrices = Fp8ExpertWeights.of(drawn_experts())
    assert matrices.is_aligned
    held = Fp8ExpertWeights(
        gate_up=matrices.gate_up.to("meta"),
        gate_up_scale=matrices.gate_up_scale.to("meta"),
        down=matrices.down.to("meta"),
        down_scale=matrices.down_scale.to("meta"),
    )
    out = fp8_products(rows, ids, weights, held, scaled_product)
    assert out.shape == rows.shape and out.dtype == BFLOAT16
    assert widened_experts(rows, ids, weights, held).shape == rows.shape
    with pytest.raises(RuntimeError, match="meta"):  # reads the ends of the groups
        fp8_products(rows, ids, weights, held, emulated_product)


def fused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights with the experts of each layer in two tensors."""
    out = {name: weight for name, weight in weights.items() if ".mlp.experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in weights if ".experts.0." in name}:
        num_experts = len(weights[f"{prefix}.gate.weight"])
        names = [f"{prefix}.experts.{number}." for number in range(num_experts)]
        gates = [weights[f"{name}gate_proj.weight"] for name in names]
        ups = [weights[f"{name}up_proj.weight"] for name in names]
        out[f"{prefix}.experts.gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], 1)
        downs = [weights[f"{name}down_proj.weight"] for name in names]
        out[f"{prefix}.experts.down_proj"] = torch.stack(downs)
    return out


class SizedReader(CheckpointReader):
    """Reader that records the shapes of the tensors that it allocated."""

    def __init__(self, folder: Path, *, fp8_experts: bool) -> None:
        super().__init__(folder, device=CPU, dtype=BFLOAT16, fp8_experts=fp8_experts)
        self.shapes: list[tuple[int, ...]] = []

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        self.shapes.append(tuple(shape))
        return super().empty(shape, dtype=dtype)


def load(
    folder: Path, *, fp8_experts: bool, stage: DividedStage = "thinker"
) -> tuple[OmniSpan, SizedReader]:
    reader, config = SizedReader(folder, fp8_experts=fp8_experts), read_config(folder)
    layers = load_omni_span(reader, config, stage, ALL_LAYERS, grouped_experts, 64)
    return layers, reader


@pytest.mark.parametrize("is_fused", [False, True], ids=["one by one", "fused"])
def test_experts_are_rounded_while_they_are_read(
    is_fused: bool, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tiny_checkpoint
    if is_fused:
        folder = tmp_path
        source = CheckpointReader(tiny_checkpoint, device=CPU, dtype=BFLOAT16)
        stored = {name: source.get(name) for name in source.under("thinker.")}
        save_file(fused(stored), folder / "model.safetensors")
        (folder / "config.json").write_text((tiny_checkpoint / "config.json").read_text())
    plain, _ = load(folder, fp8_experts=False)
    rounded, reader = load(folder, fp8_experts=True)
    weights, plain_weights = rounded.weights(), plain.weights()
    for number, (layer, plain_layer) in enumerate(
        zip(rounded.decoder.layers, plain.decoder.layers, strict=True)
    ):
        assert isinstance(layer.mlp, SparseMlp) and isinstance(plain_layer.mlp, SparseMlp)
        matrices, plain_matrices = layer.mlp.matrices, plain_layer.mlp.matrices
        assert isinstance(matrices, Fp8ExpertWeights)
        assert isinstance(plain_matrices, ExpertWeights)
        wanted = Fp8ExpertWeights.of(plain_matrices)
        for name in ("gate_up", "gate_up_scale", "down", "down_scale"):
            got = getattr(matrices, name)
            assert torch.equal(got.float(), getattr(wanted, name).float())
            assert weights[f"layers.{number}.mlp.matrices.{name}"] is got
    others = [name for name in plain_weights if ".matrices." not in name]
    assert all(torch.equal(weights[name], plain_weights[name]) for name in others)
    assert all(len(shape) < 3 for shape in reader.shapes), "experts of a layer read at once"


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_planned_bytes_are_those_of_the_loaded_layers(
    stage: DividedStage, tiny_checkpoint: Path
) -> None:
    sizes = stage_sizes(
        stage, tiny_checkpoint, BFLOAT16, num_positions=64, buffer_bytes=0, fp8_experts=True
    )
    weights = load(tiny_checkpoint, fp8_experts=True, stage=stage)[0].weights()
    for number, planned in enumerate(sizes.layers):
        prefix = f"layers.{number}."
        assert planned == sum(w.nbytes for name, w in weights.items() if name.startswith(prefix))


def test_stage_and_its_spans_hold_experts_in_8_bits(tiny_checkpoint: Path) -> None:
    options = stage_options(THINKER, tiny_checkpoint, dtype="fp8")
    engine = build(options).engine
    assert isinstance(engine, LMEngine) and engine.pool.data.dtype == BFLOAT16
    span = build_span(options, LayerSpan(1, 2))
    weights = span.layers.weights()
    assert weights["layers.1.mlp.matrices.gate_up"].dtype == E4M3
    assert span.num_bytes == sum(weight.nbytes for weight in weights.values())


def test_worker_on_a_cpu_refuses_experts_in_8_bits(tiny_checkpoint: Path) -> None:
    # the device of the deployment is auto, so the file itself is accepted
    config = load_config(None, ("stages.talker.dtype=fp8",))
    with pytest.raises(
        ConfigError, match=r"stages.talker.dtype: fp8 runs on a GPU, and the device"
    ):
        build_options(config, TALKER, tiny_checkpoint)
    assert build_options(config, THINKER, tiny_checkpoint).dtype == "float32"


def test_hidden_states_between_processes_are_in_bfloat16(tiny_checkpoint: Path) -> None:
    spans = "stages.thinker.spans={anchor: '0:1', workers: ['2:output']}"
    config = load_config(None, ("device=cuda", "stages.thinker.dtype=fp8", spans))
    options = build_options(config, THINKER, tiny_checkpoint, is_here=False)
    assert (options.dtype, options.compute_dtype) == ("fp8", "bfloat16")
    assert options.anchor is not None and options.anchor.wire_dtype == "bfloat16"


def test_parts_of_a_weight_count_as_one_weight(tmp_path: Path) -> None:
    written = {"a": torch.randn(4, 3, 2), "b": torch.randn(8)}
    save_file(written, tmp_path / "model.safetensors")
    reader, shares = CheckpointReader(tmp_path, device=CPU, dtype=torch.float32), list[float]()
    reader.report_to(shares.append, list(written))
    parts = [part.clone() for part in reader.parts("a")]
    assert torch.equal(torch.stack(parts), written["a"])
    assert reader.names == ["a"] and shares[-1] == 24 / 32
