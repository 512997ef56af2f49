"""The codec decoder's transformer over frames: causal, with a sliding window; its keys and values
are part of the state.

Shapes, throughout: B requests, T frames of the window, C channels, H heads of D, W - 1 carried
frames.
Source: `transformers` 5.23 modeling_qwen3_omni_moe.py, `Qwen3OmniMoeCode2WavTransformerModel`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fleet.models.qwen3_omni.code2wav_config import Code2WavConfig
from fleet.models.qwen3_omni.code2wav_layers import StateLayout, Weights, WindowPass


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Rotary angles and attention mask of the frames in a batch of windows, the same for every
    layer. Shapes: `cos` and `sin` B x T x 1 x D, `mask` B x 1 x T x keys.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor


class TransformerLayer:
    """Attention and a gated MLP, both pre-normed; their layer scales are folded into the output
    projections.
    """

    def __init__(
        self, weights: Weights, name: str, config: Code2WavConfig, layout: StateLayout
    ) -> None:
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_size, self._eps = config.head_size, config.rms_norm_eps
        attention = f"{name}.self_attn"
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        self._qkv = torch.cat([weights(f"{part}.weight") for part in parts])
        self._qkv_bias = (
            torch.cat([weights(f"{part}.bias") for part in parts])
            if config.attention_bias
            else None
        )
        scale = weights(f"{name}.self_attn_layer_scale.scale")
        self._out = scale[:, None] * weights(f"{attention}.o_proj.weight")
        self._out_bias = (
            scale * weights(f"{attention}.o_proj.bias") if config.attention_bias else None
        )
        self._gate_up = torch.cat(
            (weights(f"{name}.mlp.gate_proj.weight"), weights(f"{name}.mlp.up_proj.weight"))
        )
        self._down = weights(f"{name}.mlp_layer_scale.scale")[:, None] * weights(
            f"{name}.mlp.down_proj.weight"
        )
        self._norm1 = weights(f"{name}.input_layernorm.weight")
        self._norm2 = weights(f"{name}.post_attention_layernorm.weight")
        self._slot = layout.add(config.sliding_window - 1, 2 * self._num_kv_heads * self._head_size)

    def __call__(self, x_BTC: Tensor, window: WindowPass, geometry: Geometry) -> Tensor:
        x_BTC = x_BTC + self._attend(
            F.rms_norm(x_BTC, x_BTC.shape[-1:], self._norm1, self._eps), window, geometry
        )
        gate, up = F.linear(
            F.rms_norm(x_BTC, x_BTC.shape[-1:], self._norm2, self._eps), self._gate_up
        ).chunk(2, -1)
        return x_BTC + F.linear(F.silu(gate) * up, self._down)

    def _attend(self, x_BTC: Tensor, window: WindowPass, geometry: Geometry) -> Tensor:
        num_rows, num_frames = x_BTC.shape[:2]
        rotated_heads = self._num_heads + self._num_kv_heads
        qkv = F.linear(x_BTC, self._qkv, self._qkv_bias).view(
            num_rows, num_frames, -1, self._head_size
        )
        qk = _rotate(qkv[:, :, :rotated_heads], geometry)
        kv = torch.cat((qk[:, :, self._num_heads :], qkv[:, :, rotated_heads:]), 2)
        kv = (
            window.extend(self._slot, kv.flatten(2))
            .unflatten(2, (-1, self._head_size))
            .transpose(1, 2)
        )
        mixed = F.scaled_dot_product_attention(
            qk[:, :, : self._num_heads].transpose(1, 2),
            kv[:, : self._num_kv_heads],
            kv[:, self._num_kv_heads :],
            attn_mask=geometry.mask,
            enable_gqa=self._num_heads != self._num_kv_heads,
        )
        return F.linear(mixed.transpose(1, 2).flatten(2), self._out, self._out_bias)


class SlidingTransformer:
    """The whole transformer: all layers and the final norm."""

    def __init__(
        self, weights: Weights, name: str, config: Code2WavConfig, layout: StateLayout
    ) -> None:
        layers = range(config.num_hidden_layers)
        self._layers = [
            TransformerLayer(weights, f"{name}.layers.{index}", config, layout) for index in layers
        ]
        self._norm = weights(f"{name}.norm.weight")
        self._eps = config.rms_norm_eps
        self._window_size = config.sliding_window
        exponents = (
            torch.arange(0, config.head_size, 2, device=self._norm.device).float()
            / config.head_size
        )
        self._frequencies = 1.0 / config.rope_base**exponents

    def __call__(self, x_BTC: Tensor, window: WindowPass, start_B: Tensor) -> Tensor:
        """Run all layers over a batch of windows. `start_B`: frame number at which each request's
        window starts.
        """
        geometry = self._geometry(x_BTC, start_B)
        for layer in self._layers:
            x_BTC = layer(x_BTC, window, geometry)
        return F.rms_norm(x_BTC, x_BTC.shape[-1:], self._norm, self._eps)

    def _geometry(self, x_BTC: Tensor, start_B: Tensor) -> Geometry:
        num_frames, carried = x_BTC.shape[1], self._window_size - 1
        frame_T = torch.arange(num_frames, device=x_BTC.device)
        angles = (start_B[:, None] + frame_T)[..., None] * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, :, None]
        # Key k is frame start + k - carried: seen by queries up to `carried` frames later, if it
        # exists at all.
        key_K = torch.arange(carried + num_frames, device=x_BTC.device) - carried
        behind_TK = frame_T[:, None] - key_K
        seen_BTK = (behind_TK >= 0) & (behind_TK <= carried) & (key_K >= -start_B[:, None])[:, None]
        mask = torch.zeros(seen_BTK.shape, dtype=x_BTC.dtype, device=x_BTC.device).masked_fill_(
            ~seen_BTK, float("-inf")
        )
        return Geometry(
            cos=angles.cos().to(x_BTC.dtype), sin=angles.sin().to(x_BTC.dtype), mask=mask[:, None]
        )


def _rotate(x_BTHD: Tensor, geometry: Geometry) -> Tensor:
    left, right = x_BTHD.chunk(2, -1)
    return torch.addcmul(x_BTHD * geometry.cos, torch.cat((-right, left), -1), geometry.sin)
