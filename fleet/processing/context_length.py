"""Context length of a checkpoint's model: positions of prompt and answer together. Knows no
tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec

from fleet.core.request import Sampling
from fleet.processing.template import read_json

_KEYS = ("max_position_embeddings", "n_positions")
_ROTARY = ("rope_parameters", "rope_scaling")


def read_num_positions(checkpoint: Path) -> int | None:
    """Return the context length of a checkpoint's model in positions; None if config.json states
    none, or scales rotary positions by a factor, which changes the length.

    Raises: ConfigError if config.json is not JSON.
    """
    config = read_json(checkpoint / "config.json")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = cast("dict[str, object]", text)
    if any(_is_stretched(config.get(key)) for key in _ROTARY):
        return None
    found = (config.get(key) for key in _KEYS)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def limit_answer_length(sampling: Sampling, num_prompt: int, positions: int | None) -> Sampling:
    """Return the sampling parameters with `max_tokens` reduced to the positions that the prompt
    leaves in the context. `num_prompt`: positions of the prompt; `positions`: context length, None
    for unlimited.
    """
    if positions is None:
        return sampling
    return msgspec.structs.replace(
        sampling, max_tokens=min(sampling.max_tokens, positions - num_prompt)
    )


def _is_stretched(rotary: object) -> bool:
    """Return True if the rotary positions of any kind of layer are scaled by a factor."""
    if not isinstance(rotary, Mapping):
        return False
    values = cast("Mapping[str, object]", rotary)
    return values.get("factor") is not None or any(
        _is_stretched(value) for value in values.values()
    )
