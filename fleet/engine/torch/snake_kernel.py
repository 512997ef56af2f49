"""The activation x + sin(alpha x)^2 / beta as one Triton kernel: reads each number once, writes it
once, and rounds once.

Needs Triton, which comes with torch for CUDA. The kernel has been compiled for NVIDIA's sm_90 and
run in Triton's interpreter; its speed on a GPU is not measured. Slow twin: the same in four torch
operations.
Legend: N rows, C columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of elements that a program of the kernel computes."""


@triton.jit
def activate_elements(  # pyright: ignore
    x_ptr,
    alpha_ptr,
    inverse_beta_ptr,
    out_ptr,
    num_elements,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the activation of contiguous rows. Shapes: `x` and `out` [N, C], parameters [C]."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    at = first + offset
    is_element = at < num_elements
    column = ((first % COLUMNS).to(tl.int32) + offset) % COLUMNS
    x = tl.load(x_ptr + at, mask=is_element, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr + column).to(tl.float32)
    inverse_beta = tl.load(inverse_beta_ptr + column).to(tl.float32)
    sine = tl.sin(x * alpha)
    out = x + sine * sine * inverse_beta
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_element)


def activate_snake(x_NC: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
    """Return x + sin(alpha x)^2 x `inverse_beta`. All tensors are contiguous; `alpha` and
    `inverse_beta` have C numbers.
    """
    assert x_NC.is_contiguous() and alpha.is_contiguous() and inverse_beta.is_contiguous()
    columns = x_NC.shape[1]
    assert len(alpha) == len(inverse_beta) == columns
    out = torch.empty_like(x_NC)
    grid = (triton.cdiv(x_NC.numel(), BLOCK),)
    activate_elements[grid](
        x_NC, alpha, inverse_beta, out, x_NC.numel(), COLUMNS=columns, BLOCK=BLOCK
    )
    return out
