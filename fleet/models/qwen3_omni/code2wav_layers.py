"""The codec decoder's layers, each causal and each carrying its left context from one window to the
next.

Shapes, throughout: B requests, T positions of the window, C channels; activations lie B x T x C
(channels last). Weights are folded once at load: layer scales into the projection before them,
exp() of the snake's parameters, and transposed convolutions into plain ones. Source: `transformers`
5.23 modeling_qwen3_omni_moe.py, `Qwen3OmniMoeCode2Wav*`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fleet.models.qwen3_omni.code2wav_operations import DecoderOperations, DepthwiseKernel

Weights = Callable[[str], Tensor]
"""Function that returns a weight by its name within the decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlot:
    """Place of a layer's left context in the flat state of a request: `rows` positions x
    `channels`, beginning at element `offset`.
    """

    offset: int
    rows: int
    channels: int

    @property
    def size(self) -> int:
        return self.rows * self.channels


class StateLayout:
    """Assignment of places in a request's flat state to the layers' left contexts, made while the
    decoder is loaded.

    `size`: elements of the state so far. `positions_per_frame`: positions per codec frame in the
    layers that are added next. `reach_frames`: left context of all layers so far, in frames.
    """

    def __init__(self) -> None:
        self.size = 0
        self.positions_per_frame = 1
        self.reach_frames = 0.0

    def add(self, rows: int, channels: int) -> StateSlot:
        slot = StateSlot(offset=self.size, rows=rows, channels=channels)
        self.size += slot.size
        self.reach_frames += rows / self.positions_per_frame
        return slot


class WindowPass:
    """State of one pass over a batch of windows: supplies each layer's left context and collects
    the context for the next windows.

    `first`: True if nothing precedes the windows. `operations`: operations of the device.
    `next_state_BS`: memory for the context of the next windows; None to allocate it. Invariants:
    the state passed in is only read, so a failed pass leaves it unchanged.
    """

    def __init__(
        self,
        state_BS: Tensor,
        *,
        first: bool,
        operations: DecoderOperations,
        next_state_BS: Tensor | None = None,
    ) -> None:
        self.first = first
        self.operations = operations
        self.next_state_BS = torch.empty_like(state_BS) if next_state_BS is None else next_state_BS
        self._state_BS = state_BS

    def keep_all(self) -> None:
        """Carry the left contexts of all layers over to the next window; layers that run replace
        their own.
        """
        self.next_state_BS.copy_(self._state_BS)

    def extend(self, slot: StateSlot, x_BTC: Tensor) -> Tensor:
        """Return `x_BTC` with the slot's left context in front, and store the last positions of the
        result as the left context for the next window.
        """
        left = self._state_BS.narrow(1, slot.offset, slot.size).view(-1, slot.rows, slot.channels)
        extended = torch.cat((left, x_BTC), 1)
        self.keep(slot, extended)
        return extended

    def keep(self, slot: StateSlot, x_BTC: Tensor) -> None:
        """Store the last positions of `x_BTC` as the slot's left context for the next window."""
        carried = self.next_state_BS.narrow(1, slot.offset, slot.size).view(
            -1, slot.rows, slot.channels
        )
        carried.copy_(x_BTC[:, -slot.rows :])


def _as_kernel(weight_OCK: Tensor) -> Tensor:
    return weight_OCK.unsqueeze(2).contiguous(memory_format=torch.channels_last)


class CausalConv:
    """A causal, optionally dilated convolution. The positions before the first are zeros."""

    def __init__(
        self, weights: Weights, name: str, layout: StateLayout, *, dilation: int = 1
    ) -> None:
        weight_OCK = weights(f"{name}.conv.weight")
        self._kernel = _as_kernel(weight_OCK)
        self._bias = weights(f"{name}.conv.bias")
        self._dilation = dilation
        self._slot = layout.add((weight_OCK.shape[2] - 1) * dilation, weight_OCK.shape[1])

    def __call__(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        extended = window.extend(self._slot, x_BTC)
        return window.operations.convolve(extended, self._kernel, self._bias, self._dilation)


class DepthwiseConv:
    """A causal convolution of each channel by itself."""

    def __init__(self, weights: Weights, name: str, layout: StateLayout) -> None:
        weight_C1K = weights(f"{name}.conv.weight")
        bias = weights(f"{name}.conv.bias")
        self._kernel = DepthwiseKernel(
            taps_KC=weight_C1K.squeeze(1).t().contiguous(),
            bias=bias,
            bias_per_tap=bias / weight_C1K.shape[2],
        )
        self._slot = layout.add(weight_C1K.shape[2] - 1, weight_C1K.shape[0])

    def __call__(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        extended = window.extend(self._slot, x_BTC)
        return window.operations.convolve_depthwise(extended, self._kernel)


class Repeat:
    """A transposed convolution whose kernel is its stride: each position becomes `stride` positions
    of its own.
    """

    def __init__(self, weights: Weights, name: str, layout: StateLayout) -> None:
        weight_COK = weights(f"{name}.conv.weight")
        self.channels, self._stride = weight_COK.shape[1:]
        layout.positions_per_frame *= self._stride
        self._weight = weight_COK.permute(2, 1, 0).flatten(0, 1).contiguous()
        self._bias = weights(f"{name}.conv.bias").repeat(self._stride)

    def __call__(self, x_BTC: Tensor) -> Tensor:
        return F.linear(x_BTC, self._weight, self._bias).reshape(len(x_BTC), -1, self.channels)


class Upsample:
    """A transposed convolution with a kernel of two strides, one stride trimmed at each side.

    Output block j depends on inputs j - 1 and j: a plain convolution of two taps, `stride` x
    channels wide. Block 0 is the trimmed one, so the first window yields one block less and all
    later output lags, which is the lookahead.
    """

    def __init__(self, weights: Weights, name: str, layout: StateLayout) -> None:
        weight_COK = weights(f"{name}.conv.weight")
        channels_in, self.channels, taps = weight_COK.shape
        stride = taps // 2
        now, before = weight_COK[..., :stride], weight_COK[..., stride:]
        self._kernel = _as_kernel(torch.stack((before, now), -1).permute(2, 1, 0, 3).flatten(0, 1))
        self._bias = weights(f"{name}.conv.bias").repeat(stride)
        self._slot = layout.add(1, channels_in)
        layout.positions_per_frame *= stride

    def __call__(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        if window.first:
            window.keep(self._slot, x_BTC)
            extended = x_BTC
        else:
            extended = window.extend(self._slot, x_BTC)
        blocks = window.operations.convolve(extended, self._kernel, self._bias)
        return blocks.reshape(len(x_BTC), -1, self.channels)


class SnakeBeta:
    """The activation x + sin(alpha x)^2 / beta, with alpha and beta per channel. Source:
    https://arxiv.org/abs/2006.08195.
    """

    _TILE_ROWS = 960
    """Largest number of positions joined to one row in a layer with fewer than 64 channels, so that
    inner loops are longer. The number of joined positions divides both this number and the number
    of positions.
    """

    def __init__(self, weights: Weights, name: str) -> None:
        alpha, beta = weights(f"{name}.alpha"), weights(f"{name}.beta")
        self._channels = len(alpha)
        self._max_rows = self._TILE_ROWS if self._channels < 64 else 1
        self._alpha = alpha.float().exp().to(alpha.dtype).repeat(self._max_rows)
        self._inverse_beta = (
            (1.0 / (beta.float().exp() + 1e-9)).to(beta.dtype).repeat(self._max_rows)
        )

    def __call__(self, x_BTC: Tensor, operations: DecoderOperations) -> Tensor:
        width = math.gcd(x_BTC.shape[0] * x_BTC.shape[1], self._max_rows) * self._channels
        return operations.snake(
            x_BTC.reshape(-1, width), self._alpha[:width], self._inverse_beta[:width]
        ).view(x_BTC.shape)


class ResidualUnit:
    """The block x + pointwise(snake(dilated(snake(x)))), `dilated` being a causal convolution."""

    def __init__(self, weights: Weights, name: str, layout: StateLayout, dilation: int) -> None:
        self._snake1 = SnakeBeta(weights, f"{name}.act1")
        self._dilated = CausalConv(weights, f"{name}.conv1", layout, dilation=dilation)
        self._snake2 = SnakeBeta(weights, f"{name}.act2")
        self._weight = weights(f"{name}.conv2.conv.weight").squeeze(2)
        self._bias = weights(f"{name}.conv2.conv.bias")

    def __call__(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        activated = self._snake1(x_BTC, window.operations)
        hidden = self._snake2(self._dilated(activated, window), window.operations)
        return F.linear(hidden, self._weight, self._bias).add_(x_BTC)


class ConvNeXtBlock:
    """The block x + gamma * mlp(norm(depthwise(x))), with gamma folded into the last projection."""

    def __init__(self, weights: Weights, name: str, layout: StateLayout) -> None:
        self._depthwise = DepthwiseConv(weights, f"{name}.dwconv", layout)
        self._norm = (weights(f"{name}.norm.weight"), weights(f"{name}.norm.bias"))
        self._up = (weights(f"{name}.pwconv1.weight"), weights(f"{name}.pwconv1.bias"))
        gamma = weights(f"{name}.gamma")
        self._down = (
            gamma[:, None] * weights(f"{name}.pwconv2.weight"),
            gamma * weights(f"{name}.pwconv2.bias"),
        )

    def __call__(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        hidden = F.layer_norm(
            self._depthwise(x_BTC, window), x_BTC.shape[-1:], *self._norm, eps=1e-6
        )
        hidden = F.gelu(F.linear(hidden, *self._up))
        return F.linear(hidden, *self._down).add_(x_BTC)
