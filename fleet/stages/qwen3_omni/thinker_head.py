"""Configuration of a draft head for the Thinker."""

from pathlib import Path
from typing import Any, cast

from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.target_hash import hash_of_target


def head_config(folder: Path, config: OmniConfig, most_draft_ids: int) -> Eagle3Config:
    """Return the configuration of a new draft head of the Thinker."""
    text = config.thinker_config.text_config
    details = cast(Any, text)  # `transformers` sets these for every decoder
    return Eagle3Config(
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        layer_ids=default_layer_ids(text.num_hidden_layers),
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        intermediate_size=int(details.intermediate_size),
        rope_theta=float(details.rope_parameters["rope_theta"]),
        norm_eps=text.rms_norm_eps,
        vocab_size=text.vocab_size,
        draft_vocab_size=min(most_draft_ids, text.vocab_size),
        max_positions=text.max_position_embeddings,
        target_hash=hash_of_target(folder),
    )
