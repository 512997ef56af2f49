"""Attention of a decode step, by tensor operations only: one row per request, over the pages that a
page table names.

On a GPU one kernel reads the pages in place; on other devices they are gathered, up to the size of
the table.
Legend: B rows, h query heads, k key/value heads, g = h / k, d head size, P pages of a request, L =
P x page size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import AttentionParams
from fleet.engine.torch.step_inputs import StepInputs


class StepLayout:
    """`Layout` of a decode step, whose rows and page tables are tensors of fixed shape."""

    def __init__(self, pool: KVPool, inputs: StepInputs) -> None:
        self._pool = pool
        self._slots_B = inputs.slots_B
        self._pages_BP = inputs.pages_BP
        self.positions = inputs.positions_B
        self.rope_lens: tuple[int, ...] = ()
        self._contexts_B = inputs.positions_B + 1
        self._in_place = pool.data.device.type == "cuda"
        self._seen_B11L: Tensor | None = None
        if not self._in_place:
            at_L = torch.arange(self._pages_BP.shape[1] * pool.page_size, device=pool.data.device)
            self._seen_B11L = (at_L < self._contexts_B[:, None])[:, None, None]

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        assert params == AttentionParams(scale=params.scale), (
            "a decode step has neither windows, soft caps nor sinks"
        )
        self._pool.slots_of_layer[layer].index_copy_(0, self._slots_B, kv_Nkd)
        if self._in_place:
            # needs Triton, which comes with torch for CUDA
            from fleet.engine.torch.paged_attention import attend_in_place

            return attend_in_place(
                q_Nhd,
                self._pool.slots_of_layer[layer],
                self._pages_BP,
                self._contexts_B,
                self._pool.page_size,
                params.scale,
            )
        return self._gathered(layer, q_Nhd, params.scale)

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
