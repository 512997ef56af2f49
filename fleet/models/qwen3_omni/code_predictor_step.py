"""The code predictor as few kernels, for decode steps on a GPU: a frame's codes are computed in 15
passes instead of 16, since the hidden state and the first code are known together.

Slow twin: `CodePredictor.predict`. Legend: S frames, H hidden size, Q codebooks, R = Q - 1 residual
codes, T new positions of each frame.
"""

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from fleet.engine.torch.kernels.draw_codes import draw_codes
from fleet.engine.torch.kernels.frame_attention import attend_frame
from fleet.engine.torch.step_inputs import DrawInputs
from fleet.models.qwen3_omni.decoder import Decoder, LayerWeights
from fleet.models.qwen3_omni.decoder_step import FusedDecoder

NUM_OPENING = 2
"""Number of a frame's positions that are known when it begins: the hidden state and the embedding
of the first code.
"""


CERTAIN, CODE_STEP = 100.0, 37


@dataclass(frozen=True, slots=True, kw_only=True)
class CertainDraws:
    """Logits of which one alone passes the cut of top-p, so that rounding changes no code; and
    noise keys. Shapes: `logits_SV` float32, `keys_S` int64, both halves of a key.
    """

    logits_SV: Tensor
    keys_S: Tensor

    @classmethod
    def of(cls, num_frames: int, heads: Tensor) -> Self:
        """Return different codes for each frame. `heads`: [R, V, H]."""
        keys_S = torch.arange(num_frames, device=heads.device)
        logits_SV = torch.zeros(num_frames, heads.shape[1], device=heads.device)
        certain_S1 = (keys_S * CODE_STEP % heads.shape[1])[:, None]
        return cls(logits_SV=logits_SV.scatter(1, certain_S1, CERTAIN), keys_S=keys_S)


class FusedCodePredictor:
    """The code predictor's passes over all codebooks of a batch of frames. Shapes: `embeddings` and
    `heads` are [R, V, H]. `top_k`, `top_p`: sampling parameters of residual codes.
    """

    def __init__(
        self, decoder: Decoder, embeddings: Tensor, heads: Tensor, *, top_k: int, top_p: float
    ) -> None:
        self._decoder, self._layers = decoder, FusedDecoder(decoder)
        self._embeddings, self._heads = embeddings, heads
        self._top_k, self._top_p = top_k, top_p
        self._caches: dict[int, list[Tensor]] = {}

    def predict(
        self, hidden_SH: Tensor, first_SH: Tensor, draws: DrawInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the residual codes of S frames, [S, R], and the sum of all code embeddings of each
        frame, [S, H].

        `hidden_SH`: the Talker's final hidden states; `first_SH`: embeddings of the first codes;
        `draws`: the frames' noise keys, by codebook.
        """
        caches = self._caches_of(len(hidden_SH))
        rows_NH = torch.stack([hidden_SH, first_SH], 1).flatten(0, 1)
        sum_SH, first, codes = first_SH, 0, list[Tensor]()
        for step in range(len(self._heads)):
            attend = partial(self._attend, caches, first)
            rows_NH, _ = self._layers.run_layers(rows_NH, attend)
            newest_SH = rows_NH if step else rows_NH[NUM_OPENING - 1 :: NUM_OPENING]
            logits_SV = self._layers.head(newest_SH, self._heads[step])
            drawn_S, rows_NH, sum_SH = draw_codes(
                logits_SV,
                draws.noise_low_BQ[:, step + 1],
                draws.noise_high_BQ[:, step + 1],
                draws.is_sampled[:, 0],
                self._embeddings[step],
                sum_SH,
                self._top_k,
                self._top_p,
            )
            codes.append(drawn_S)
            first = step + NUM_OPENING
        return torch.stack(codes, 1), sum_SH

    def trial(self, rows_SH: Tensor, certain: CertainDraws) -> tuple[Tensor, Tensor]:
        """Compute what `CodePredictor.trial` does, by fused kernels."""
        attend = partial(self._attend, self._caches_of(len(rows_SH)), 0)
        rows_NH, _ = self._layers.run_layers(rows_SH.repeat_interleave(NUM_OPENING, 0), attend)
        logits_SV = self._layers.head(rows_NH[NUM_OPENING - 1 :: NUM_OPENING], self._heads[0])
        _, drawn_SH, _ = draw_codes(
            certain.logits_SV,
            certain.keys_S,
            certain.keys_S,
            torch.ones_like(certain.keys_S),
            self._embeddings[0],
            torch.zeros_like(rows_SH),
            self._top_k,
            self._top_p,
        )
        return logits_SV, drawn_SH

    def _attend(
        self, caches: list[Tensor], first: int, number: int, qkv: Tensor, layer: LayerWeights
    ) -> Tensor:
        shape = self._decoder.shape
        return attend_frame(
            qkv,
            layer.qk_norm,
            self._decoder.rope,
            caches[number],
            first,
            shape.num_heads,
            shape.num_kv_heads,
            shape.eps,
            shape.head_dim**-0.5,
        )

    def _caches_of(self, num_frames: int) -> list[Tensor]:
        """Return each layer's keys and values for a batch of `num_frames` frames; allocated on
        first use and reused, since each pass writes what it reads.
        """
        if num_frames not in self._caches:
            shape = self._decoder.shape
            size = (num_frames, len(self._heads) + 1, 2 * shape.num_kv_heads, shape.head_dim)
            self._caches[num_frames] = [self._heads.new_zeros(size) for _ in self._decoder.layers]
        return self._caches[num_frames]
