"""Whether a model computes a row from no more than that row, its position, and what its attention looks back at.

Two rows are run in each of three ways. Knows no checkpoint: whoever asks tells the folder's name with what is raised.
Legend: N rows, h query heads, k key/value heads, d head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import AttentionParams
from fleet.models.causal_lm.parts import Parts

TOLERANCE = 0.05
"""Of the largest number, for what should be the same to the last bits: rounding is far smaller, another meaning far larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one layer looked back."""

    layer: int
    num_kv_heads: int
    q_Nhd: Tensor
    window: int | None


class ProbeLayout:
    """A layout that stores nothing: each row sees itself, and what it sees hangs on its query, key and value."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.asked: list[AttentionCall] = []

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, look: AttentionParams) -> Tensor:
        k_Nkd, v_Nkd = kv_Nkd.chunk(2, dim=1)
        self.asked.append(AttentionCall(layer=layer, num_kv_heads=k_Nkd.shape[1], q_Nhd=q_Nhd, window=look.window))
        groups = q_Nhd.shape[1] // k_Nkd.shape[1]
        k_Nhd, v_Nhd = k_Nkd.repeat_interleave(groups, 1), v_Nkd.repeat_interleave(groups, 1)
        turned_Nhd = F.normalize(q_Nhd + k_Nhd, dim=-1) * v_Nhd.norm(dim=-1, keepdim=True)
        return (v_Nhd + turned_Nhd).flatten(1)


@torch.inference_mode()
def probe(config: PretrainedConfig, parts: Parts, device: torch.device) -> KVShape:
    """What a position costs in keys and values.

    Raises: ValueError saying what of the model cannot be served, or whatever the model raises.
    """
    ids = torch.tensor([config.vocab_size // 2, config.vocab_size // 3], device=device)
    first, second = torch.arange(2, device=device), torch.tensor([1, 0], device=device)
    whole = ProbeLayout(first)
    wanted_2V = parts.whole(ids, whole)
    shape = _shape_of(config, whole.asked)
    rows = parts.embed(ids)
    if not _alike(parts.head(parts.body(rows, ProbeLayout(first))), wanted_2V):
        raise ValueError("from embeddings and positions it computes something else than from ids")
    # Again the first row, now behind one that is no number, and neither is what takes anything from that.
    behind = ProbeLayout(second)
    last_2H = parts.body(torch.stack([torch.full_like(rows[0], torch.nan), rows[0]]), behind)
    if not last_2H[1].isfinite().all():
        raise ValueError("its layers carry something from row to row beside their attention")
    if not _alike(behind.asked[0].q_Nhd[1], whole.asked[0].q_Nhd[0]):
        raise ValueError("it counts positions by itself")
    return shape


def _shape_of(config: PretrainedConfig, asked: Sequence[AttentionCall]) -> KVShape:
    num_layers = int(config.num_hidden_layers)
    if sorted(one.layer for one in asked) != list(range(num_layers)):
        raise ValueError(f"its {num_layers} layers come to {len(asked)} calls of transformers' attention interface")
    _check_windows(config, [one.window for one in asked])
    sizes = {(one.num_kv_heads, one.q_Nhd.shape[-1]) for one in asked}
    if len(sizes) > 1:
        raise ValueError("its layers have keys of different sizes")
    num_kv_heads, head_dim = sizes.pop()
    return KVShape(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _check_windows(config: PretrainedConfig, windows: Sequence[int | None]) -> None:
    """Some architectures tell their window to the mask alone, of which there is none here."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= getattr(config, "max_position_embeddings", window + 1):
        return
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    wanted = kinds.count("sliding_attention") if kinds else getattr(config, "use_sliding_window", True)
    if sum(one is not None for one in windows) < int(wanted):
        raise ValueError("it does not tell its attention the sliding window")


def _alike(ours: Tensor, wanted: Tensor) -> bool:
    if ours.shape != wanted.shape:
        return False
    return bool((ours - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
