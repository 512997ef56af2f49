"""Sampled codes of one codebook: the kernel in Triton's interpreter against its slow twin. The twin
is compared with the code predictor in `test_frame_codes`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.kernels.draw_codes import draw_codes
from tests.unit.kernels.triton_interpreter import interpret

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

LAUNCH = "fleet.engine.torch.kernels.draw_codes_triton:launch_draw_codes"
CASES = {
    "code predictor": (5, 2048, 1024, 50, 0.8),
    "one row": (1, 2048, 40, 50, 0.8),
    "odd sizes": (7, 37, 21, 5, 0.7),
    "top-k only": (6, 100, 8, 7, 1.0),
    "top-p only": (6, 100, 8, 0, 0.9),
    "no cut": (9, 100, 8, 0, 1.0),
    "top-k of all codes": (6, 16, 8, 99, 0.5),
    "one code kept": (3, 64, 8, 1, 0.8),
    "no probability kept": (3, 64, 8, 9, 0.0),
}
"""Cases by name: frames, codebook size, hidden size, top-k, top-p."""


def make_arguments(
    frames: int, codes: int, hidden_size: int, top_k: int, top_p: float, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return arguments of `draw_codes`: most frames are sampled, and keys and flags are columns of
    a wider tensor.
    """
    generator = torch.Generator().manual_seed(frames + codes)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    ints = torch.randint(0, 2**32, (frames, 3), generator=generator)
    ints[:, 2] = torch.arange(frames) % 4 != 1
    return (
        3 * random(frames, codes),
        *ints.unbind(1),
        random(codes, hidden_size),
        random(frames, hidden_size),
        top_k,
        top_p,
    )


def assert_kernel_agrees(given: dict[str, tuple[Any, ...]], folder: Path) -> list[Tensor]:
    """Compare the kernel with its twin, and return the codes of each case."""
    outs = interpret([(LAUNCH, arguments) for arguments in given.values()], folder)
    for (name, arguments), ((codes, row, total), _) in zip(given.items(), outs, strict=True):
        want_codes, want_row, want_total = draw_codes(*arguments)
        assert codes.tolist() == want_codes.tolist(), name
        assert torch.equal(row, want_row) and torch.equal(total, want_total), name
        assert total.dtype == want_total.dtype, name
    return [result[0] for result, _ in outs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draw_kernel_agrees_with_its_twin(dtype: torch.dtype, tmp_path: Path) -> None:
    given = {name: make_arguments(*case, dtype) for name, case in CASES.items()}
    assert_kernel_agrees(given, tmp_path)


def test_draw_kernel_has_the_noise_of_the_key(tmp_path: Path) -> None:
    """Among equal logits the noise alone decides; keys at the limits of their halves are among
    those drawn.
    """
    arguments = make_arguments(24, 2048, 4, 0, 1.0, torch.float32)
    logits, low, high, is_sampled = arguments[:4]
    logits.zero_()
    is_sampled.fill_(1)
    limits = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    low[:5], high[:5] = limits, limits.flip(0)
    (codes,) = assert_kernel_agrees({"noise": arguments}, tmp_path)
    assert len(set(codes.tolist())) > 20


def test_draw_kernel_keeps_ties_and_leaves_out_infinite_logits(tmp_path: Path) -> None:
    whole = make_arguments(8, 64, 4, 6, 0.8, torch.float32)
    whole[0].round_()
    equal = make_arguments(8, 37, 4, 6, 0.8, torch.float32)
    equal[0].zero_()
    few = make_arguments(8, 64, 4, 6, 0.8, torch.float32)
    few[0][:, 3:] = -torch.inf
    few_without_top_p = (*few[:-1], 1.0)
    one = make_arguments(8, 64, 4, 6, 0.8, torch.float32)
    one[0].fill_(-torch.inf)[:, 11] = -2.0
    none = make_arguments(8, 37, 4, 6, 0.8, torch.float32)
    none[0].fill_(-torch.inf)
    given = {
        "ties at the cut": whole,
        "all equal": equal,
        "fewer finite logits than top-k": few,
        "the same without top-p": few_without_top_p,
        "one finite logit": one,
        "no finite logit": none,
    }
    codes = dict(zip(given, assert_kernel_agrees(given, tmp_path), strict=True))
    assert max(codes["fewer finite logits than top-k"]) < 3
    assert set(codes["one finite logit"].tolist()) == {11}
    assert set(codes["no finite logit"].tolist()) == {0}
    assert codes["all equal"][1] == 0, "a greedy row takes the lowest code"
