"""The Talker's code predictor: computes a frame's residual codes from its hidden state and first
code, unrolled over the codebooks and batched over requests.

Each frame is a sequence of its own: [hidden state, embedding of code 0, of code 1, ...]; each step
has its own head and embedding. Legend: S frames, H hidden size, Q codebooks, R = Q - 1 residual
codes, V codebook size, k key/value heads, g query heads per key/value head, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.core.request import Sampling
from fleet.engine.torch.experts import Experts
from fleet.engine.torch.layout import AttentionParams
from fleet.engine.torch.linear import linear
from fleet.engine.torch.noise import gumbel, gumbel_of_halves, noise_key
from fleet.engine.torch.sampling import keep_top_alike
from fleet.engine.torch.step_inputs import DrawInputs
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.code_predictor_step import (
    NUM_OPENING,
    CertainDraws,
    FusedCodePredictor,
)
from fleet.models.qwen3_omni.config import TextConfig
from fleet.models.qwen3_omni.decoder import Decoder
from fleet.models.qwen3_omni.load import load_decoder

PREFIX = "talker.code_predictor."
TOP_K, TOP_P = 50, 0.8
"""Sampling parameters of residual codes, fixed by `generate()`, as is temperature 1.0. Decoding is
greedy if the Talker's is.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameDraw:
    """Parameters with which the residual codes of one frame are sampled. `salt`: constant of the
    stage, part of the key of random numbers; `frame`: number of the frame.
    """

    sampling: Sampling
    salt: int
    frame: int


class _FrameLayout:
    """KV buffer for predicting `num_frames` frames at once: step p computes position p of every
    frame.

    Created once per number of frames and reused; the views that each layer and step write and read
    are created in advance.
    """

    def __init__(self, decoder: Decoder, num_frames: int, num_codes: int, like: Tensor) -> None:
        shape = decoder.shape
        heads, steps = shape.num_kv_heads, range(num_codes)
        caches = like.new_zeros(
            len(decoder.layers), num_frames, num_codes, 2 * heads, shape.head_dim
        )
        self._written = [[cache[:, step] for step in steps] for cache in caches]
        self._keys = [
            [cache[:, : step + 1, :heads].transpose(1, 2) for step in steps] for cache in caches
        ]
        self._values = [
            [cache[:, : step + 1, heads:].transpose(1, 2) for step in steps] for cache in caches
        ]
        self._q_shape = (num_frames, heads, -1, shape.head_dim)
        self._out_shape = (num_frames, -1)
        self._positions = [torch.full((num_frames,), step, device=like.device) for step in steps]
        self.rope_lens: tuple[int, ...] = ()
        self.step = 0

    @property
    def positions(self) -> Tensor:
        return self._positions[self.step]

    def attend(self, layer: int, q_Nhd: Tensor, kv_Nkd: Tensor, params: AttentionParams) -> Tensor:
        self._written[layer][self.step].copy_(kv_Nkd)
        keys, values = self._keys[layer][self.step], self._values[layer][self.step]
        out = F.scaled_dot_product_attention(
            q_Nhd.view(self._q_shape), keys, values, scale=params.scale
        )
        return out.reshape(self._out_shape)


class CodePredictor:
    """The Talker's code predictor. Shapes: the weights `embeddings` and `heads` are [R, V, H]."""

    def __init__(
        self, reader: WeightReader, config: TextConfig, num_codes: int, experts: Experts
    ) -> None:
        self._num_residual = num_codes - 1
        self._decoder = load_decoder(reader, PREFIX + "model.layers.", config, experts, num_codes)
        self._turns = [self._decoder.turns_at(step) for step in range(num_codes)]
        self._layouts: dict[int, _FrameLayout] = {}
        names = range(self._num_residual)
        self._embeddings = reader.stacked(
            [f"{PREFIX}model.codec_embedding.{n}.weight" for n in names]
        )
        self._heads = reader.stacked([f"{PREFIX}lm_head.{n}.weight" for n in names])
        self.fused = FusedCodePredictor(
            self._decoder, self._embeddings, self._heads, top_k=TOP_K, top_p=TOP_P
        )

    def predict(
        self, hidden_SH: Tensor, first_SH: Tensor, noise_SRV: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual codes of S frames, [S, R], and the sum of all code embeddings of each
        frame, [S, H].

        `hidden_SH`: the Talker's final hidden states; `first_SH`: embeddings of the first codes;
        `noise_SRV`: result of `noise`, None for greedy decoding.
        """
        layout = self.layout_for(len(hidden_SH))
        layout.step = 0
        self._decoder.forward(hidden_SH, layout, turns=self._turns[0])
        codes: list[Tensor] = []
        row_SH, sum_SH = first_SH, first_SH
        for step in range(self._num_residual):
            layout.step = step + 1
            last_SH, _ = self._decoder.forward(row_SH, layout, turns=self._turns[step + 1])
            logits_SV = linear(last_SH, self._heads[step]).float()
            if noise_SRV is not None:
                logits_SV = keep_top_alike(logits_SV, TOP_K, TOP_P) + noise_SRV[:, step]
            codes.append(logits_SV.argmax(-1))
            row_SH = F.embedding(codes[-1], self._embeddings[step])
            sum_SH = sum_SH + row_SH
        return torch.stack(codes, 1), sum_SH

    def predict_step(
        self, hidden_SH: Tensor, first_SH: Tensor, draws: DrawInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the same as `predict`, by tensor operations only, for use inside a CUDA graph."""
        return self.predict(hidden_SH, first_SH, self.noise_of_inputs(draws))

    def embed(self, first_SH: Tensor, residual_SR: Tensor) -> Tensor:
        """Return the sum of whole frames' code embeddings, [S, H], added in the order of
        `predict`.
        """
        sum_SH = first_SH
        for step in range(self._num_residual):
            sum_SH = sum_SH + F.embedding(residual_SR[:, step], self._embeddings[step])
        return sum_SH

    def trial(self, rows_SH: Tensor, *, is_fused: bool) -> tuple[Tensor, Tensor]:
        """Compute a share of a frame, by which the two forms of a step are compared. Return logits
        of the first residual code [S, V], and the embeddings of codes that are certain [S, H].
        """
        certain = CertainDraws.of(len(rows_SH), self._heads)
        if is_fused:
            return self.fused.trial(rows_SH, certain)
        layout, last_SH = self.layout_for(len(rows_SH)), rows_SH
        for layout.step in range(NUM_OPENING):
            last_SH, _ = self._decoder.forward(rows_SH, layout, turns=self._turns[layout.step])
        noise_SV = gumbel_of_halves(certain.keys_S, certain.keys_S, self._heads.shape[1])
        codes_S = (keep_top_alike(certain.logits_SV, TOP_K, TOP_P) + noise_SV).argmax(-1)
        return linear(last_SH, self._heads[0]), F.embedding(codes_S, self._embeddings[0])

    def layout_for(self, num_frames: int) -> _FrameLayout:
        """Return the KV buffer for a batch of `num_frames` frames; allocated on first use and
        reused.
        """
        if num_frames not in self._layouts:
            self._layouts[num_frames] = _FrameLayout(
                self._decoder, num_frames, self._num_residual + 1, self._heads
            )
        return self._layouts[num_frames]

    def noise_of_inputs(self, draws: DrawInputs) -> Tensor:
        """Return the same noise as `noise`, [S, R, V], computed with tensor operations only, for
        use inside a CUDA graph.
        """
        noise_SRV = gumbel_of_halves(
            draws.noise_low_BQ[:, 1:], draws.noise_high_BQ[:, 1:], self._heads.shape[1]
        )
        return noise_SRV * draws.is_sampled[:, None]

    def noise(self, draws: Sequence[FrameDraw], num_rows: int) -> Tensor | None:
        """Return the Gumbel noise [S, R, V] that samples residual codes when added to logits; None
        if all frames are greedy.

        Noise is zero for greedy frames, whose highest logit then wins, and for padding, the frames
        beyond `draws`. `num_rows`: number of frames S.
        """
        sampled = [row for row, plan in enumerate(draws) if plan.sampling.temperature > 0]
        if not sampled:
            return None
        num_tokens = self._heads.shape[1]
        keys = [
            noise_key(draws[row].sampling.seed, draws[row].salt, codebook, draws[row].frame)
            for row in sampled
            for codebook in range(1, self._num_residual + 1)
        ]
        sampled_noise = gumbel(keys, num_tokens, self._heads.device).view(
            len(sampled), self._num_residual, num_tokens
        )
        if len(sampled) == num_rows:
            return sampled_noise
        noise = sampled_noise.new_zeros(num_rows, self._num_residual, num_tokens)
        noise[sampled] = sampled_noise
        return noise
