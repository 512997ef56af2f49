"""Precision of a language model's weights: layers in 8 bits, and the choice of the fastest."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.models.causal_lm.precision import choose_precision, measure_precisions
from fleet.models.causal_lm.program import CausalLM
from fleet.models.causal_lm.quantized import (
    MOST_ROWS,
    Bfloat16Linear,
    Int4Linear,
    Int8Linear,
    JoinedPart,
    PortableInt8Linear,
    int8_layer,
    quantize,
    widen_products,
)
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.stages.precision import FOLDER, record_once, with_precision
from tests.stage_options import stage_options

LM = StageName("lm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("lm") / "tiny")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, MOST_ROWS, MOST_ROWS + 1, 200])
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Bfloat16Linear, 0.01),
        (Int8Linear, 0.02),
        (PortableInt8Linear, 0.02),
        (Int4Linear, 0.15),
    ],
)
def test_rounded_layer_is_close_to_the_layer(
    kind: Callable[[nn.Linear], nn.Module], most: float, num_rows: int, bias: bool
) -> None:
    torch.manual_seed(num_rows)
    linear = nn.Linear(96, 160, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight[3] *= 1000  # each output has a scale of its own
        linear.weight[4] = 0
    rows = torch.randn(1, num_rows, 96).bfloat16()
    with torch.inference_mode():
        expected, got = linear(rows).float(), kind(linear)(rows)
    assert got.shape == (1, num_rows, 160) and got.dtype == torch.bfloat16
    for output in (3, slice(4, None)):
        usual = rows.norm() * linear.weight[output].norm() / 96**0.5
        assert (got - expected)[..., output].norm() <= 2 * most * usual


@pytest.mark.parametrize("outlier", [1.0, 3000.0])
def test_product_in_8_bits_is_exact_and_each_row_is_its_own(outlier: float) -> None:
    """The layer's weights are whole numbers, so that rounding keeps them. Beside an input that is
    3,000 times as large the others still have the precision of bfloat16.
    """
    torch.manual_seed(0)
    linear = nn.Linear(640, 48, bias=False)
    weight = torch.randint(-127, 128, linear.weight.shape).float()
    weight[:, 0], weight[:, 7] = 127, 0
    linear.weight = nn.Parameter(weight * 0.25, requires_grad=False)
    rows = torch.randn(37, 640)
    rows[:, 7] = outlier
    layer = Int8Linear(linear)
    with torch.inference_mode():
        got = layer(rows)
        alone = torch.cat([layer(row[None]) for row in rows])
    exact = rows.double() @ linear.weight.double().T
    most = 0.5 * max(outlier, 4.0) / 2**20 + 1e-6
    assert (got - exact).norm() <= most * exact.norm()
    assert torch.equal(got, alone)


def test_product_in_8_bits_does_not_hide_numbers_that_are_not_finite() -> None:
    rows = torch.ones(3, 32)
    rows[1, 5], rows[2, 5] = float("nan"), float("inf")
    with torch.inference_mode():
        got = Int8Linear(nn.Linear(32, 16))(rows)
    assert got.isfinite().all(1).tolist() == [True, False, False]


def test_processors_without_a_kernel_of_their_own_take_the_portable_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for capability, kind, wide in (
        ("AVX512", Int8Linear, nn.Linear),
        ("AVX2", PortableInt8Linear, Bfloat16Linear),
        ("DEFAULT", PortableInt8Linear, Bfloat16Linear),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert type(int8_layer(nn.Linear(8, 4))) is kind
        model = nn.Sequential(nn.Linear(8, 4))
        widen_products(model)
        assert type(model[0]) is wide


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_give_their_own_outputs_in_any_order_and_for_any_rows(bias: bool) -> None:
    names, sizes = ("q_proj", "k_proj", "v_proj"), (48, 16, 8)
    parent = nn.Module()
    for name, size in zip(names, sizes, strict=True):
        setattr(parent, name, nn.Linear(32, size, bias=bias))
    alone: dict[str, nn.Module] = {name: int8_layer(getattr(parent, name)) for name in names}
    quantize(parent, 8)
    first, second = torch.randn(1, 5, 32).bfloat16(), torch.randn(1, 2, 32).bfloat16()
    order = [("q_proj", first), ("v_proj", first), ("q_proj", first), ("k_proj", second)]
    order += [("k_proj", first), ("q_proj", second), ("v_proj", second), ("k_proj", second)]
    with torch.inference_mode():
        for name, rows in order:
            got = getattr(parent, name)(rows)
            assert torch.equal(got, alone[name](rows)) and got.is_contiguous()


@pytest.mark.parametrize(
    ("bits", "kind"), [(8, type(int8_layer(nn.Linear(8, 4)))), (4, Int4Linear)]
)
def test_every_linear_layer_is_replaced_and_tied_embeddings_stay(
    bits: int, kind: type[nn.Module], folder: Path
) -> None:
    where: Any = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "tiled": False}
    program: Any = CausalLM(folder, frozenset(), **where, weight_bits=bits)
    kinds = {type(part) for part in program._parts._body.modules()}
    assert kind in kinds and nn.Linear not in kinds
    assert (JoinedPart in kinds) == (bits == 8)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    quantize(model, bits)
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("times_ms", "chosen"),
    [
        ((1.0, 1.0, 1.0), "float32"),
        ((1.0, 0.95, 0.9), "float32"),
        ((1.0, 0.5, 0.45), "bfloat16"),
        ((1.0, 1.0, 0.4), "int8"),
        ((1.0, 0.5, 0.2), "int8"),
        ((0.1, 0.5, 0.2), "float32"),
    ],
)
def test_less_exact_precision_must_be_clearly_faster(
    times_ms: tuple[float, float, float], chosen: str
) -> None:
    assert (
        choose_precision(dict(zip(("float32", "bfloat16", "int8"), times_ms, strict=True)))
        == chosen
    )


def test_choice_is_recorded_once_for_all_processes(tmp_path: Path) -> None:
    path, measured = tmp_path / "data" / "a.json", list[int]()

    def measure(number: int) -> dict[str, float]:
        measured.append(number)
        return {"float32": 1.0, "bfloat16": 0.1 if number % 2 else 1.0, "int8": 1.0}

    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(lambda at: record_once(path, lambda: measure(at)), range(8)))
    assert len(set(map(str, records))) == 1
    before = len(measured)
    assert record_once(path, lambda: measure(99)) == records[0] and len(measured) == before
    assert [each.name for each in path.parent.iterdir()] == ["a.json"]
    path.write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"a.json: the recorded precision .* remove the file"):
        record_once(path, lambda: measure(1))


def test_fastest_precision_is_measured_in_bounded_time_and_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(measure_precisions(folder, 1)) == {"float32", "bfloat16", "int8"}
    monkeypatch.setattr("fleet.stages.precision.measure_precisions", lambda *_: TIMES)
    options = stage_options(LM, folder, extra={"precision": "fastest"})
    config = options.config.model_copy(update={"data_dir": tmp_path})
    changed, bits = with_precision(replace(options, config=config))
    assert (changed.dtype, bits) == ("bfloat16", 8)
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


TIMES = {"float32": 1.0, "bfloat16": 1.0, "int8": 0.3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra": {"precision": "int2"}}, "'int2' is not one of float32, bfloat16, int8, int4"),
        ({"extra": {"precision": 8}}, "8 is not one of"),
        ({"extra": {"precision": "int8"}, "numerics": "invariant"}, "computes in float32"),
        ({"extra": {"precision": "int8"}, "half": "decode"}, "whole stage on the engine torch"),
        ({"extra": {"precision": "int8"}, "device": "cuda:0"}, "int8 runs on a CPU, not on cuda:0"),
    ],
)
def test_unusable_precision_is_refused_by_name(
    settings: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        with_precision(stage_options(LM, folder, **settings))
    assert refused.value.param == "stages.lm.extra.precision"


def test_invariant_numerics_take_float32_as_the_fastest(folder: Path) -> None:
    options = stage_options(LM, folder, numerics="invariant", extra={"precision": "fastest"})
    assert with_precision(options) == (options, 0)
