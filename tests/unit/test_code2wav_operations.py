"""The operations of a GPU compute what the operations of a CPU do, and each convolution is the
fastest by measurement.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fleet.engine.torch.fastest import Fastest, FastestRow
from fleet.models.qwen3_omni.code2wav import Code2Wav, StreamState
from fleet.models.qwen3_omni.code2wav_operations import (
    CONVOLUTIONS,
    GATHERED,
    LIBRARY,
    SHIFTED,
    DecoderOperations,
    DepthwiseKernel,
    GpuOperations,
    convolve_to_one_channel,
    operations_for,
)
from tests.decoder_weights import random_codec

CHANNELS, TAPS = 96, 7
CPU = torch.device("cpu")
TOLERANCE = 1e-5
PUBLISHED = (
    ("from the transformer", 1024, 1536, 7, 1, 30),
    ("upsampling by 8", 1536, 8 * 768, 2, 1, 20),
    ("upsampling by 3", 192, 3 * 96, 2, 1, 60),
    ("unit of dilation 1", 768, 768, 7, 1, 30),
    ("unit of dilation 9", 96, 96, 7, 9, 80),
)
"""Convolutions of the published size: name, input and output channels, taps, dilation, and number
of positions.
"""


def random_convolution(
    num_windows: int, num_positions: int, channels: int, num_outputs: int, num_taps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random activations B x T x C, a kernel in channels-last memory, and its bias; outputs
    are near 1.
    """
    generator = torch.Generator().manual_seed(7)
    x_BTC = torch.randn(num_windows, num_positions, channels, generator=generator)
    kernel = torch.randn(num_outputs, channels, 1, num_taps, generator=generator)
    kernel = (kernel / (channels * num_taps) ** 0.5).contiguous(memory_format=torch.channels_last)
    return x_BTC, kernel, torch.randn(num_outputs, generator=generator)


def plain(x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int) -> Tensor:
    image = x_BTC.transpose(1, 2).unsqueeze(2)
    return F.conv2d(image, kernel, bias, dilation=(1, dilation)).squeeze(2).transpose(1, 2)


@pytest.mark.parametrize("name", [GATHERED, SHIFTED])
@pytest.mark.parametrize("seed", range(12))
def test_matrix_products_equal_the_library_for_random_shapes(seed: int, name: str) -> None:
    draw = np.random.default_rng(seed).integers
    num_taps, dilation = int(draw(1, 9)), int(draw(1, 10))
    num_positions = (num_taps - 1) * dilation + int(draw(1, 40))
    x_BTC, kernel, bias = random_convolution(
        int(draw(1, 5)), num_positions, int(draw(1, 70)), int(draw(2, 70)), num_taps
    )
    found = CONVOLUTIONS[name](x_BTC, kernel, bias, dilation)
    torch.testing.assert_close(found, plain(x_BTC, kernel, bias, dilation), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [GATHERED, SHIFTED])
@pytest.mark.parametrize("sizes", [sizes[1:] for sizes in PUBLISHED], ids=[p[0] for p in PUBLISHED])
def test_matrix_products_equal_the_library_at_the_published_sizes(
    sizes: tuple[int, int, int, int, int], name: str
) -> None:
    channels, num_outputs, num_taps, dilation, num_positions = sizes
    x_BTC, kernel, bias = random_convolution(2, num_positions, channels, num_outputs, num_taps)
    found = CONVOLUTIONS[name](x_BTC, kernel, bias, dilation)
    torch.testing.assert_close(found, plain(x_BTC, kernel, bias, dilation), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("channels", [3, 4])
def test_taps_are_gathered_from_rows_that_are_no_words_or_not_contiguous(channels: int) -> None:
    x_BTC, kernel, bias = (
        each.bfloat16() for each in random_convolution(2, 20, 2 * channels, 8, 3)
    )
    kernel = kernel[:, :channels].contiguous(memory_format=torch.channels_last)
    inputs = (x_BTC[..., :channels], x_BTC[..., :channels].contiguous())
    one, other = (CONVOLUTIONS[GATHERED](each, kernel, bias, 2) for each in inputs)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, plain(inputs[1], kernel, bias, 2), rtol=0, atol=0.02)


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


def test_depthwise_convolution_and_snake_of_a_gpu_equal_those_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    x_BTC, taps_KC, bias, beta = (
        torch.randn(shape, generator=generator) for shape in ((3, 20, 24), (7, 24), (24,), (24,))
    )
    kernel = DepthwiseKernel(taps_KC, bias, bias / 7)
    slow, fast = DecoderOperations(), GpuOperations()
    torch.testing.assert_close(
        fast.convolve_depthwise(x_BTC, kernel), slow.convolve_depthwise(x_BTC, kernel)
    )
    rows, parameters = x_BTC.flatten(0, 1), (bias.exp(), (-beta).exp())
    torch.testing.assert_close(fast.snake(rows, *parameters), slow.snake(rows, *parameters))
    assert all(
        torch.equal(one, other)
        for one, other in zip(fast.separate(rows), slow.separate(rows), strict=True)
    )


def streamed(
    decoder: Code2Wav, codes_BTQ: NDArray[np.int32], cuts: Sequence[int]
) -> tuple[list[StreamState], NDArray[np.float32]]:
    """Decode windows of these numbers of frames; return the last states and all samples."""
    states = [decoder.open()] * len(codes_BTQ)
    waves: list[NDArray[np.float32]] = []
    start = 0
    for num_frames in cuts:
        states, wave = decoder.decode(states, codes_BTQ[:, start : start + num_frames])
        waves.append(wave)
        start += num_frames
    return states, np.concatenate(waves, axis=1)


def random_codes(num_windows: int, num_frames: int) -> NDArray[np.int32]:
    source = np.random.default_rng(num_windows)
    return source.integers(0, 128, (num_windows, num_frames, 16), dtype=np.int32)


@pytest.mark.parametrize("num_windows", [1, 3])
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_decoder_with_operations_of_a_gpu_equals_that_of_a_cpu(name: str, num_windows: int) -> None:
    codes_BTQ = random_codes(num_windows, 9)
    want_states, want = streamed(random_codec(), codes_BTQ, (2, 4, 3))
    states, wave = streamed(random_codec(GpuOperations(default=name)), codes_BTQ, (2, 4, 3))
    assert np.abs(want).max() > 0.05 and (np.abs(want) < 1).mean() > 0.9
    np.testing.assert_allclose(wave, want, rtol=0, atol=TOLERANCE)
    for state, want_state in zip(states, want_states, strict=True):
        assert state.num_frames == want_state.num_frames == 9
        torch.testing.assert_close(state.carried, want_state.carried, rtol=1e-4, atol=1e-4)


def test_cpu_has_its_own_operations() -> None:
    assert type(operations_for(CPU)) is DecoderOperations
    assert isinstance(operations_for(torch.device("meta")), GpuOperations)


class NamedFastest(Fastest):
    """Chooser that measures nothing, and chooses the candidate of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(CPU)
        self.name = name
        self.keys: list[str] = []

    def choose(self, key: str, candidates: object, default: str | None = None) -> str:
        self.keys.append(key)
        assert default == GATHERED
        return self.name


def test_each_shape_is_measured_once_and_only_while_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[str] = []
    for name, convolve in list(CONVOLUTIONS.items()):
        monkeypatch.setitem(
            CONVOLUTIONS,  # pyright: ignore[reportArgumentType]
            name,
            lambda *args, name=name, convolve=convolve: used.append(name) or convolve(*args),
        )
    fastest = NamedFastest(SHIFTED)
    operations = GpuOperations(fastest)
    small, large = random_convolution(1, 20, 8, 8, 3), random_convolution(2, 20, 8, 8, 3)
    operations.convolve(*small)
    with operations.measured():
        operations.convolve(*small)
        operations.convolve(*small)
        operations.convolve(*small, dilation=2)
    operations.convolve(*small)
    operations.convolve(*large)
    assert used == [GATHERED, SHIFTED, SHIFTED, SHIFTED, SHIFTED, GATHERED]
    assert fastest.keys == [
        f"convolution of 1 x 20 positions, 8 to 8 channels, 3 taps, dilation {dilation}, "
        "torch.float32"
        for dilation in (1, 2)
    ]


def test_all_implementations_pass_the_comparison_of_a_measurement() -> None:
    fastest = Fastest(CPU)
    operations = GpuOperations(fastest)
    with operations.measured():
        operations.convolve(*random_convolution(2, 40, 16, 24, 7), dilation=3)
    rows: list[FastestRow] = fastest.table()
    assert [row.candidate for row in rows] == [LIBRARY, GATHERED, SHIFTED]
    assert all(isinstance(row.outcome, float) for row in rows)
