"""Check that a `transformers` model can be served in mixed batches: a position's result must depend
only on its embedding, its position, and the context of its attention.

Two positions are run in several ways, also beyond the length from which rotary embeddings are
scaled. Knows no checkpoint: the caller adds the folder's name to errors. Legend: N positions, h
query heads, k key/value heads, d head size, V vocabulary.
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
from fleet.models.causal_lm.rope import read_scaling, rope_types

NEAR, MANY_POSITIONS = 16, 4096
"""A position in a short text, and the context length assumed for models that state none."""
TOLERANCE = 0.05
"""Largest difference that counts as equal, relative to the largest number: rounding errors are far
smaller, wrong computations differ far more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Record of one layer's call of the attention function."""

    layer: int
    num_kv_heads: int
    q_Nhd: Tensor
    window: int | None


class ProbeLayout:
    """Layout for probing that stores no keys and values: each position attends to itself, and calls
    are recorded.

    The result of attention depends on the position's query, key and value. `rope_lens`: text
    lengths that scale rotary embeddings, as `Layout` has them; if empty, the model scales by
    itself.
    """

    def __init__(self, positions: Tensor, rope_lens: Sequence[int] = ()) -> None:
        self.positions, self.rope_lens = positions, rope_lens
        self.calls: list[AttentionCall] = []

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        k_Nkd, v_Nkd = kv_Nkd.chunk(2, dim=1)
        self.calls.append(
            AttentionCall(
                layer=layer, num_kv_heads=k_Nkd.shape[1], q_Nhd=q_Nhd, window=params.window
            )
        )
        groups = q_Nhd.shape[1] // k_Nkd.shape[1]
        k_Nhd, v_Nhd = k_Nkd.repeat_interleave(groups, 1), v_Nkd.repeat_interleave(groups, 1)
        turned_Nhd = F.normalize(q_Nhd + k_Nhd, dim=-1) * v_Nhd.norm(dim=-1, keepdim=True)
        return (v_Nhd + turned_Nhd).flatten(1)


@torch.inference_mode()
def probe(config: PretrainedConfig, parts: Parts, device: torch.device) -> KVShape:
    """Check that a model can be served, and return the shape of its keys and values.

    Raises: ValueError naming the part of the model that cannot be served, or the model's own
    errors.
    """
    ids = torch.tensor([config.vocab_size // 2, config.vocab_size // 3], device=device)
    first, second = torch.arange(2, device=device), torch.tensor([1, 0], device=device)
    whole = ProbeLayout(first)
    wanted_2V = parts.whole(ids, whole)
    shape = _shape_of(config, whole.calls)
    rows = parts.embed(ids)
    if not _is_close(parts.head(parts.body(rows, ProbeLayout(first))), wanted_2V):
        raise ValueError("from embeddings and positions its results differ from those for ids")
    # The first row again, behind a row of NaN, which makes every result NaN that depends on it.
    behind = ProbeLayout(second)
    last_2H = parts.body(torch.stack([torch.full_like(rows[0], torch.nan), rows[0]]), behind)
    if not last_2H[1].isfinite().all():
        raise ValueError("its layers carry state from row to row beside their attention")
    if not _is_close(behind.calls[0].q_Nhd[1], whole.calls[0].q_Nhd[0]):
        raise ValueError("it computes positions by itself")
    _check_far_rows(config, parts, rows)
    return shape


def _check_far_rows(config: PretrainedConfig, parts: Parts, rows_2H: Tensor) -> None:
    """Check that two positions, in a short and in a far longer text, give the same results in one
    batch as alone.
    """
    places, device = _far_positions(config), rows_2H.device
    alone: list[list[Tensor]] = []
    for row_H, position in zip(rows_2H, places, strict=True):
        layout = ProbeLayout(torch.tensor([position], device=device))
        alone.append([parts.body(row_H[None], layout), *(call.q_Nhd for call in layout.calls)])
    lens = [position + 1 for position in places]
    layout = ProbeLayout(torch.tensor(places[::-1], device=device), lens[::-1])
    last_2H = parts.body(rows_2H.flip(0), layout)
    together = [last_2H, *(call.q_Nhd for call in layout.calls)]
    for at, wanted in enumerate(reversed(alone)):
        if not all(
            _is_close(both[at : at + 1], own) for both, own in zip(together, wanted, strict=True)
        ):
            raise ValueError(
                "other positions of the pass change its rows, as if its rotary embeddings "
                f"({rope_types(config)}) were scaled by the longest text of a batch"
            )


def _far_positions(config: PretrainedConfig) -> tuple[int, int]:
    """Return a position of a short text, and one of a text long enough that rotary embeddings are
    scaled, if the model scales them.
    """
    scaling = read_scaling(config)
    if scaling is not None:
        return scaling.limits[0] - 1, 2 * scaling.limits[-1]
    last = int(getattr(config, "max_position_embeddings", None) or MANY_POSITIONS) - 1
    return min(NEAR, last // 2), last


def _shape_of(config: PretrainedConfig, calls: Sequence[AttentionCall]) -> KVShape:
    num_layers = int(config.num_hidden_layers)
    if sorted(one.layer for one in calls) != list(range(num_layers)):
        raise ValueError(
            f"its {num_layers} layers make {len(calls)} calls of transformers' attention interface"
        )
    _check_windows(config, [one.window for one in calls])
    sizes = {(one.num_kv_heads, one.q_Nhd.shape[-1]) for one in calls}
    if len(sizes) > 1:
        raise ValueError("its layers have keys of different sizes")
    num_kv_heads, head_dim = sizes.pop()
    return KVShape(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _check_windows(config: PretrainedConfig, windows: Sequence[int | None]) -> None:
    """Check that the model passes its sliding window to the attention function. Some architectures
    put the window only into the mask, which is not built here.
    """
    window = getattr(config, "sliding_window", None)
    if not window or window >= getattr(config, "max_position_embeddings", window + 1):
        return
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    wanted = (
        kinds.count("sliding_attention") if kinds else getattr(config, "use_sliding_window", True)
    )
    if sum(one is not None for one in windows) < int(wanted):
        raise ValueError("it does not pass its sliding window to its attention")


def _is_close(actual: Tensor, wanted: Tensor) -> bool:
    if actual.shape != wanted.shape:
        return False
    return bool((actual - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
