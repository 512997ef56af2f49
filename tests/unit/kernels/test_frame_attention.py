"""Attention within codec frames: the kernel in Triton's interpreter against its slow twin. The twin
is compared with the code predictor in `test_frame_codes`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.kernels.frame_attention import attend_frame
from fleet.models.qwen3_omni.decoder import rope_table
from tests.unit.kernels.triton_interpreter import Call, interpret

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

LAUNCH = "fleet.engine.torch.kernels.frame_attention_triton:launch_attend_frame"
EPS = 1e-6
CASES = {
    "code predictor, both first positions": (3, 16, 0, 2, 16, 8, 128),
    "code predictor, last position": (3, 16, 15, 1, 16, 8, 128),
    "one frame, first position": (1, 16, 0, 1, 4, 2, 64),
    "most positions at once": (2, 32, 0, 32, 4, 2, 64),
    "three positions in the middle": (2, 19, 6, 3, 6, 2, 80),
    "one key/value head, many query heads": (2, 5, 1, 3, 24, 1, 64),
    "room for one position": (5, 1, 0, 1, 2, 2, 2),
}
"""Cases by name: frames, positions that a frame has room for, first position, new positions, query
heads, key/value heads, head size.
"""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_arguments(
    frames: int,
    room: int,
    first: int,
    num_new: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Return arguments of `attend_frame`; the rows are columns of a wider tensor."""
    generator = torch.Generator().manual_seed(frames + room + first)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    width = (heads + 2 * kv_heads) * dim
    return (
        (3 * random(frames * num_new, width + 6))[:, :width],
        1 + random(heads + kv_heads, dim) / 4,
        rope_table(torch.rand(dim // 2, generator=generator), 1.0, room, dtype),
        random(frames, room, 2 * kv_heads, dim),
        first,
        heads,
        kv_heads,
        EPS,
        dim**-0.5,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_frame_attention_kernel_agrees_with_its_twin(dtype: torch.dtype, tmp_path: Path) -> None:
    given = [make_arguments(*case, dtype) for case in CASES.values()]
    calls: list[Call] = [(LAUNCH, arguments) for arguments in given]
    tolerance = TOLERANCES[dtype]
    outs = interpret(calls, tmp_path)
    for name, case, arguments, (out, left) in zip(CASES, CASES.values(), given, outs, strict=True):
        _, room, first, num_new, *_ = case
        cache, before = arguments[3], arguments[3].clone()
        want = attend_frame(*arguments)
        assert out.dtype == dtype and out.shape == want.shape, name
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(left[3], cache, rtol=tolerance, atol=tolerance)
        others = [at for at in range(room) if not first <= at < first + num_new]
        assert torch.equal(left[3][:, others], before[:, others]), name
        new = slice(first, first + num_new)
        assert not torch.equal(left[3][:, new], before[:, new]), name


def test_positions_at_once_are_those_one_by_one() -> None:
    qkv, *weights, cache, _, heads, kv_heads, eps, scale = make_arguments(
        3, 7, 0, 7, 4, 2, 16, torch.float32
    )
    rest = (heads, kv_heads, eps, scale)
    once_cache = cache.clone()
    once = attend_frame(qkv, *weights, once_cache, 0, *rest).unflatten(0, (3, 7))
    for at, row in enumerate(qkv.unflatten(0, (3, 7)).unbind(1)):
        out = attend_frame(row, *weights, cache, at, *rest)
        torch.testing.assert_close(out, once[:, at], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, once_cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_of_a_frame_does_not_depend_on_other_frames(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    qkv, *weights, cache, first, heads, kv_heads, eps, scale = make_arguments(
        17, 16, 3, 2, 4, 2, 64, dtype
    )
    calls: list[Call] = [
        (LAUNCH, (qkv[: 2 * n], *weights, cache[:n], first, heads, kv_heads, eps, scale))
        for n in (1, 2, 17)
    ]
    *fewer, (everything, _) = interpret(calls, tmp_path)
    for out, _ in fewer:
        assert torch.equal(out, everything[: len(out)])
