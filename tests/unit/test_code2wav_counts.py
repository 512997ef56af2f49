"""Number of operations of a step of the codec decoder with the published numbers of layers: it does
not depend on the batch, and is smaller with the operations of a GPU than on a CPU.

Each torch operation that computes is one kernel on a GPU; views and allocations are not counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fleet.models.qwen3_omni.code2wav import Code2Wav
from fleet.models.qwen3_omni.code2wav_graphs import WindowSize
from fleet.models.qwen3_omni.code2wav_operations import (
    DecoderOperations,
    GpuOperations,
    convolve_with_library,
)
from tests.decoder_weights import random_codec
from tests.unit.test_code2wav_operations import random_codes, streamed

RAMP_FRAMES, MAX_BATCH = 2, 32
MAX_OPERATIONS = 410
"""Bound of a captured step with gathered taps. The library's convolutions save 17 operations, the
kernel of the snake activation 87.
"""
NO_WORK = {
    "aten::_unsafe_view",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
}

MAY_COPY = {"aten::contiguous", "aten::flatten.using_ints", "aten::linear", "aten::reshape"}
"""Operations that may copy their input; the operations that they consist of are counted."""


class ComputeCount(TorchDispatchMode):
    """Torch dispatch mode that counts operations that compute, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.name() in MAY_COPY:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if not func.is_view and func.name() not in NO_WORK:
            self.counts[func.name()] = self.counts.get(func.name(), 0) + 1
        return func(*args, **(kwargs or {}))


def count_step(decoder: Code2Wav, num_windows: int) -> int:
    """Return the operations of a step that decodes later windows."""
    codes_BTQ = random_codes(num_windows, 2 * RAMP_FRAMES)
    states, _ = streamed(decoder, codes_BTQ[:, :RAMP_FRAMES], (RAMP_FRAMES,))
    with ComputeCount() as count:
        decoder.decode(states, codes_BTQ[:, RAMP_FRAMES:])
    return count.total


def captured(operations: GpuOperations) -> Code2Wav:
    """Return a decoder whose later windows are decoded in steps of fixed sizes."""
    decoder = random_codec(operations)
    sizes = [
        WindowSize(num_windows=num_windows, num_frames=RAMP_FRAMES, first=False)
        for num_windows in (1, MAX_BATCH)
    ]
    graphs = decoder.graphs_of(sizes, operations, captures=False)
    decoder.graphs = graphs
    return decoder


def test_step_of_32_windows_has_as_many_operations_as_of_one() -> None:
    decoder = captured(GpuOperations())
    one, many = count_step(decoder, 1), count_step(decoder, MAX_BATCH)
    assert one == many, f"{one} operations at batch 1, {many} at {MAX_BATCH}"


class LibraryOperations(DecoderOperations):
    """The operations of a CPU, with the library's convolutions."""

    def convolve(self, x_BTC: Tensor, kernel: Tensor, bias: Tensor, dilation: int = 1) -> Tensor:
        return convolve_with_library(x_BTC, kernel, bias, dilation)


@pytest.mark.parametrize("num_windows", [1, MAX_BATCH])
def test_captured_step_has_fewer_operations_than_the_twin(num_windows: int) -> None:
    fast = count_step(captured(GpuOperations()), num_windows)
    slow = count_step(random_codec(LibraryOperations()), num_windows)
    counted = f"{fast} operations, {slow} of the twin, in a step of {num_windows} windows"
    assert fast < slow and fast <= MAX_OPERATIONS, counted
