"""RMS norms of a language model are fused only if torch's fused norm gives the same rows."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fleet.models.causal_lm.norms import fuse_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_norm_shares_its_weight_and_gives_equal_rows(dtype: torch.dtype) -> None:
    norm = Qwen3RMSNorm(48, eps=1e-5).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    model = nn.ModuleDict({"norm": norm})
    fuse_norms(model)
    fused = model["norm"]
    rows = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    if dtype == torch.float32:
        assert isinstance(fused, nn.RMSNorm) and fused.weight is norm.weight
    torch.testing.assert_close(fused(rows), norm(rows))


def test_norm_of_another_formula_stays() -> None:
    norm = Gemma3RMSNorm(48)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    model = nn.ModuleDict({"norm": norm, "layer": nn.LayerNorm(48)})
    fuse_norms(model)
    assert model["norm"] is norm and isinstance(model["layer"], nn.LayerNorm)
