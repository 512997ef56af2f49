"""End tokens of a checkpoint, from its own files; gateway and worker read the same ones. Knows no tokenizer."""

from pathlib import Path

from fleet.processing.template import read_json

_SOURCES = (
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
    ("config.json", "im_end_token_id"),
)
"""Files and keys in order of precedence. The last one is the end token of Qwen3-Omni's Thinker without the others."""


def read_end_ids(checkpoint: Path) -> frozenset[int]:
    """Return the ids; empty if no file has any. Raises: ConfigError if a file is not JSON."""
    for name, key in _SOURCES:
        found = read_json(checkpoint / name).get(key)
        if isinstance(found, int):
            return frozenset([found])
        if isinstance(found, list) and found:
            return frozenset(int(str(one)) for one in found)
    return frozenset()
