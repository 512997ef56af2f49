"""The streaming codec decoder: frames of codes in, samples out, nothing computed twice.

All left context (keys and values of the transformer, the inputs before each convolution) is carried
from window to window, so any cut into windows gives the samples of one whole decode: n frames make
`samples_per_frame * n - lookahead_samples`. Knows no request and no batching policy.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fleet.engine.torch.device import check_device
from fleet.engine.torch.fastest import Fastest
from fleet.models.checkpoint import CheckpointReader
from fleet.models.qwen3_omni.code2wav_config import Code2WavConfig, read_config
from fleet.models.qwen3_omni.code2wav_graphs import (
    WindowBuffers,
    WindowGraphs,
    WindowSize,
    usual_sizes,
)
from fleet.models.qwen3_omni.code2wav_layers import (
    CausalConv,
    ConvNeXtBlock,
    Repeat,
    ResidualUnit,
    SnakeBeta,
    StateLayout,
    Upsample,
    Weights,
    WindowPass,
)
from fleet.models.qwen3_omni.code2wav_operations import (
    DecoderOperations,
    GpuOperations,
    operations_for,
)
from fleet.models.qwen3_omni.code2wav_transformer import SlidingTransformer

PREFIX = "code2wav."
_DILATIONS = (1, 3, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Decoder state of a request between two windows. `num_frames`: number of decoded frames.
    `carried`: left context of all layers as one flat tensor, None before the first window.
    """

    num_frames: int = 0
    carried: Tensor | None = None


class Code2Wav:
    """The codec decoder, which decodes a batch of windows of equal length.

    `graphs`: steps of fixed sizes, with which windows of these sizes are decoded; None without any.
    """

    def __init__(
        self, config: Code2WavConfig, weights: Weights, operations: DecoderOperations | None = None
    ) -> None:
        """Load the decoder. `weights`: function that returns a weight by its name in the checkpoint
        without the prefix; all weights have the same device and dtype. `operations`: operations of
        this device; None for the usual ones, without measurement.
        """
        self.config = config
        layout = StateLayout()
        self._codes = weights("code_embedding.weight")
        self._operations = operations or operations_for(self._codes.device)
        self.graphs: WindowGraphs | None = None
        self._offset_Q = (
            torch.arange(config.num_quantizers, device=self._codes.device) * config.codebook_size
        )
        self._transformer = SlidingTransformer(weights, "pre_transformer", config, layout)
        reach_frames = layout.reach_frames
        self._upsample = [
            (
                Repeat(weights, f"upsample.{index}.0", layout),
                ConvNeXtBlock(weights, f"upsample.{index}.1", layout),
            )
            for index in range(len(config.upsampling_ratios))
        ]
        self._conv_in = CausalConv(weights, "decoder.0", layout)
        blocks = range(1, 1 + len(config.upsample_rates))
        self._blocks = [
            _DecoderBlock(weights, f"decoder.{index}.block", layout) for index in blocks
        ]
        self._snake_out = SnakeBeta(weights, f"decoder.{len(blocks) + 1}")
        self._conv_out = CausalConv(weights, f"decoder.{len(blocks) + 2}", layout)
        self._state_size = layout.size
        self._settling_frames = math.ceil(layout.reach_frames - reach_frames)

    @property
    def num_codebooks(self) -> int:
        return self.config.num_quantizers

    @property
    def codebook_size(self) -> int:
        return self.config.codebook_size

    def open(self) -> StreamState:
        return StreamState()

    @property
    def settling_samples(self) -> int:
        """Number of samples after `skip` that are not exact, since the convolutions' left context
        was not computed. Always a multiple of the samples per frame.
        """
        return self._settling_frames * self.config.samples_per_frame

    def group(self, state: StreamState) -> Hashable:
        """Return a key that is equal for requests whose windows may share a batch. First windows
        run apart, since they yield fewer samples (see `Upsample`).
        """
        return state.carried is None

    def num_samples(self, state: StreamState, num_frames: int) -> int:
        lacking = self.config.lookahead_samples if state.carried is None else 0
        return num_frames * self.config.samples_per_frame - lacking

    @torch.inference_mode()
    def capture(self, ramp: Sequence[int], max_batch: int) -> None:
        """On a GPU, capture the steps of the usual sizes as graphs, and measure their convolutions.
        Does nothing on other devices. `ramp`: see `WindowPolicy`; `max_batch`: most windows of a
        step.
        """
        if self._codes.device.type == "cuda" and isinstance(self._operations, GpuOperations):
            sizes = usual_sizes(ramp, max_batch)
            self.graphs = self.graphs_of(sizes, self._operations, captures=True)

    def graphs_of(
        self, sizes: Sequence[WindowSize], operations: GpuOperations, *, captures: bool
    ) -> WindowGraphs:
        """Return this decoder's steps of fixed sizes."""
        buffers = WindowBuffers(sizes, self.num_codebooks, self._state_size, self._codes)
        return WindowGraphs(self._step, operations, buffers, sizes, captures=captures)

    @torch.inference_mode()
    def decode(
        self, states: Sequence[StreamState], codes_BTQ: NDArray[np.int32]
    ) -> tuple[list[StreamState], NDArray[np.float32]]:
        """Decode one window of each request of a group; return the next state of each request, and
        the samples, B x samples, from -1 to 1. `states`: state of each request before the window.
        """
        num_windows, num_frames = codes_BTQ.shape[:2]
        first = states[0].carried is None
        graphs = self.graphs
        size = graphs.find(num_windows, num_frames, first=first) if graphs else None
        if graphs is None or size is None:
            window = self._window(states)
            wave_BT = self._step(*self._inputs(states, codes_BTQ), window)
            next_state_BS = window.next_state_BS
        else:
            carried = [state.carried for state in states if state.carried is not None]
            starts = [state.num_frames for state in states]
            next_state_BS, wave_BT = graphs.run(size, carried, starts, codes_BTQ)
        return self._next_states(states, num_frames, next_state_BS), wave_BT.cpu().numpy()

    @torch.inference_mode()
    def skip(
        self, states: Sequence[StreamState], codes_BTQ: NDArray[np.int32]
    ) -> list[StreamState]:
        """Return the states after windows whose samples are not needed. Runs the transformer only,
        whose context reaches far back; the convolutions' left context becomes exact again within
        `settling_samples`.
        """
        window = self._window(states)
        window.keep_all()
        self._transform(*self._inputs(states, codes_BTQ), window)
        return self._next_states(states, codes_BTQ.shape[1], window.next_state_BS)

    def check(self) -> None:
        check_device(self._codes.device)

    def _window(self, states: Sequence[StreamState]) -> WindowPass:
        stacked = [state.carried for state in states if state.carried is not None]
        shape = (len(states), self._state_size)
        carried_BS = torch.stack(stacked) if stacked else self._codes.new_zeros(shape)
        assert carried_BS.shape == shape, "first and later windows cannot share a pass"
        return WindowPass(carried_BS, first=not stacked, operations=self._operations)

    def _inputs(
        self, states: Sequence[StreamState], codes_BTQ: NDArray[np.int32]
    ) -> tuple[Tensor, Tensor]:
        device = self._codes.device
        codes = torch.from_numpy(codes_BTQ).to(device)
        return codes, torch.tensor([state.num_frames for state in states], device=device)

    def _step(self, codes_BTQ: Tensor, start_B: Tensor, window: WindowPass) -> Tensor:
        """Decode windows, from tensors to tensors; see `WindowStep`."""
        hidden_BTC = self._transform(codes_BTQ, start_B, window)
        return self._decode(hidden_BTC, window).float().clamp_(-1, 1)

    def _transform(self, codes_BTQ: Tensor, start_B: Tensor, window: WindowPass) -> Tensor:
        rows = (codes_BTQ + self._offset_Q).flatten(0, 1)
        embedded = F.embedding_bag(rows, self._codes, mode="mean")
        return self._transformer(embedded.unflatten(0, codes_BTQ.shape[:2]), window, start_B)

    def _decode(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        for repeat, mix in self._upsample:
            x_BTC = mix(repeat(x_BTC), window)
        x_BTC = self._conv_in(x_BTC, window)
        for block in self._blocks:
            x_BTC = block(x_BTC, window)
        return self._conv_out(self._snake_out(x_BTC, window.operations), window).squeeze(2)

    def _next_states(
        self, states: Sequence[StreamState], num_frames: int, next_state_BS: Tensor
    ) -> list[StreamState]:
        # Copied out of the batch, so that a request's state is freed with it and not with its batch
        # mates.
        rows = self._operations.separate(next_state_BS)
        return [
            StreamState(num_frames=state.num_frames + num_frames, carried=row)
            for state, row in zip(states, rows, strict=True)
        ]


class _DecoderBlock:
    def __init__(self, weights: Weights, name: str, layout: StateLayout) -> None:
        self._snake = SnakeBeta(weights, f"{name}.0")
        self._upsample = Upsample(weights, f"{name}.1", layout)
        self._units = [
            ResidualUnit(weights, f"{name}.{index}", layout, dilation)
            for index, dilation in enumerate(_DILATIONS, 2)
        ]

    def __call__(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        x_BTC = self._upsample(self._snake(x_BTC, window.operations), window)
        for unit in self._units:
            x_BTC = unit(x_BTC, window)
        return x_BTC


def load_code2wav(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Callable[[float], None] = lambda _: None,
    fastest: Fastest | None = None,
) -> tuple[Code2Wav, tuple[str, ...]]:
    """Load the codec decoder of a checkpoint; return it and the names of its weights, the only
    weights read.

    `progress`: function called with the loaded share, 0 to 1. `fastest`: see `operations_for`.
    Raises: ConfigError if the folder is not a Qwen3-Omni checkpoint.
    """
    config = read_config(folder)
    reader = CheckpointReader(folder, device=torch.device(device), dtype=getattr(torch, dtype))
    reader.report_to(progress, reader.under(PREFIX))
    operations = operations_for(torch.device(device), fastest)
    decoder = Code2Wav(config, lambda name: reader.get(PREFIX + name), operations)
    return decoder, tuple(reader.names)
