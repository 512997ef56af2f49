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
from fleet.models.checkpoint import CheckpointReader
from fleet.models.qwen3_omni.code2wav_config import Code2WavConfig, read_config
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
    """The codec decoder, which decodes a batch of windows of equal length."""

    def __init__(self, config: Code2WavConfig, weights: Weights) -> None:
        """Load the decoder. `weights`: function that returns a weight by its name in the checkpoint
        without the prefix; all weights have the same device and dtype.
        """
        self.config = config
        layout = StateLayout()
        self._codes = weights("code_embedding.weight")
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
    def decode(
        self, states: Sequence[StreamState], codes_BTQ: NDArray[np.int32]
    ) -> tuple[list[StreamState], NDArray[np.float32]]:
        """Decode one window of each request of a group; return the next state of each request, and
        the samples, B x samples, from -1 to 1. `states`: state of each request before the window.
        """
        window = WindowPass(self._carried(states), first=states[0].carried is None)
        wave_BT = self._decode(self._transform(states, codes_BTQ, window), window)
        return _next_states(states, codes_BTQ.shape[1], window), wave_BT.float().clamp_(
            -1, 1
        ).cpu().numpy()

    @torch.inference_mode()
    def skip(
        self, states: Sequence[StreamState], codes_BTQ: NDArray[np.int32]
    ) -> list[StreamState]:
        """Return the states after windows whose samples are not needed. Runs the transformer only,
        whose context reaches far back; the convolutions' left context becomes exact again within
        `settling_samples`.
        """
        carried_BS = self._carried(states)
        window = WindowPass(carried_BS, first=states[0].carried is None)
        window.next_state_BS.copy_(carried_BS)
        self._transform(states, codes_BTQ, window)
        return _next_states(states, codes_BTQ.shape[1], window)

    def check(self) -> None:
        check_device(self._codes.device)

    def _carried(self, states: Sequence[StreamState]) -> Tensor:
        stacked = [state.carried for state in states if state.carried is not None]
        shape = (len(states), self._state_size)
        carried_BS = torch.stack(stacked) if stacked else self._codes.new_zeros(shape)
        assert carried_BS.shape == shape, "first and later windows cannot share a pass"
        return carried_BS

    def _transform(
        self, states: Sequence[StreamState], codes_BTQ: NDArray[np.int32], window: WindowPass
    ) -> Tensor:
        device = self._codes.device
        codes = torch.from_numpy(codes_BTQ).to(device)
        start_B = torch.tensor([state.num_frames for state in states], device=device)
        embedded = F.embedding_bag((codes + self._offset_Q).flatten(0, 1), self._codes, mode="mean")
        return self._transformer(embedded.unflatten(0, codes.shape[:2]), window, start_B)

    def _decode(self, x_BTC: Tensor, window: WindowPass) -> Tensor:
        for repeat, mix in self._upsample:
            x_BTC = mix(repeat(x_BTC), window)
        x_BTC = self._conv_in(x_BTC, window)
        for block in self._blocks:
            x_BTC = block(x_BTC, window)
        return self._conv_out(self._snake_out(x_BTC), window).squeeze(2)


def _next_states(
    states: Sequence[StreamState], num_frames: int, window: WindowPass
) -> list[StreamState]:
    # Copied out of the batch, so that a request's state is freed with it and not with its batch
    # mates.
    rows = [row.clone() for row in window.next_state_BS]
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
        x_BTC = self._upsample(self._snake(x_BTC), window)
        for unit in self._units:
            x_BTC = unit(x_BTC, window)
        return x_BTC


def load_code2wav(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[Code2Wav, tuple[str, ...]]:
    """Load the codec decoder of a checkpoint; return it and the names of its weights, the only
    weights read.

    `progress`: function called with the loaded share, 0 to 1. Raises: ConfigError if the folder is
    not a Qwen3-Omni checkpoint.
    """
    config = read_config(folder)
    reader = CheckpointReader(folder, device=torch.device(device), dtype=getattr(torch, dtype))
    reader.report_to(progress, reader.under(PREFIX))
    return Code2Wav(config, lambda name: reader.get(PREFIX + name)), tuple(reader.names)
