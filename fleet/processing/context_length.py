"""How many positions a checkpoint's model was made for: prompt and answer together. Knows no tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec

from fleet.core.request import Sampling
from fleet.processing.template import read_json

_SAID = ("max_position_embeddings", "n_positions")
_ROTARY = ("rope_parameters", "rope_scaling")


def read_num_positions(checkpoint: Path) -> int | None:
    """None where config.json does not say, or has rotary positions stretched by a factor, whose end is elsewhere.

    Raises: ConfigError if it is not JSON.
    """
    config = read_json(checkpoint / "config.json")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = cast("dict[str, object]", text)
    if any(_is_stretched(config.get(key)) for key in _ROTARY):
        return None
    found = (config.get(key) for key in _SAID)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def limit_answer_length(sampling: Sampling, num_prompt: int, positions: int | None) -> Sampling:
    """The sampling, its answer no longer than what the prompt leaves of the positions."""
    if positions is None:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, positions - num_prompt))


def _is_stretched(rotary: object) -> bool:
    """Settings of rotary positions, or some for each kind of layer."""
    if not isinstance(rotary, Mapping):
        return False
    values = cast("Mapping[str, object]", rotary)
    return values.get("factor") is not None or any(_is_stretched(value) for value in values.values())
