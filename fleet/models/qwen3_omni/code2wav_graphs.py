"""Decoding of windows without the host: on a GPU, decoder steps of the usual sizes are replayed as
captured CUDA graphs over fixed tensors.

A batch is padded to the next captured number of windows. Windows of other lengths are decoded by
the decoder itself, the slow twin of these graphs.
Legend: B windows of a step, the last ones padding; T frames of a window, Q codebooks, S elements of
a request's state.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.engine.torch.cuda_graphs import GraphCapture
from fleet.engine.torch.graph_runner import buckets_up_to
from fleet.models.qwen3_omni.code2wav_layers import WindowPass
from fleet.models.qwen3_omni.code2wav_operations import GpuOperations

log = logging.getLogger(__name__)

WindowStep = Callable[[Tensor, Tensor, WindowPass], Tensor]
"""Function that decodes windows: codes (int64, B x T x Q), the frame number at which each window
starts (int64, B), and the pass with their state. Returns samples, float32, B x samples. It reads
nothing back from the device.
"""
MAX_WINDOWS = 32
"""Most windows of a captured step, which bounds the memory of graphs. A larger batch keeps a GPU
busy without a graph.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """Size of a step. `first`: True if nothing precedes the windows."""

    num_windows: int
    num_frames: int
    first: bool


def usual_sizes(ramp: Sequence[int], max_batch: int) -> list[WindowSize]:
    """Return the sizes of steps to capture, largest first: a first window has `ramp[0]` frames, a
    later one any of the ramp's sizes. `max_batch`: most windows of a step; of a larger number than
    `MAX_WINDOWS`, no step is captured.
    """
    kinds = [*((num_frames, False) for num_frames in set(ramp)), (ramp[0], True)]
    sizes = [
        WindowSize(num_windows=num_windows, num_frames=num_frames, first=first)
        for num_windows in buckets_up_to(min(max_batch, MAX_WINDOWS))
        for num_frames, first in kinds
    ]
    return sorted(sizes, key=lambda size: -size.num_windows * size.num_frames)


class WindowBuffers:
    """Inputs and next states of steps, in memory that steps of all sizes share.

    `like`: tensor of the decoder's dtype and device. `state_size`: S. The host fills pinned memory,
    which is copied to the device without waiting. Filling it again waits for no copy: the samples
    of the step before have been read.
    """

    def __init__(
        self, sizes: Sequence[WindowSize], num_codebooks: int, state_size: int, like: Tensor
    ) -> None:
        self.device, self._num_codebooks = like.device, num_codebooks
        max_windows = max(size.num_windows for size in sizes)
        num_ints = max_windows * self._row_ints(max(size.num_frames for size in sizes))
        self._host = torch.zeros(num_ints, dtype=torch.int64, pin_memory=like.device.type == "cuda")
        self._ints = torch.zeros(num_ints, dtype=torch.int64, device=like.device)
        self._carried_BS = like.new_zeros(max_windows, state_size)
        self._nothing_1S = like.new_zeros(1, state_size)
        self._next_BS = like.new_zeros(max_windows, state_size)

    def _row_ints(self, num_frames: int) -> int:
        return num_frames * self._num_codebooks + 1

    def _rows(self, ints: Tensor, size: WindowSize) -> Tensor:
        row_ints = self._row_ints(size.num_frames)
        return ints[: size.num_windows * row_ints].view(size.num_windows, row_ints)

    def codes(self, size: WindowSize) -> Tensor:
        return self._rows(self._ints, size)[:, 1:].unflatten(1, (-1, self._num_codebooks))

    def starts(self, size: WindowSize) -> Tensor:
        return self._rows(self._ints, size)[:, 0]

    def carried(self, size: WindowSize) -> Tensor:
        if size.first:
            return self._nothing_1S.expand(size.num_windows, -1)
        return self._carried_BS[: size.num_windows]

    def next_state(self, num_windows: int) -> Tensor:
        return self._next_BS[:num_windows]

    def fill(
        self,
        size: WindowSize,
        carried: Sequence[Tensor],
        starts: Sequence[int],
        codes_BTQ: NDArray[np.int32],
    ) -> None:
        """Fill the inputs of a step. Rows that are not used decode code 0 from the start.
        `carried`: state of each window; empty for first windows.
        """
        rows = self._rows(self._host, size).numpy()
        used = len(codes_BTQ)
        rows[:used, 0] = starts
        rows[:used, 1:] = codes_BTQ.reshape(used, -1)
        rows[used:] = 0
        self._rows(self._ints, size).copy_(self._rows(self._host, size), non_blocking=True)
        if carried:
            torch.stack(list(carried), out=self._carried_BS[:used])


class WindowGraphs:
    """Steps of fixed sizes.

    `step`: function that decodes a step; captured as a graph if `captures`, else called directly.
    Convolutions of each size are measured before its capture. A size that cannot be captured, for
    example for lack of memory, is logged and left out. All graphs share the memory of the largest:
    for 32 windows of 25 frames at the published size about 3 GiB in bfloat16 (computed, not
    measured).
    """

    def __init__(
        self,
        step: WindowStep,
        operations: GpuOperations,
        buffers: WindowBuffers,
        sizes: Iterable[WindowSize],
        *,
        captures: bool,
    ) -> None:
        self._step, self._operations = step, operations
        self._buffers = buffers
        self._capture = GraphCapture(buffers.device) if captures else None
        self._runs: dict[WindowSize, Callable[[], Tensor]] = {}
        began_s = time.monotonic()
        for size in sizes:
            self._prepare(size)
        if captures:
            torch.cuda.empty_cache()  # the measurements' memory, which no graph uses
            seconds = time.monotonic() - began_s
            log.info("captured %d decoder steps in %.1f s", len(self._runs), seconds)

    def find(self, num_windows: int, num_frames: int, *, first: bool) -> WindowSize | None:
        """Return the smallest size that holds a batch; None if there is none."""
        fitting = [
            size
            for size in self._runs
            if (size.num_frames, size.first) == (num_frames, first)
            and size.num_windows >= num_windows
        ]
        return min(fitting, key=lambda size: size.num_windows, default=None)

    def run(
        self,
        size: WindowSize,
        carried: Sequence[Tensor],
        starts: Sequence[int],
        codes_BTQ: NDArray[np.int32],
    ) -> tuple[Tensor, Tensor]:
        """Decode windows in a step of a size from `find`; return the next states and the samples.
        The next run overwrites both. Arguments: see `WindowBuffers.fill`.
        """
        self._buffers.fill(size, carried, starts, codes_BTQ)
        wave_BT = self._runs[size]()
        used = len(codes_BTQ)
        return self._buffers.next_state(used), wave_BT[:used]

    @torch.inference_mode()
    def _prepare(self, size: WindowSize) -> None:
        buffers = self._buffers
        codes_BTQ, starts_B = buffers.codes(size), buffers.starts(size)

        def run() -> Tensor:
            window = WindowPass(
                buffers.carried(size),
                first=size.first,
                operations=self._operations,
                next_state_BS=buffers.next_state(size.num_windows),
            )
            return self._step(codes_BTQ, starts_B, window)

        if self._capture is None:
            self._runs[size] = run
            return
        try:
            with self._operations.measured():
                run()
            self._runs[size] = self._capture.captured(run)
        except RuntimeError as error:
            log.warning("%s is decoded without a graph: %s", size, str(error).partition("\n")[0])
