"""Rounding of matrices and rows to 8-bit floating point (e4m3), with a float32 scale per row.

The operations of torch here are the slow twins of the kernel in `fp8_triton.py`. Knows no experts
and no products.
Legend: N rows, K columns, I expert width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite value of `E4M3`. Source: OCP 8-bit Floating Point Specification 1.0, table 1."""
LEAST_SCALE = 1e-12
"""Smallest scale, so that a row of zeros is not divided by zero."""


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last dimension's rows rounded to e4m3, and each row's float32 scale, by which the
    rounded row is to be multiplied: the largest magnitude / 448.

    Shapes: [..., K] -> [..., K], [...].
    """
    wide = values.float()
    scale = (wide.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    # a conversion to e4m3 does not saturate: it makes values beyond 448 NaN
    return (wide / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def gated(gate_up_N2I: Tensor) -> Tensor:
    """Return silu(gate) x up of rows whose first half is the gate, in float32: [N, I]."""
    gate_NI, up_NI = gate_up_N2I.float().chunk(2, dim=-1)
    return F.silu(gate_NI) * up_NI
