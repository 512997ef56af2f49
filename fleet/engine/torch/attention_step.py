"""Attention of a captured step, by tensor operations only: each row by itself, over the pages that
its page table names. A decode step has one row per request; the rows of a prompt have equal tables.

On a GPU one kernel reads the pages in place; on other devices they are gathered, up to the size of
the table.
Legend: B rows, h query heads, k key/value heads, g = h / k, d head size, P pages of a request, L =
P x page size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.kernels.heads import heads_to_slots
from fleet.engine.torch.kernels.paged_attention import attend_in_place
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import AttentionParams
from fleet.engine.torch.step_inputs import RowInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """What turns a layer's projections into queries and keys. Shapes: `qk_norm_hd` [h + k, d], one
    row per head; `rope` [positions, 2 (cosine, signed sine), 1, d].
    """

    qk_norm_hd: Tensor
    rope: Tensor
    eps: float


class StepLayout:
    """`Layout` of a captured step, whose rows and page tables are tensors of fixed shape. The keys
    and values of all rows are stored before attention, so a row of a prompt sees those before it.
    """

    def __init__(self, pool: KVPool, inputs: RowInputs, *, is_fused: bool = False) -> None:
        """`is_fused`: True if the rows are computed by fused kernels (`attend_fused`)."""
        self._pool = pool
        self.is_fused = is_fused
        self._slots_B = inputs.slots_B
        self._pages_BP = inputs.pages_BP
        self.positions = inputs.positions_B
        self.rope_lens: tuple[int, ...] = ()
        self._in_place = pool.data.device.type == "cuda"
        self._seen_B11L: Tensor | None = None
        if not self._in_place:
            at_L = torch.arange(self._pages_BP.shape[1] * pool.page_size, device=pool.data.device)
            self._seen_B11L = (at_L <= self.positions[:, None])[:, None, None]

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        assert params == AttentionParams(scale=params.scale), (
            "a captured step has neither windows, soft caps nor sinks"
        )
        self._pool.slots_of_layer[layer].index_copy_(0, self._slots_B, kv_Nkd)
        if self._in_place:
            return attend_in_place(
                q_Nhd,
                self._pool.slots_of_layer[layer],
                self._pages_BP,
                self.positions,
                self._pool.page_size,
                params.scale,
            )
        return self._gathered(layer, q_Nhd, params.scale)

    def attend_fused(
        self, layer: int, qkv_ND: Tensor, heads: HeadWeights, params: AttentionParams
    ) -> Tensor:
        """Compute what `attend` does from queries, keys and values before their norms and rotation,
        [N, (h + 2k) x d], in three kernels. Returns [N, h x d].
        """
        slots, num_kv_heads = self._pool.slots_of_layer[layer], self._pool.shape.num_kv_heads
        q_Nhd = heads_to_slots(
            qkv_ND,
            heads.qk_norm_hd,
            heads.rope,
            self.positions,
            self._slots_B,
            slots,
            len(heads.qk_norm_hd) - num_kv_heads,
            num_kv_heads,
            heads.eps,
        )
        return attend_in_place(
            q_Nhd, slots, self._pages_BP, self.positions, self._pool.page_size, params.scale
        )

    def _gathered(self, layer: int, q_Bhd: Tensor, scale: float) -> Tensor:
        num_rows, num_heads, dim = q_Bhd.shape
        groups = self._pool.shape.num_kv_heads
        kv = (
            self._pool.pages_of_layer[layer]
            .index_select(0, self._pages_BP.flatten())
            .view(num_rows, -1, 2, groups, dim)
        )
        k_BkLd, v_BkLd = kv.permute(2, 0, 3, 1, 4).unbind(0)
        q_Bkgd = q_Bhd.view(num_rows, groups, -1, dim)
        out = F.scaled_dot_product_attention(
            q_Bkgd, k_BkLd, v_BkLd, attn_mask=self._seen_B11L, scale=scale
        )
        return out.reshape(num_rows, num_heads * dim)
