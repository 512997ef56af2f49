"""A stateless, approximate codec decoder for comparison: each window is decoded with a few frames
before it.

The transformer sees `layers x (window - 1)` frames back, so a shorter left context is wrong by as
much as the signal itself. The number of samples is the stateful decoder's; only their values
differ.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import ConfigError
from fleet.models.qwen3_omni.code2wav import Code2Wav


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentFrames:
    """State of a request between windows: the last T decoded frames, `codes_TQ`, with T at most the
    left context; None before the first window.
    """

    codes_TQ: NDArray[np.int32] | None = None


class LeftContextCode2Wav:
    """Approximate codec decoder with the interface of `Code2Wav`, which decodes each window after
    `left_context_frames` earlier frames. Raises: ConfigError if there is not at least 1 such frame,
    which the seam between windows needs.
    """

    def __init__(self, decoder: Code2Wav, left_context_frames: int) -> None:
        if left_context_frames < 1:
            raise ConfigError(
                "extra.left_context: give at least 1 frame, or leave it out for exact decoding",
                param="extra",
            )
        self._decoder, self._left_context_frames = decoder, left_context_frames

    @property
    def num_codebooks(self) -> int:
        return self._decoder.num_codebooks

    @property
    def codebook_size(self) -> int:
        return self._decoder.codebook_size

    @property
    def settling_samples(self) -> int:
        return 0

    def open(self) -> RecentFrames:
        return RecentFrames()

    def group(self, state: RecentFrames) -> Hashable:
        return 0 if state.codes_TQ is None else len(state.codes_TQ)

    def num_samples(self, state: RecentFrames, num_frames: int) -> int:
        if state.codes_TQ is None:
            return self._decoder.num_samples(self._decoder.open(), num_frames)
        return num_frames * self._decoder.config.samples_per_frame

    def skip(
        self, states: Sequence[RecentFrames], codes_BTQ: NDArray[np.int32]
    ) -> list[RecentFrames]:
        return self._recent(self._with_context(states, codes_BTQ))

    def check(self) -> None:
        self._decoder.check()

    def _with_context(
        self, states: Sequence[RecentFrames], codes_BTQ: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        recent = [state.codes_TQ for state in states if state.codes_TQ is not None]
        return np.concatenate((np.stack(recent), codes_BTQ), axis=1) if recent else codes_BTQ

    def _recent(self, known_BTQ: NDArray[np.int32]) -> list[RecentFrames]:
        return [
            RecentFrames(codes_TQ=codes_TQ)
            for codes_TQ in known_BTQ[:, -self._left_context_frames :].copy()
        ]

    def decode(
        self, states: Sequence[RecentFrames], codes_BTQ: NDArray[np.int32]
    ) -> tuple[list[RecentFrames], NDArray[np.float32]]:
        known_BTQ = self._with_context(states, codes_BTQ)
        _, wave_BT = self._decoder.decode([self._decoder.open() for _ in states], known_BTQ)
        num_samples = codes_BTQ.shape[1] * self._decoder.config.samples_per_frame
        return self._recent(known_BTQ), wave_BT[:, -num_samples:]
