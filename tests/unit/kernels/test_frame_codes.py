"""Whole frames of codes, predicted with the fused operations' slow twins, against the code
predictor.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fleet.core.request import Sampling
from fleet.engine.torch.experts import looped_experts
from fleet.engine.torch.kernels.draw_codes import draw_codes
from fleet.engine.torch.kernels.frame_attention import attend_frame
from fleet.engine.torch.linear import linear
from fleet.engine.torch.noise import noise_keys
from fleet.models.qwen3_omni.code_predictor import PREFIX, TOP_K, TOP_P, CodePredictor, FrameDraw
from fleet.models.qwen3_omni.decoder import Decoder, RmsNorm
from fleet.models.qwen3_omni.load import load_decoder
from tests.decoder_weights import random_model

SALT = 5
MASK32 = 0xFFFFFFFF


class FusedPredictor:
    """A code predictor whose attention and sampling are the fused operations. The first two
    positions of a frame are computed at once.
    """

    def __init__(self) -> None:
        reader, config = random_model({})
        talker = config.talker_config
        self._num_codes: int = talker.num_code_groups
        arguments = (talker.code_predictor_config, self._num_codes, looped_experts)
        self.plain = CodePredictor(reader, *arguments)
        # random weights are equal if they are read in the same order
        reader, _ = random_model({})
        self._decoder = load_decoder(
            reader, PREFIX + "model.layers.", arguments[0], looped_experts, self._num_codes
        )
        self.hidden_size = self._decoder.hidden_size
        names = range(self._num_codes - 1)
        self._embeddings = reader.stacked(
            [f"{PREFIX}model.codec_embedding.{name}.weight" for name in names]
        )
        self._heads = reader.stacked([f"{PREFIX}lm_head.{name}.weight" for name in names])

    def predict(
        self, hidden_SH: Tensor, first_SH: Tensor, draws: Sequence[FrameDraw]
    ) -> tuple[Tensor, Tensor]:
        shape = self._decoder.shape
        caches = hidden_SH.new_zeros(
            len(self._decoder.layers),
            len(draws),
            self._num_codes,
            2 * shape.num_kv_heads,
            shape.head_dim,
        )
        keys = noise_keys(
            [draw.sampling.seed for draw in draws],
            SALT,
            self._num_codes,
            [draw.frame for draw in draws],
        )
        low_SQ = torch.tensor((keys & MASK32).astype("int64"))
        high_SQ = torch.tensor((keys >> 32).astype("int64"))
        is_sampled_S = torch.tensor([draw.sampling.temperature > 0 for draw in draws])
        rows, sum_SH, codes = torch.stack([hidden_SH, first_SH], 1).flatten(0, 1), first_SH, []
        for step, (head, table) in enumerate(zip(self._heads, self._embeddings, strict=True)):
            hidden = self._run_layers(rows, caches, step + 1 if step else 0)
            last_SH = hidden.view(len(draws), -1, hidden.shape[-1])[:, -1]
            code_S, rows, sum_SH = draw_codes(
                linear(last_SH, head),
                low_SQ[:, step + 1],
                high_SQ[:, step + 1],
                is_sampled_S,
                table,
                sum_SH,
                TOP_K,
                TOP_P,
            )
            codes.append(code_S)
        return torch.stack(codes, 1), sum_SH

    def _run_layers(self, rows: Tensor, caches: Tensor, first: int) -> Tensor:
        decoder, shape = self._decoder, self._decoder.shape
        norm, rope = RmsNorm(decoder.hidden_size, shape.eps, rows), _rope(decoder, caches.shape[2])
        for layer, cache in zip(decoder.layers, caches, strict=True):
            attended = attend_frame(
                linear(norm(rows) * layer.input_norm, layer.qkv, layer.qkv_bias),
                layer.qk_norm,
                rope,
                cache,
                first,
                shape.num_heads,
                shape.num_kv_heads,
                shape.eps,
                shape.head_dim**-0.5,
            )
            rows = rows + linear(attended, layer.out)
            rows = rows + layer.mlp(norm(rows) * layer.post_norm)
        return decoder.finish(rows)


def _rope(decoder: Decoder, num_positions: int) -> Tensor:
    return torch.stack(decoder.turns_at(torch.arange(num_positions)), 1)


@pytest.fixture(scope="module")
def predictor() -> FusedPredictor:
    return FusedPredictor()


@pytest.mark.parametrize("temperatures", [[0.9], [0.0, 0.0], [0.9, 0.0, 1.0, 0.7, 0.0]], ids=str)
def test_frame_is_the_one_that_the_code_predictor_predicts(
    predictor: FusedPredictor, temperatures: list[float]
) -> None:
    draws = [
        FrameDraw(sampling=Sampling(temperature=heat, seed=7 * row), salt=SALT, frame=row + 3)
        for row, heat in enumerate(temperatures)
    ]
    generator = torch.Generator().manual_seed(len(draws))
    shape = (2, len(draws), predictor.hidden_size)
    hidden_SH, first_SH = torch.randn(shape, generator=generator)
    noise_SRV = predictor.plain.noise(draws, len(draws))
    with torch.inference_mode():
        want_codes, want_sum = predictor.plain.predict(hidden_SH, first_SH, noise_SRV)
        codes, total = predictor.predict(hidden_SH, first_SH, draws)
    assert codes.tolist() == want_codes.tolist()
    torch.testing.assert_close(total, want_sum, rtol=1e-5, atol=1e-5)
