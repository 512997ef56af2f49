"""The fused operations of mixture-of-experts layers: kernels in Triton's interpreter against their
slow twins, and the twins against the decoder's layer.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.experts import Experts, ExpertWeights, grouped_products, looped_experts
from fleet.engine.torch.kernels.routed_experts import (
    MAX_PAIRS,
    combine_experts,
    expert_down,
    expert_gate_up,
    route,
)
from fleet.engine.torch.kernels.row_product import row_product
from fleet.models.qwen3_omni.decoder import GatedMlp, RmsNorm, SparseMlp
from tests.unit.kernels.interpreted import Call, run_interpreted

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

LAUNCHES = "fleet.engine.torch.kernels.routed_experts_triton:"
EPS = 1e-6
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
"""Relative and absolute tolerance by dtype; bfloat16 has steps of 0.8 %."""
CASES = {
    "one row": (1, 32, 16, 8, 3, "mixed"),
    "odd rows and widths": (5, 37, 21, 7, 2, "mixed"),
    "one expert": (3, 32, 16, 1, 1, "mixed"),
    "every expert": (3, 32, 16, 4, 4, "mixed"),
    "an expert of all rows, others of none": (21, 32, 16, 9, 2, "same"),
    "published counts": (3, 32, 16, 128, 8, "mixed"),
    "most pairs": (64, 16, 16, 20, 8, "mixed"),
}
"""Cases by name: rows, hidden size, expert width, experts, experts per row, choice."""
WIDE = {
    torch.float32: (2, 1024, 384, 3, 1, "same"),
    torch.bfloat16: (2, 2048, 768, 3, 1, "same"),
}
"""Published widths by dtype, with fewer experts: the Talker's and the Thinker's."""
ROUTES = [
    (1, 128, 8, True, False),
    (5, 128, 6, False, True),
    (3, 7, 7, True, True),
    (2, 1, 1, True, False),
    (17, 100, 3, False, False),
]
"""Rows, experts, experts per row, whether weights are normalised, and whether there is a shared
expert.
"""


def randoms(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def choose(num_rows: int, num_experts: int, num_chosen: int, choice: str) -> Tensor:
    """Return expert ids of rows: drawn, or the `same` for all rows."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    if choice == "same":
        scores = scores[:1].expand(num_rows, -1)
    return scores.topk(num_chosen).indices.contiguous()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_expert_kernels_agree_with_their_twins(dtype: torch.dtype, tmp_path: Path) -> None:
    calls: list[Call] = []
    wants: list[Tensor] = []
    names: list[str] = []
    for name, case in (CASES | {"published widths": WIDE[dtype]}).items():
        num_rows, hidden, width, num_experts, num_chosen, choice = case
        ids = choose(num_rows, num_experts, num_chosen, choice)
        rows, gate_up, down, norm, acts = randoms(
            hidden,
            dtype,
            (num_rows, hidden),
            (num_experts, 2 * width, hidden),
            (num_experts, hidden, width),
            (hidden,),
            (num_rows * num_chosen, width),
        )
        gate_up, down = gate_up / hidden**0.5, down / width**0.5
        normed = (norm, EPS) if name != "one row" else (None, None)
        wants.append(expert_gate_up(rows, ids, gate_up, *normed))
        calls.append((LAUNCHES + "launch_gate_up", (rows, ids, gate_up, normed[0], EPS)))
        calls.append((LAUNCHES + "launch_down", (acts, ids, down)))
        wants.append(expert_down(acts, ids, down))
        names += [f"{name}, gate and up", f"{name}, down"]
    rtol, atol = TOLERANCES[dtype]
    for name, out, want in zip(names, run_interpreted(calls, tmp_path), wants, strict=True):
        torch.testing.assert_close(
            out, want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_route_kernel_agrees_with_its_twin(dtype: torch.dtype, tmp_path: Path) -> None:
    given = [
        (randoms(rows, dtype, (rows, experts + shared))[0], chosen, normalise, shared)
        for rows, experts, chosen, normalise, shared in ROUTES
    ]
    outs = run_interpreted([(LAUNCHES + "launch_route", each) for each in given], tmp_path)
    rtol, atol = TOLERANCES[dtype]
    for arguments, (ids, weights, shared) in zip(given, outs, strict=True):
        want_ids, want_weights, want_shared = route(*arguments)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, rtol=rtol, atol=atol)
        torch.testing.assert_close(shared, want_shared, rtol=rtol, atol=atol)


def test_route_takes_the_lower_id_of_equal_experts(tmp_path: Path) -> None:
    logits = torch.tensor([[1.0, 2, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0]])
    arguments = (logits, 4, True, False)
    ((ids, _, _),) = run_interpreted([(LAUNCHES + "launch_route", arguments)], tmp_path)
    assert ids.tolist() == route(*arguments)[0].tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]


def test_route_gives_a_row_with_nan_weights_of_nan_and_ids_of_experts(tmp_path: Path) -> None:
    logits = torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, 3.0]])
    arguments = (logits, 2, True, False)
    ((ids, weights, _),) = run_interpreted([(LAUNCHES + "launch_route", arguments)], tmp_path)
    assert weights[0].isnan().all() and not weights[1].isnan().any()
    assert ids.min() >= 0 and ids.max() < 3


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_combine_kernel_agrees_with_its_twin(dtype: torch.dtype, tmp_path: Path) -> None:
    given: list[tuple[Tensor | None, ...]] = []
    for num_rows, hidden, num_chosen in [(1, 1024, 8), (3, 37, 1), (17, 530, 6)]:
        outs, weights, *others = randoms(
            hidden,
            dtype,
            (num_rows * num_chosen, hidden),
            (num_rows, num_chosen),
            (num_rows, hidden),
            (num_rows, hidden),
            (num_rows, 1),
        )
        given += [(outs, weights, *others), (outs, weights, others[0], None, None)]
    calls = [(LAUNCHES + "launch_combine", arguments) for arguments in given]
    rtol, atol = TOLERANCES[dtype]
    for arguments, out in zip(given, run_interpreted(calls, tmp_path), strict=True):
        want: Tensor = torch.ops.fleet.combine_experts(*arguments)
        # a residual that cancels leaves the rounding errors of the terms
        torch.testing.assert_close(out, want, rtol=rtol, atol=3 * atol)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_expert_kernels_give_a_row_equal_bytes_beside_any_rows(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    hidden, width, num_experts, k = 300, 40, 5, 2
    rows, gate_up, down, norm, acts, outs, weights, residual, shared, shared_gate = randoms(
        3,
        dtype,
        (64, hidden),
        (num_experts, 2 * width, hidden),
        (num_experts, hidden, width),
        (hidden,),
        (64 * k, width),
        (64 * k, hidden),
        (64, k),
        (64, hidden),
        (64, hidden),
        (64, 1),
    )
    ids = choose(64, num_experts, k, "mixed")
    bounds = [(0, 1), (63, 64), (0, 2), (0, 17), (20, 37), (0, 32), (0, 64)]
    calls: list[Call] = []
    for start, stop in bounds:
        at, pairs = slice(start, stop), slice(start * k, stop * k)
        summed = (outs[pairs], weights[at], residual[at], shared[at], shared_gate[at])
        calls += [
            (LAUNCHES + "launch_gate_up", (rows[at], ids[at], gate_up, norm, EPS)),
            (LAUNCHES + "launch_down", (acts[pairs], ids[at], down)),
            (LAUNCHES + "launch_combine", summed),
        ]
    found = run_interpreted(calls, tmp_path)
    all_gate_ups, all_downs, all_sums = found[-3:]
    for number, (start, stop) in enumerate(bounds):
        gate_ups, downs, sums = found[3 * number : 3 * number + 3]
        pairs = slice(start * k, stop * k)
        assert torch.equal(gate_ups, all_gate_ups[pairs])
        assert torch.equal(downs, all_downs[pairs])
        assert torch.equal(sums, all_sums[start:stop])


@pytest.mark.parametrize("with_shared", [False, True], ids=["routed only", "shared expert"])
@pytest.mark.parametrize("num_rows", [1, 6])
@pytest.mark.parametrize("experts", [grouped_products, looped_experts])
def test_operations_compute_the_layer_of_the_decoder(
    experts: Experts, num_rows: int, with_shared: bool
) -> None:
    hidden, width, num_experts, k = 48, 16, 8, 3
    rows, norm, router, shared_gate, gate_up, down, shared_gate_up, shared_down = randoms(
        num_rows,
        torch.float32,
        (num_rows, hidden),
        (hidden,),
        (num_experts, hidden),
        (1, hidden),
        (num_experts, 2 * width, hidden),
        (num_experts, hidden, width),
        (2 * width, hidden),
        (hidden, width),
    )
    shared_mlp = GatedMlp(gate_up=shared_gate_up / hidden**0.5, down=shared_down / width**0.5)
    layer = SparseMlp(
        router=router / hidden**0.5,
        matrices=ExpertWeights(gate_up=gate_up / hidden**0.5, down=down / width**0.5),
        num_chosen=k,
        normalise=True,
        experts=experts,
        shared=shared_mlp if with_shared else None,
        shared_gate=shared_gate if with_shared else None,
    )
    want = rows + layer(RmsNorm(hidden, EPS, rows)(rows) * norm)
    scored = torch.cat([layer.router, shared_gate]) if with_shared else layer.router
    logits = row_product(rows, scored, norm_H=norm, eps=EPS)
    ids, weights, gate = route(logits, k, True, with_shared)
    acts = expert_gate_up(rows, ids, layer.matrices.gate_up, norm, EPS)
    outs = expert_down(acts, ids, layer.matrices.down)
    shared = None
    if with_shared:
        act = row_product(rows, shared_mlp.gate_up, norm_H=norm, eps=EPS, gated=True)
        shared = row_product(act, shared_mlp.down)
    out = combine_experts(outs, weights, rows, shared, gate if with_shared else None)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_operators_have_known_shapes() -> None:
    logits, rows, gate_up, down, norm, gate = randoms(
        1, torch.float32, (4, 9), (4, 32), (8, 24, 32), (8, 32, 12), (32,), (4, 1)
    )
    operators = torch.ops.fleet
    ids, weights, _ = route(logits, 3, True, True)
    torch.library.opcheck(operators.route.default, (logits, 3, True, True))
    acts = expert_gate_up(rows, ids, gate_up, norm, EPS)
    torch.library.opcheck(operators.expert_gate_up.default, (rows, ids, gate_up, norm, EPS))
    outs = expert_down(acts, ids, down)
    torch.library.opcheck(operators.expert_down.default, (acts, ids, down))
    torch.library.opcheck(
        operators.combine_experts.default, (outs, weights, rows, rows.clone(), gate)
    )


def test_too_many_pairs_are_refused() -> None:
    ids = torch.zeros(MAX_PAIRS + 1, 1, dtype=torch.int64)
    rows, gate_up, down = randoms(1, torch.float32, (len(ids), 4), (1, 8, 4), (1, 4, 4))
    with pytest.raises(ValueError, match="513 pairs of rows and experts; at most 512"):
        expert_gate_up(rows, ids, gate_up)
    with pytest.raises(ValueError, match="513 pairs of rows and experts; at most 512"):
        expert_down(rows, ids, down)
