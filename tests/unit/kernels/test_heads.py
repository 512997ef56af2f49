"""Norm, rotary embedding and storage of a step's heads: the kernel in Triton's interpreter against
its slow twin, and the twin against the decoder's layer.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.kernels.heads import heads_to_slots
from fleet.engine.torch.layout import AttentionParams
from fleet.engine.torch.linear import linear
from fleet.models.qwen3_omni.decoder import (
    Decoder,
    DecoderShape,
    GatedMlp,
    LayerWeights,
    RmsNorm,
    rope_table,
)
from tests.unit.kernels.triton_interpreter import Call, interpret

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

LAUNCH = "fleet.engine.torch.kernels.heads_triton:launch_heads_to_slots"
EPS, NUM_POSITIONS, NUM_SLOTS = 1e-6, 40, 24
CASES = {
    "Thinker": (3, 32, 4, 128),
    "Talker": (2, 16, 2, 128),
    "one row": (1, 4, 2, 64),
    "odd rows, head size not a power of two": (7, 6, 2, 80),
    "one key/value head": (5, 3, 1, 64),
    "own heads, smallest size": (2, 2, 2, 2),
}
"""Cases by name: rows, query heads, key/value heads, head size."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative and absolute tolerance by dtype; bfloat16 has steps of 0.8 %."""


def make_arguments(
    num_rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return arguments of `heads_to_slots`; rows, positions and slots are columns of wider
    tensors.
    """
    generator = torch.Generator().manual_seed(num_rows * heads + dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    width = (heads + 2 * kv_heads) * dim
    ints = torch.stack(
        [
            torch.randint(0, NUM_POSITIONS, (num_rows,), generator=generator),
            torch.randperm(NUM_SLOTS, generator=generator)[:num_rows],
        ],
        1,
    )
    inv_freq = torch.rand(dim // 2, generator=generator)
    return (
        (3 * random(num_rows, width + 6))[:, :width],
        1 + random(heads + kv_heads, dim) / 4,
        rope_table(inv_freq, 1.0, NUM_POSITIONS, dtype),
        ints[:, 0],
        ints[:, 1],
        random(NUM_SLOTS, 2 * kv_heads, dim),
        heads,
        kv_heads,
        EPS,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads_kernel_agrees_with_its_twin(dtype: torch.dtype, tmp_path: Path) -> None:
    given = [make_arguments(*case, dtype) for case in CASES.values()]
    calls: list[Call] = [(LAUNCH, arguments) for arguments in given]
    tolerance = TOLERANCES[dtype]
    for name, arguments, (q, left) in zip(CASES, given, interpret(calls, tmp_path), strict=True):
        before, kv_slots = arguments[5].clone(), arguments[5]
        want = heads_to_slots(*arguments)
        assert q.shape == want.shape and not torch.equal(kv_slots, before), name
        torch.testing.assert_close(q, want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(left[5], kv_slots, rtol=tolerance, atol=tolerance)
        others = sorted(set(range(NUM_SLOTS)) - set(arguments[4].tolist()))
        assert torch.equal(left[5][others], before[others]), name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads_of_a_row_do_not_depend_on_other_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    arguments = make_arguments(17, 4, 2, 64, dtype)
    calls: list[Call] = [
        (LAUNCH, (arguments[0][:n], *arguments[1:3], *(x[:n] for x in arguments[3:5]), *rest))
        for n in (1, 2, 17)
        for rest in [(arguments[5].clone(), *arguments[6:])]
    ]
    *fewer, (all_q, all_left) = interpret(calls, tmp_path)
    for q, left in fewer:
        assert torch.equal(q, all_q[: len(q)])
        slots = arguments[4][: len(q)]
        assert torch.equal(left[5][slots], all_left[5][slots])


class _RecordingLayout:
    """Layout that keeps the heads which a decoder's layer passes to attention."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.rope_lens: tuple[int, ...] = ()
        self.heads: list[Tensor] = []

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        self.heads = [q_Nhd, kv_Nkd]
        return q_Nhd.flatten(1)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_heads_are_those_of_the_decoder_layer(num_rows: int) -> None:
    heads, kv_heads, dim, hidden_size = 4, 2, 16, 24
    torch.manual_seed(0)
    layer = LayerWeights(
        input_norm=torch.rand(hidden_size),
        qkv=torch.randn((heads + 2 * kv_heads) * dim, hidden_size),
        qkv_bias=None,
        qk_norm=torch.rand(heads + kv_heads, dim),
        out=torch.randn(hidden_size, heads * dim),
        post_norm=torch.rand(hidden_size),
        mlp=GatedMlp(gate_up=torch.randn(8, hidden_size), down=torch.randn(hidden_size, 4)),
    )
    rope = rope_table(torch.rand(dim // 2), 1.0, NUM_POSITIONS, torch.float32)
    shape = DecoderShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, eps=EPS)
    layout = _RecordingLayout(torch.randint(0, NUM_POSITIONS, (num_rows,)))
    rows_NH = torch.randn(num_rows, hidden_size)
    Decoder(shape, [layer], None, rope).run_layers(rows_NH, layout)

    normed = RmsNorm(hidden_size, EPS, rows_NH)(rows_NH) * layer.input_norm
    qkv, kv_slots = linear(normed, layer.qkv), torch.zeros(NUM_SLOTS, 2 * kv_heads, dim)
    slots = torch.arange(num_rows) + 3
    q = heads_to_slots(
        qkv, layer.qk_norm, rope, layout.positions, slots, kv_slots, heads, kv_heads, EPS
    )
    torch.testing.assert_close(q, layout.heads[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv_slots[slots], layout.heads[1], rtol=1e-5, atol=1e-5)
    assert kv_slots.count_nonzero() == kv_slots[slots].count_nonzero()
