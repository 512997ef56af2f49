"""Whisper's encoder and decoder: features to encoder rows, tokens to logits.

Rows of several windows are computed together where each row is computed for itself; attention is
computed window by window, so that no window is padded to another's length.

Source: transformers 5.23, models/whisper/modeling_whisper.py.
Legend: F frames, A audio positions, W width, N rows (tokens), H heads, D head size, L layers, V
vocabulary, T text positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.models.checkpoint import WeightReader
from fleet.models.whisper.config import WhisperSizes

PREFIX = "model."
_Norm = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class WindowCache:
    """Keys and values of one window. `num_rows`: decoder positions computed so far.

    Shapes: `audio` [L, 2, H, A, D] and `text` [L, 2, H, T, D], keys before values.
    """

    audio: Tensor
    text: Tensor
    num_rows: int = 0


class SpeechEncoder:
    """Audio encoder. A window shorter than the model's own uses the first positions."""

    def __init__(self, reader: WeightReader, sizes: WhisperSizes) -> None:
        prefix = PREFIX + "encoder."
        self._convs = [
            (reader.get(f"{prefix}conv{n}.weight"), reader.get(f"{prefix}conv{n}.bias"))
            for n in (1, 2)
        ]
        self._positions_AW = reader.get(prefix + "embed_positions.weight")
        self._layers = [
            _EncoderLayer(reader, f"{prefix}layers.{n}.", sizes.encoder_heads)
            for n in range(sizes.encoder_layers)
        ]
        self._norm = _norm(reader, prefix + "layer_norm")

    def encode(self, features_MF: Tensor) -> Tensor:
        """Return the rows of a window, one per two frames: [A, W]."""
        x = features_MF.to(self._positions_AW.dtype)[None]
        for stride, (weight, bias) in enumerate(self._convs, 1):
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        rows_AW = x[0].T + self._positions_AW[: x.shape[2]]
        for layer in self._layers:
            rows_AW = layer(rows_AW)
        return self._norm(rows_AW)


class TranscriptDecoder:
    """Text decoder with caches of keys and values."""

    def __init__(self, reader: WeightReader, sizes: WhisperSizes) -> None:
        prefix = PREFIX + "decoder."
        self._embed_VW = reader.get(prefix + "embed_tokens.weight")
        self._positions_TW = reader.get(prefix + "embed_positions.weight")
        names = [f"{prefix}layers.{n}." for n in range(sizes.decoder_layers)]
        self._layers = [_DecoderLayer(reader, name, sizes.decoder_heads) for name in names]
        self._audio_weight, self._audio_bias = _audio_projection(reader, names)
        self._norm = _norm(reader, prefix + "layer_norm")
        self._sizes = sizes

    @property
    def num_tokens(self) -> int:
        return len(self._embed_VW)

    def open(self, audio_AW: Tensor) -> WindowCache:
        """Return a new cache for a window with these encoder rows, without tokens."""
        layers, heads = self._sizes.decoder_layers, self._sizes.decoder_heads
        projected = F.linear(audio_AW, self._audio_weight, self._audio_bias)
        audio = projected.view(len(audio_AW), layers, 2, heads, -1).permute(1, 2, 3, 0, 4)
        shape = (layers, 2, heads, self._sizes.text_positions, audio.shape[-1])
        return WindowCache(audio=audio.contiguous(), text=audio.new_empty(shape))

    def next_logits(self, caches: Sequence[WindowCache], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to the cache of each window; return the logits after each window's last
        token: float32 [windows, V]. Only a window without tokens takes several at once.
        """
        counts = [len(of_window) for of_window in tokens]
        ids = [one for of_window in tokens for one in of_window]
        at = [
            cache.num_rows + n
            for cache, count in zip(caches, counts, strict=True)
            for n in range(count)
        ]
        x_NW = self._embedded(ids, at)
        for number, layer in enumerate(self._layers):
            x_NW = layer(x_NW, caches, counts, number)
        for cache, count in zip(caches, counts, strict=True):
            cache.num_rows += count
        last = torch.tensor(counts, device=x_NW.device).cumsum(0) - 1
        return F.linear(self._norm(x_NW[last]), self._embed_VW).float()

    def attention(
        self, cache: WindowCache, tokens: Sequence[int], heads: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Compute a window's tokens again, all at once, which overwrites the text in its cache.
        Return the logits after each token (float32 [N, V]) and the attention of each token's row to
        the audio (float32 [heads, N, A]).

        `heads`: layer and number of each head.
        """
        cache.num_rows = 0
        x_NW = self._embedded(tokens, range(len(tokens)))
        weights: dict[tuple[int, int], Tensor] = {}
        for number, layer in enumerate(self._layers):
            x_NW = layer.add_text(x_NW, [cache], [len(tokens)], number)
            for head in (one for layer_number, one in heads if layer_number == number):
                weights[number, head] = layer.audio_weights(x_NW, cache.audio[number, 0], head)
            x_NW = layer.add_audio(x_NW, [cache], [len(tokens)], number)
        cache.num_rows = len(tokens)
        logits_NV = F.linear(self._norm(x_NW), self._embed_VW).float()
        return logits_NV, torch.stack([weights[head] for head in heads])

    def _embedded(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        device = self._embed_VW.device
        rows_NW = self._embed_VW[torch.tensor(ids, device=device)]
        return rows_NW + self._positions_TW[torch.tensor(positions, device=device)]


class _EncoderLayer:
    def __init__(self, reader: WeightReader, name: str, heads: int) -> None:
        self._own = _SelfProjection(reader, name + "self_attn.")
        self._out = _linear(reader, name + "self_attn.out_proj")
        self._own_norm = _norm(reader, name + "self_attn_layer_norm")
        self._mlp = _Mlp(reader, name)
        self._heads = heads

    def __call__(self, x_AW: Tensor) -> Tensor:
        q, k, v = self._own(self._own_norm(x_AW)).chunk(3, -1)
        q, k, v = (_heads(part, self._heads) for part in (q, k, v))
        x_AW = x_AW + self._out(_rows(F.scaled_dot_product_attention(q, k, v)))
        return x_AW + self._mlp(x_AW)


class _DecoderLayer:
    def __init__(self, reader: WeightReader, name: str, heads: int) -> None:
        self._own = _SelfProjection(reader, name + "self_attn.")
        self._own_out = _linear(reader, name + "self_attn.out_proj")
        self._own_norm = _norm(reader, name + "self_attn_layer_norm")
        self._query = _linear(reader, name + "encoder_attn.q_proj")
        self._audio_out = _linear(reader, name + "encoder_attn.out_proj")
        self._audio_norm = _norm(reader, name + "encoder_attn_layer_norm")
        self._mlp = _Mlp(reader, name)
        self._heads = heads

    def __call__(
        self, x_NW: Tensor, caches: Sequence[WindowCache], counts: Sequence[int], number: int
    ) -> Tensor:
        x_NW = self.add_text(x_NW, caches, counts, number)
        return self.add_audio(x_NW, caches, counts, number)

    def add_text(
        self, x_NW: Tensor, caches: Sequence[WindowCache], counts: Sequence[int], number: int
    ) -> Tensor:
        """Return `x_NW` plus each row's attention to the text of its window; write the rows' keys
        and values to the caches. `counts`: rows of each window. `number`: number of this layer.
        """
        own = self._own(self._own_norm(x_NW)).split(list(counts))
        mixed = [
            self._attend_text(rows, cache, number) for rows, cache in zip(own, caches, strict=True)
        ]
        return x_NW + self._own_out(torch.cat(mixed))

    def add_audio(
        self, x_NW: Tensor, caches: Sequence[WindowCache], counts: Sequence[int], number: int
    ) -> Tensor:
        """Return `x_NW` plus each row's attention to the audio of its window, plus the layer's MLP.
        Parameters as in `add_text`.
        """
        queries = self._query(self._audio_norm(x_NW)).split(list(counts))
        mixed = [
            self._attend_audio(rows, cache, number)
            for rows, cache in zip(queries, caches, strict=True)
        ]
        x_NW = x_NW + self._audio_out(torch.cat(mixed))
        return x_NW + self._mlp(x_NW)

    def audio_weights(self, x_NW: Tensor, keys_HAD: Tensor, head: int) -> Tensor:
        """Return how one head's attention is spread over the audio: float32 [N, A]."""
        queries_HND = _heads(self._query(self._audio_norm(x_NW)), self._heads)[0]
        scores_NA = queries_HND[head] @ keys_HAD[head].T
        return (scores_NA.float() * keys_HAD.shape[-1] ** -0.5).softmax(-1)

    def _attend_text(self, rows: Tensor, cache: WindowCache, number: int) -> Tensor:
        end = cache.num_rows + len(rows)
        assert len(rows) == 1 or not cache.num_rows, "several tokens after the first ones"
        q, k, v = (_heads(part, self._heads) for part in rows.chunk(3, -1))
        text = cache.text[number]
        text[0, :, cache.num_rows : end] = k[0]
        text[1, :, cache.num_rows : end] = v[0]
        keys, values = text[:, None, :, :end]
        return _rows(F.scaled_dot_product_attention(q, keys, values, is_causal=len(rows) > 1))

    def _attend_audio(self, rows: Tensor, cache: WindowCache, number: int) -> Tensor:
        keys, values = cache.audio[number][:, None]
        return _rows(F.scaled_dot_product_attention(_heads(rows, self._heads), keys, values))


class _SelfProjection:
    """Queries, keys and values in one product; keys have no bias."""

    def __init__(self, reader: WeightReader, name: str) -> None:
        self._weight = reader.joined([f"{name}{part}_proj.weight" for part in "qkv"])
        query, value = reader.get(name + "q_proj.bias"), reader.get(name + "v_proj.bias")
        self._bias = torch.cat([query, torch.zeros_like(query), value])

    def __call__(self, x_NW: Tensor) -> Tensor:
        return F.linear(x_NW, self._weight, self._bias)


class _Mlp:
    def __init__(self, reader: WeightReader, name: str) -> None:
        self._norm = _norm(reader, name + "final_layer_norm")
        self._up, self._down = _linear(reader, name + "fc1"), _linear(reader, name + "fc2")

    def __call__(self, x_NW: Tensor) -> Tensor:
        return self._down(F.gelu(self._up(self._norm(x_NW))))


def _linear(reader: WeightReader, name: str) -> Callable[[Tensor], Tensor]:
    weight, bias = reader.get(name + ".weight"), reader.get(name + ".bias")
    return lambda x: F.linear(x, weight, bias)


def _norm(reader: WeightReader, name: str) -> _Norm:
    weight, bias = reader.get(name + ".weight"), reader.get(name + ".bias")
    return lambda x: F.layer_norm(x, weight.shape, weight, bias)


def _audio_projection(reader: WeightReader, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the product that turns encoder rows into keys and values of all layers, and its
    bias.
    """
    parts = [f"{name}encoder_attn.{part}_proj" for name in names for part in "kv"]
    weight = reader.joined([part + ".weight" for part in parts])
    biases = [
        reader.get(part + ".bias")
        if part.endswith("v_proj")
        else reader.empty((len(weight) // len(parts),)).zero_()
        for part in parts
    ]
    return weight, torch.cat(biases)


def _heads(rows_NW: Tensor, heads: int) -> Tensor:
    """Return rows by head: [1, H, N, D]."""
    return rows_NW.view(1, len(rows_NW), heads, -1).transpose(1, 2)


def _rows(heads_1HND: Tensor) -> Tensor:
    return heads_1HND[0].transpose(0, 1).flatten(1)
