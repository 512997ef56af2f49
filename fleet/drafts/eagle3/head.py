"""The draft head as a torch module, independent of KV pages and training: callers pass attention
and embeddings.

Source: vLLM 0.32, `llama_eagle3.py`. Legend: see the package.
"""

import math
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.drafts.eagle3.config import NUM_TAPS, Eagle3Config
from fleet.drafts.eagle3.vocabulary import check_vocabulary
from fleet.engine.torch.layout import AttentionParams
from fleet.engine.torch.linear import linear

Attend = Callable[[Tensor, Tensor, AttentionParams], Tensor]
"""Attention function of one layer: queries [N, h, d], keys and values [N, 2 x k, d] (keys first) ->
[N, h x d].

In the engine `partial(layout.attend, layer)` of a step's layout, with the head's layer of the KV
pool; in training `UnrolledAttention`.
"""


def weight_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a head by name. Queries, keys and values share one matrix,
    and so do gate and up.
    """
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    return {
        "fc": (hidden, NUM_TAPS * hidden),
        "embedding_norm": (hidden,),
        "hidden_norm": (hidden,),
        "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, 2 * hidden),
        "out": (hidden, heads),
        "post_norm": (hidden,),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "norm": (hidden,),
        "lm_head": (config.draft_vocab_size, hidden),
    }


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head: a decoder layer with its input projection, norms and output head.

    `vocabulary_D`: the target's id of each draft id. `seed`: seed of the initial weights; equal
    seeds give equal bytes on every device. `target_head_VH`, `target_norm_H`: the target's output
    head and final norm as initial values, a good start since the head predicts the same tokens;
    None for random ones.
    Raises: ConfigError if the vocabulary does not fit the configuration.
    """

    vocabulary_D: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        vocabulary_D: Tensor,
        *,
        seed: int = 0,
        device: torch.device | None = None,
        target_head_VH: Tensor | None = None,
        target_norm_H: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_vocabulary(vocabulary_D, config.draft_vocab_size, config.vocab_size)
        self.config = config
        drawn = {name: _drawn(name, shape, seed) for name, shape in weight_shapes(config).items()}
        if target_head_VH is not None:
            drawn["lm_head"] = target_head_VH.detach()[vocabulary_D.to(target_head_VH.device)]
        if target_norm_H is not None:
            drawn["norm"] = target_norm_H.detach().clone()
        ready = {
            name: nn.Parameter(weight.to(device, config.torch_dtype))
            for name, weight in drawn.items()
        }
        self.fc = ready["fc"]
        self.embedding_norm = ready["embedding_norm"]
        self.hidden_norm = ready["hidden_norm"]
        self.qkv = ready["qkv"]
        self.out = ready["out"]
        self.post_norm = ready["post_norm"]
        self.gate_up = ready["gate_up"]
        self.down = ready["down"]
        self.norm = ready["norm"]
        self.lm_head = ready["lm_head"]
        self.register_buffer("vocabulary_D", vocabulary_D.long().to(device), persistent=False)
        self._params = AttentionParams(scale=config.head_dim**-0.5)

    def fuse(self, taps_NT: Tensor) -> Tensor:
        """Project the target's three taps (low to high) to the hidden states that the first draft
        step reads: [N, 3H] -> [N, H].
        """
        return linear(taps_NT, self.fc)

    def forward(
        self, embeddings_NH: Tensor, hidden_NH: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """Run the layer: [N, H] -> [N, H]. The next draft step reads the result, and `logits` are
        computed from it.

        `embeddings_NH`: embeddings of the tokens after the rows' positions. `hidden_NH`: result of
        `fuse`, or of the previous step. `attend`: attention function of the layer.
        """
        config = self.config
        normed_NH = self._normed(hidden_NH, self.hidden_norm)
        residual_NH = normed_NH if config.norm_before_residual else hidden_NH
        joined_N2H = torch.cat([self._normed(embeddings_NH, self.embedding_norm), normed_NH], -1)
        num_turned = config.num_heads + config.num_kv_heads
        heads_Nad = linear(joined_N2H, self.qkv).view(
            len(hidden_NH), num_turned + config.num_kv_heads, config.head_dim
        )
        turned_Nad = torch.cat(
            [self._turned(heads_Nad[:, :num_turned], positions_N), heads_Nad[:, num_turned:]], 1
        )
        attended_Na = attend(
            turned_Nad[:, : config.num_heads], turned_Nad[:, config.num_heads :], self._params
        )
        rows_NH = residual_NH + linear(attended_Na, self.out)
        gate_NI, up_NI = linear(self._normed(rows_NH, self.post_norm), self.gate_up).chunk(2, -1)
        return rows_NH + linear(F.silu(gate_NI) * up_NI, self.down)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Return logits over the draft vocabulary: [S, H] -> [S, D]."""
        return linear(self._normed(hidden_SH, self.norm), self.lm_head)

    def draft(self, hidden_SH: Tensor) -> Tensor:
        """Return the most likely tokens, as ids of the target: [S, H] -> int64 [S]."""
        return self.vocabulary_D[self.logits(hidden_SH).argmax(-1)]

    def _normed(self, rows_NH: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(rows_NH, (self.config.hidden_size,), weight_H, self.config.norm_eps)

    def _turned(self, heads_Nad: Tensor, positions_N: Tensor) -> Tensor:
        """Apply the rotary embedding; channel j is paired with channel j + d / 2."""
        dim = self.config.head_dim
        wide = torch.float64 if heads_Nad.dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, dim, 2, device=heads_Nad.device, dtype=wide) / dim
        angles = (positions_N[:, None].to(wide) * torch.pow(self.config.rope_theta, -exponents))[
            :, None
        ]
        cos, sin = angles.cos().to(heads_Nad.dtype), angles.sin().to(heads_Nad.dtype)
        left, right = heads_Nad.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the random initial value of a weight: ones for a norm, else normal with standard
    deviation 1 / sqrt(inputs). The generator is seeded by `seed` and the weight's name.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
