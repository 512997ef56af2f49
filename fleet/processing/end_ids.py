"""Which tokens end an answer, as a checkpoint's own files say it; gateway and worker ask the same. Knows no tokenizer."""

from pathlib import Path

from fleet.processing.template import read_json

_SAID = (
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
    ("config.json", "im_end_token_id"),
)
"""Where they may stand, the first that does counts. The last is what Qwen3-Omni's Thinker ends by without the others."""


def read_end_ids(checkpoint: Path) -> frozenset[int]:
    """Empty where no file says. Raises: ConfigError if one is not JSON."""
    for name, key in _SAID:
        found = read_json(checkpoint / name).get(key)
        if isinstance(found, int):
            return frozenset([found])
        if isinstance(found, list) and found:
            return frozenset(int(str(one)) for one in found)
    return frozenset()
