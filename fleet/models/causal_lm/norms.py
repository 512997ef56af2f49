"""Replacement of RMS norm modules of `transformers`, which take five operations, by torch's single
operation.
"""

import torch
from torch import Tensor, nn


def fuse_norms(model: nn.Module) -> None:
    """Replace each RMS norm of the model by torch's own, if the two give the same results. The
    replacement shares the weight.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)


def _fused(norm: nn.Module) -> nn.RMSNorm | None:
    eps, weights = getattr(norm, "variance_epsilon", None), dict(norm.named_parameters())
    if not isinstance(eps, float) or list(weights) != ["weight"] or isinstance(norm, nn.RMSNorm):
        return None
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    fused = nn.RMSNorm(weight.shape, eps=eps, device=weight.device, dtype=weight.dtype)
    fused.weight = weight
    # Rows of several sizes; some variants add 1 to the weight, or divide by something else.
    rows = (
        torch.linspace(-3.0, 5.0, 4 * weight.numel(), device=weight.device)
        .view(4, *weight.shape)
        .to(weight.dtype)
    )
    rows[1] *= 100.0
    rows[2] /= 100.0
    with torch.inference_mode():
        return fused if _agree(norm(rows), fused(rows)) else None


def _agree(one: Tensor, other: Tensor) -> bool:
    tolerance = 2 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)
