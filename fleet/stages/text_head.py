"""Configuration of a draft head for a causal language model."""

from pathlib import Path

from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.engine.torch.kv_pool import KVShape
from fleet.models.causal_lm.load import read_config
from fleet.models.target_hash import hash_of_target
from fleet.processing.context_length import read_num_positions

ROPE_THETA, NORM_EPS, POSITIONS = 10_000.0, 1e-6, 32_768
"""Values of the head for a model whose configuration lacks them."""


def head_config(folder: Path, shape: KVShape, most_draft_ids: int) -> Eagle3Config:
    """Return the configuration of a new draft head of a model. `shape`: heads of its layers."""
    config = read_config(folder)
    num_layers, hidden, vocab = (
        int(config.num_hidden_layers),
        int(config.hidden_size),
        int(config.vocab_size),
    )
    rope = getattr(config, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden_size=hidden,
        num_layers=num_layers,
        layer_ids=default_layer_ids(num_layers),
        num_heads=_num_heads(int(config.num_attention_heads), shape.num_kv_heads),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=int(getattr(config, "intermediate_size", 0) or 4 * hidden),
        rope_theta=float(rope.get("rope_theta", ROPE_THETA)),
        norm_eps=float(getattr(config, "rms_norm_eps", NORM_EPS)),
        vocab_size=vocab,
        draft_vocab_size=min(most_draft_ids, vocab),
        max_positions=read_num_positions(folder) or POSITIONS,
        target_hash=hash_of_target(folder),
    )


def _num_heads(num_heads: int, num_kv_heads: int) -> int:
    """Return as many heads as the target has, or the next multiple of its key/value heads."""
    return -(-num_heads // num_kv_heads) * num_kv_heads
