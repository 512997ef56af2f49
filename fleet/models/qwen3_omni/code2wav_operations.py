"""The operations of the codec decoder that differ between devices: convolutions and the snake
activation.

On a CPU they are those that were measured there. On a GPU a convolution is either the library's, or
matrix products of the inputs that its taps see, and a snake is torch's operations or one kernel; a
measurement decides. Operations read nothing back from the device, so that a step can be captured as
a graph.
Legend: B requests, T positions, C channels, K taps, O output channels. A kernel is O x C x 1 x K in
channels-last memory, thus one row of K x C numbers for each output channel.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fleet.engine.torch.fastest import Fastest

Convolve = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Function that convolves over T without padding: x (B x T x C), kernel, bias, dilation."""
Snake = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that computes x + sin(alpha x)^2 / beta: x (N x C), alpha, 1 / beta (C each)."""
_IM2COL_ELEMENTS = 1 << 16
"""Largest convolution, in input elements x kernel length, that a CPU computes as gathered taps and
one matrix product: below this size 2-3 times faster than torch's convolution (measured, one
thread).
"""
_WORD = torch.int64
_SEED = 1


def taps_of(x_BTC: Tensor, num_taps: int, dilation: int) -> Tensor:
    """Return the inputs of each output position, as a view: B x T x K x C."""
    num_rows, length, channels = x_BTC.shape
    row, step, channel = x_BTC.stride()
    num_outputs = length - (num_taps - 1) * dilation
    return x_BTC.as_strided(
        (num_rows, num_outputs, num_taps, channels), (row, step, dilation * step, channel)
    )


def convolve_with_library(x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
    """Convolve as a 2-D convolution of height 1, whose channels-last kernels need no
    transposition.
    """
    image = x_BTC.transpose(1, 2).unsqueeze(2)
    return F.conv2d(image, kernel, bias, dilation=(1, dilation)).squeeze(2).transpose(1, 2)


def convolve_on_cpu(x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
    if x_BTC.numel() * kernel.shape[3] > _IM2COL_ELEMENTS:
        return convolve_with_library(x_BTC, kernel, bias, dilation)
    seen = taps_of(x_BTC, kernel.shape[3], dilation).flatten(2)
    return F.linear(seen, kernel.permute(0, 2, 3, 1).flatten(1), bias)


def convolve_gathered(x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
    """Convolve in 2 operations: a copy of all taps, moved in words of 8 bytes where positions
    consist of whole words, and one matrix product.
    """
    words = x_BTC
    if x_BTC.is_contiguous() and x_BTC.shape[2] * x_BTC.itemsize % _WORD.itemsize == 0:
        words = x_BTC.view(_WORD)
    seen = taps_of(words, kernel.shape[3], dilation).flatten(2).contiguous().view(x_BTC.dtype)
    return F.linear(seen, kernel.permute(0, 2, 3, 1).flatten(1), bias)


def convolve_shifted(x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
    """Convolve in K operations: the matrix product of each tap, added to the sum of those before
    it. Copies no inputs, but rounds the sum after each tap.
    """
    num_taps = kernel.shape[3]
    num_outputs = x_BTC.shape[1] - (num_taps - 1) * dilation
    taps_KBCO = kernel[:, :, 0].permute(2, 1, 0).unsqueeze(1).expand(-1, len(x_BTC), -1, -1)
    out_BTO = torch.baddbmm(bias, x_BTC[:, :num_outputs], taps_KBCO[0])
    for tap in range(1, num_taps):
        out_BTO.baddbmm_(x_BTC[:, tap * dilation :][:, :num_outputs], taps_KBCO[tap])
    return out_BTO


def convolve_to_one_channel(
    x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1
) -> Tensor:
    """Convolve with a kernel of one output channel, in float32: one matrix product with all taps,
    whose shifted columns are added. cuDNN is slow with one output channel.
    """
    taps_KC = kernel[0, :, 0].t().float()
    products_BTK = F.linear(x_BTC.float(), taps_KC)
    num_outputs = x_BTC.shape[1] - (len(taps_KC) - 1) * dilation
    shifted = [
        products_BTK[:, tap * dilation : tap * dilation + num_outputs, tap]
        for tap in range(len(taps_KC))
    ]
    return torch.stack(shifted).sum(0).add_(bias.float()).unsqueeze(2)


class DepthwiseKernel(NamedTuple):
    """Kernel of a convolution of each channel by itself. `bias_per_tap`: `bias` / K."""

    taps_KC: Tensor
    bias: Tensor
    bias_per_tap: Tensor


class DecoderOperations:
    """Operations for a CPU."""

    def convolve(self, x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
        """Convolve over T without padding, for each output channel over all input channels."""
        return convolve_on_cpu(x_BTC, kernel, bias, dilation)

    def convolve_depthwise(self, x_BTC: Tensor, kernel: DepthwiseKernel) -> Tensor:
        """Convolve over T without padding, each channel by itself."""
        seen = taps_of(x_BTC, len(kernel.taps_KC), 1)
        return (seen * kernel.taps_KC).sum(2).add_(kernel.bias)

    def snake(self, x_NC: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
        """Return x + sin(alpha x)^2 / beta, with parameters per column."""
        return (x_NC * alpha).sin_().square_().mul_(inverse_beta).add_(x_NC)

    def separate(self, state_BS: Tensor) -> list[Tensor]:
        """Return copies of the rows, each in memory of its own."""
        return [row.clone() for row in state_BS]


LIBRARY, GATHERED, SHIFTED = "library", "gathered", "shifted"
CONVOLUTIONS: Mapping[str, Convolve] = {
    LIBRARY: convolve_with_library,
    GATHERED: convolve_gathered,
    SHIFTED: convolve_shifted,
}
"""Implementations of a convolution on a GPU; the first is the reference."""


def _snake_in_operations(x_NC: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
    sine = (x_NC * alpha).sin_()
    return torch.addcmul(x_NC, sine, sine * inverse_beta)


def _snake_in_a_kernel(x_NC: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
    # needs Triton, which comes with torch for CUDA
    from fleet.engine.torch.snake_kernel import activate_snake

    return activate_snake(x_NC, alpha, inverse_beta)


OPERATIONS, KERNEL = "operations", "kernel"
SNAKES: Mapping[str, Snake] = {OPERATIONS: _snake_in_operations, KERNEL: _snake_in_a_kernel}
"""Implementations of the snake activation on a GPU; the first is the reference."""
FunctionT = TypeVar("FunctionT")


class GpuOperations(DecoderOperations):
    """Operations for a GPU, with as few of them as possible. Slow twin: `DecoderOperations`.

    `fastest`: chooser of the implementations, for each shape of a convolution and each width of a
    snake. Implementations are measured only within `measured`; without a measurement, a convolution
    uses `default`, and a snake torch's operations.
    """

    def __init__(self, fastest: Fastest | None = None, default: str = GATHERED) -> None:
        self._fastest, self._default = fastest, default
        self._chosen: dict[str, str] = {}
        self._measures = False

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what is not measured yet within this context. Nothing may be captured in it."""
        self._measures = self._fastest is not None
        try:
            yield
        finally:
            self._measures = False

    def convolve(self, x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
        if len(kernel) == 1:
            return convolve_to_one_channel(x_BTC, kernel, bias, dilation)
        num_windows, num_positions, channels = x_BTC.shape
        key = (
            f"convolution of {num_windows} x {num_positions} positions, {channels} to "
            f"{len(kernel)} channels, {kernel.shape[3]} taps, dilation {dilation}, {x_BTC.dtype}"
        )
        convolve = self._fastest_of(
            key, x_BTC, CONVOLUTIONS, self._default, lambda f, x: f(x, kernel, bias, dilation)
        )
        return convolve(x_BTC, kernel, bias, dilation)

    def convolve_depthwise(self, x_BTC: Tensor, kernel: DepthwiseKernel) -> Tensor:
        seen = taps_of(x_BTC, len(kernel.taps_KC), 1)
        return torch.addcmul(kernel.bias_per_tap, seen, kernel.taps_KC).sum(2)

    def snake(self, x_NC: Tensor, alpha: Tensor, inverse_beta: Tensor) -> Tensor:
        # measured for the number of rows that comes first
        key = f"snake of {x_NC.shape[1]} columns, {x_NC.dtype}"
        snake = self._fastest_of(
            key, x_NC, SNAKES, OPERATIONS, lambda f, x: f(x, alpha, inverse_beta)
        )
        return snake(x_NC, alpha, inverse_beta)

    def separate(self, state_BS: Tensor) -> list[Tensor]:
        rows = list(state_BS.unbind())
        copies = [torch.empty_like(row) for row in rows]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            copies, rows
        )
        return copies

    def _fastest_of(
        self,
        key: str,
        x: Tensor,
        implementations: Mapping[str, FunctionT],
        default: str,
        call: Callable[[FunctionT, Tensor], Tensor],
    ) -> FunctionT:
        """Return the implementation to use for a key. `call`: function that calls an implementation
        with an input like `x`.
        """
        if key not in self._chosen and self._measures and self._fastest is not None:
            generator = torch.Generator(x.device).manual_seed(_SEED)
            noise = torch.empty_like(x).normal_(generator=generator)
            works = {
                name: partial(call, function, noise) for name, function in implementations.items()
            }
            self._chosen[key] = self._fastest.choose(key, works, default)
        return implementations[self._chosen.get(key, default)]


def operations_for(device: torch.device, fastest: Fastest | None = None) -> DecoderOperations:
    """Return the operations of a device. `fastest`: chooser of implementations on a GPU; None for
    no measurement.
    """
    return DecoderOperations() if device.type == "cpu" else GpuOperations(fastest)
