"""The audio tower in training: the encoder of `transformers`, computed for whole batches, and a CTC
head on it.

Speech has about a dozen symbols a second and the tower 13 positions, so each position has two slots
(CTC time steps), which CTC aligns with the symbols. The slots are computed from the input of the
tower's last layer, so that this layer is free to produce embeddings for the Thinker.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
)

from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import SYMBOLS
from fleet.lab.pocket.hearing.features import LogMelBatch
from fleet.lab.pocket.train.loop import initialise

BLANK = len(SYMBOLS)
SLOTS = 2
"""Number of CTC time steps per position of the tower."""
CHUNK_FRAMES, CHUNK_POSITIONS = 100, 13


class Hearing(nn.Module):
    """Module of the audio tower, with weights named as in the Thinker of `transformers`
    (`audio_tower.*`), and of its CTC head (`slots.*`), which is used in training only.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        config = Qwen3OmniMoeAudioEncoderConfig(
            **shape.model_config()["thinker_config"]["audio_config"]
        )
        self.audio_tower: Any = hf.Qwen3OmniMoeAudioEncoder(config)
        self.slots = nn.Linear(config.d_model, SLOTS * (BLANK + 1))
        layers = len(self.audio_tower.layers)
        initialise(
            self, torch.Generator().manual_seed(seed), layers, ("out_proj.weight", "fc2.weight")
        )


def positions(num_frames: Tensor) -> Tensor:
    """Return the number of tower positions of each clip. `num_frames`: number of log-mel frames."""
    tail = num_frames % CHUNK_FRAMES
    return num_frames // CHUNK_FRAMES * CHUNK_POSITIONS + (tail + 7) // 8


def compute_states(tower: Any, batch: LogMelBatch) -> Tensor:
    """Return the hidden states that enter `proj2`, the last linear layer of the audio tower.

    Shapes: clips x positions of the longest clip x width; values beyond a clip's own positions are
    undefined.
    """
    states = _embedded(tower, batch)
    mask = _mask(
        positions(batch.num_frames), tower.n_window_infer // CHUNK_FRAMES * CHUNK_POSITIONS
    )
    for layer in tower.layers:
        states = _block(layer, states, mask, tower.config.encoder_attention_heads)
    return functional.gelu(tower.proj1(tower.ln_post(states)))


def _embedded(tower: Any, batch: LogMelBatch) -> Tensor:
    """Return the states that enter the tower's first layer: the convolutions of each chunk of
    log-mel frames by itself, plus positional embeddings. A chunk without frames yields zeros.
    """
    num_clips, num_mels, num_frames = batch.features.shape
    num_chunks = -(-num_frames // CHUNK_FRAMES)
    padded = functional.pad(batch.features, (0, num_chunks * CHUNK_FRAMES - num_frames))
    chunks = padded.view(num_clips, num_mels, num_chunks, CHUNK_FRAMES).transpose(1, 2)
    has_frames = torch.arange(num_chunks) * CHUNK_FRAMES < batch.num_frames[:, None]
    longest = int(batch.num_frames.max())
    states = chunks[has_frames][:, None, :, :longest].contiguous(memory_format=torch.channels_last)
    for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        states = functional.gelu(convolution(states))
    states = tower.conv_out(states.permute(0, 3, 1, 2).flatten(2))
    states = states + tower.positional_embedding.positional_embedding[: states.shape[1]]
    all_chunks = states.new_zeros(num_clips, num_chunks, *states.shape[1:])
    all_chunks[has_frames] = states
    return all_chunks.flatten(1, 2)[:, : int(positions(batch.num_frames).max())]


def _mask(num_positions: Tensor, window: int) -> Tensor:
    """Return the attention mask [clips, 1, queries, keys]: True where the key is in the query's
    window of `window` positions and is no padding, or is the query's own position.
    """
    at = torch.arange(int(num_positions.max()))
    same_window = at[:, None] // window == at // window
    return (
        same_window & (at < num_positions[:, None, None]) | torch.eye(len(at), dtype=torch.bool)
    )[:, None]


def _block(layer: Any, states: Tensor, mask: Tensor, num_heads: int) -> Tensor:
    attention = layer.self_attn
    normed = layer.self_attn_layer_norm(states)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (
        each(normed).unflatten(-1, (num_heads, -1)).transpose(1, 2) for each in projections
    )
    seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    states = states + attention.out_proj(seen.transpose(1, 2).flatten(2))
    return states + layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(states))))


def slot_scores(slots: nn.Linear, states: Tensor) -> Tensor:
    """Return the log-probabilities of symbols and blank in each slot. `states`: output of
    `compute_states`.

    Shapes: clips x slots x symbols, two slots a position.
    """
    logits = slots(states).unflatten(-1, (SLOTS, BLANK + 1)).flatten(1, 2)
    return logits.log_softmax(-1)


def ctc_loss(scores: Tensor, num_positions: Tensor, targets: Sequence[Sequence[int]]) -> Tensor:
    """Return the CTC loss per symbol. A clip with more symbols than slots has loss 0."""
    lengths = torch.tensor([len(each) for each in targets])
    together = torch.tensor([symbol for each in targets for symbol in each])
    total = functional.ctc_loss(
        scores.transpose(0, 1),
        together,
        SLOTS * num_positions,
        lengths,
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )
    return total / lengths.sum()


def symbols(scores: Tensor, num_positions: Tensor) -> list[list[int]]:
    """Return the likeliest symbols of each clip's slots, without repetitions and blanks."""
    likeliest = [
        row[:length]
        for row, length in zip(
            scores.argmax(-1).tolist(), (SLOTS * num_positions).tolist(), strict=True
        )
    ]
    return [[symbol for symbol, _ in groupby(row) if symbol != BLANK] for row in likeliest]
