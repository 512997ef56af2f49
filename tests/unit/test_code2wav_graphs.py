"""Decoder steps of fixed sizes, which a GPU replays as graphs, equal the decoder itself; on a CPU
the function that a GPU would capture is called directly.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.models.qwen3_omni.code2wav import Code2Wav
from fleet.models.qwen3_omni.code2wav_graphs import WindowGraphs, WindowSize, usual_sizes
from fleet.models.qwen3_omni.code2wav_operations import GpuOperations
from tests.decoder_weights import random_codec
from tests.unit.test_code2wav_operations import TOLERANCE, random_codes, streamed

RAMP, MAX_BATCH = (2, 4), 4


def with_steps_of_fixed_sizes(decoder: Code2Wav, operations: GpuOperations) -> WindowGraphs:
    """Let a decoder on a CPU decode windows of the usual sizes as on a GPU; return these steps."""
    graphs = decoder.graphs_of(usual_sizes(RAMP, MAX_BATCH), operations, captures=False)
    decoder.graphs = graphs
    return graphs


@pytest.fixture(scope="module")
def plain_decoder() -> Code2Wav:
    return random_codec(GpuOperations())


@pytest.fixture(scope="module")
def padded_decoder() -> Code2Wav:
    operations = GpuOperations()
    decoder = random_codec(operations)
    with_steps_of_fixed_sizes(decoder, operations)
    return decoder


def test_usual_sizes_are_those_of_the_ramp_and_powers_of_two() -> None:
    sizes = usual_sizes((2, 8, 8), 6)
    assert {size.num_windows for size in sizes} == {1, 2, 4, 6}
    assert {(size.num_frames, size.first) for size in sizes} == {
        (2, True),
        (2, False),
        (8, False),
    }
    assert len(sizes) == 12
    elements = [size.num_windows * size.num_frames for size in sizes]
    assert elements == sorted(elements, reverse=True)
    assert max(size.num_windows for size in usual_sizes((2,), 4096)) == 32


def test_smallest_size_that_holds_a_batch_is_used(padded_decoder: Code2Wav) -> None:
    graphs = padded_decoder.graphs
    assert graphs is not None
    assert graphs.find(3, 4, first=False) == WindowSize(num_windows=4, num_frames=4, first=False)
    assert graphs.find(1, 2, first=True) == WindowSize(num_windows=1, num_frames=2, first=True)
    assert graphs.find(1, 4, first=True) is None
    assert graphs.find(1, 3, first=False) is None
    assert graphs.find(5, 4, first=False) is None


@pytest.mark.parametrize("num_windows", [1, 2, 3, 4])
def test_padded_steps_equal_those_without_padding(
    num_windows: int, plain_decoder: Code2Wav, padded_decoder: Code2Wav
) -> None:
    # the third window has a length of no fixed size, the last one follows padding by others
    codes_BTQ, cuts = random_codes(num_windows, 15), (2, 4, 3, 4, 2)
    streamed(padded_decoder, random_codes(4, 6) % 50, (2, 4))
    want_states, want = streamed(plain_decoder, codes_BTQ, cuts)
    states, wave = streamed(padded_decoder, codes_BTQ, cuts)
    np.testing.assert_allclose(wave, want, rtol=0, atol=TOLERANCE)
    for state, want_state in zip(states, want_states, strict=True):
        assert state.num_frames == want_state.num_frames == 15
        torch.testing.assert_close(state.carried, want_state.carried, rtol=1e-4, atol=1e-4)


def test_states_of_a_batch_do_not_share_memory_with_later_steps(padded_decoder: Code2Wav) -> None:
    states, _ = streamed(padded_decoder, random_codes(2, 6), (2, 4))
    copies = [state.carried.clone() for state in states if state.carried is not None]
    streamed(padded_decoder, random_codes(4, 6), (2, 4))
    kept = [state.carried for state in states if state.carried is not None]
    assert all(torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in kept}) == len(copies) == 2


class BreakableOperations(GpuOperations):
    """Operations whose last convolution fails while `is_broken`."""

    is_broken = False

    def convolve(self, x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
        if self.is_broken and len(kernel) == 1:
            raise RuntimeError("out of memory")
        return super().convolve(x_BTC, kernel, bias, dilation)


def test_failed_step_changes_no_state(plain_decoder: Code2Wav) -> None:
    operations = BreakableOperations()
    decoder = random_codec(operations)
    with_steps_of_fixed_sizes(decoder, operations)
    codes_BTQ = random_codes(2, 6)
    states, _ = streamed(decoder, codes_BTQ[:, :2], (2,))
    operations.is_broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.decode(states, codes_BTQ[:, 2:])
    operations.is_broken = False
    _, wave = decoder.decode(states, codes_BTQ[:, 2:])
    want_states, _ = streamed(plain_decoder, codes_BTQ[:, :2], (2,))
    _, want = plain_decoder.decode(want_states, codes_BTQ[:, 2:])
    np.testing.assert_allclose(wave, want, rtol=0, atol=TOLERANCE)


def test_nothing_is_captured_on_a_cpu() -> None:
    decoder = random_codec()
    decoder.capture(RAMP, MAX_BATCH)
    assert decoder.graphs is None
