"""The convolution to one channel that GPUs run computes what the plain convolution does, with
smaller rounding errors.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fleet.models.qwen3_omni.code2wav_layers import convolve_to_one_channel

CHANNELS, TAPS = 96, 7


def random_window(num_windows: int, num_positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random float64 tensors: activations B x T x C, a kernel 1 x C x 1 x taps, and its
    bias.
    """
    generator = torch.Generator().manual_seed(7)
    shapes = ((num_windows, num_positions, CHANNELS), (1, CHANNELS, 1, TAPS), (1,))
    x_BTC, kernel, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return x_BTC, kernel / 25, bias


def plain(x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int) -> Tensor:
    image = x_BTC.transpose(1, 2).unsqueeze(2)
    return F.conv2d(image, kernel, bias, dilation=(1, dilation)).squeeze(2).transpose(1, 2)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize(("num_windows", "num_positions"), [(1, 19), (3, 480)])
def test_convolution_to_one_channel_equals_the_plain_one(
    num_windows: int, num_positions: int, dilation: int
) -> None:
    x_BTC, kernel, bias = random_window(num_windows, num_positions)
    wave = convolve_to_one_channel(x_BTC, kernel, bias, dilation)
    torch.testing.assert_close(
        wave.double(), plain(x_BTC, kernel, bias, dilation), rtol=0, atol=2e-5
    )


def test_convolution_to_one_channel_rounds_no_sample_to_bfloat16() -> None:
    x_BTC, kernel, bias = (each.bfloat16() for each in random_window(2, 200))
    exact = plain(x_BTC.double(), kernel.double(), bias.double(), 1)
    error, plain_error = (
        float((wave.double() - exact).abs().max())
        for wave in (convolve_to_one_channel(x_BTC, kernel, bias), plain(x_BTC, kernel, bias, 1))
    )
    assert error < plain_error / 100
