"""End tokens of a checkpoint, from its own files; gateway and worker read the same ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from fleet.core.errors import ConfigError
from fleet.processing.template import read_json, token_text
from fleet.processing.tokenizer import CONFIG, load_tokenizer

_IDS = (
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
    ("config.json", "im_end_token_id"),
)
"""Files, and their keys, that may list end token ids. The last entry is the end token of
Qwen3-Omni's Thinker.
"""
_TEXTS = (CONFIG, "special_tokens_map.json")
"""Files that name the end token by its text, as `eos_token`."""


def read_end_ids(checkpoint: Path) -> frozenset[int]:
    """Return the ids of all tokens that end an answer: the union over the checkpoint's files, since
    published files often disagree.

    Raises: ConfigError if no file names an end token, or a file is not JSON.
    """
    limit = read_vocab_size(checkpoint)
    found = {
        one
        for one in (*_listed(checkpoint), *_tokenizer_ids(checkpoint))
        if limit is None or one < limit
    }
    if not found:
        raise ConfigError(
            f"checkpoint {checkpoint}: no file names the token that ends an answer, so none "
            "would ever end; add "
            "eos_token_id to generation_config.json, or eos_token to tokenizer_config.json",
            param="checkpoint",
        )
    return frozenset(found)


def _listed(checkpoint: Path) -> Iterator[int]:
    for name, key in _IDS:
        value = read_json(checkpoint / name).get(key)
        for one in cast("list[object]", value) if isinstance(value, list) else [value]:
            if one is not None:
                yield int(str(one))


def _tokenizer_ids(checkpoint: Path) -> Iterator[int]:
    """Yield the id of the tokenizer's own end token, which its files name by text."""
    texts = (token_text(read_json(checkpoint / name).get("eos_token")) for name in _TEXTS)
    text = next((text for text in texts if text), None)
    if text is None:
        return
    listed = cast(
        "Mapping[str, object]", read_json(checkpoint / CONFIG).get("added_tokens_decoder") or {}
    )
    found = next(
        (int(number) for number, token in listed.items() if token_text(token) == text), None
    )
    if found is None:
        found = load_tokenizer(checkpoint).token_to_id(text)
    if found is not None:
        yield found


def read_vocab_size(checkpoint: Path) -> int | None:
    """Return the number of ids that the model can sample; None if config.json has none. A tokenizer
    may have tokens beyond it. Raises: ConfigError if the file is not JSON.
    """
    config: Mapping[str, object] = read_json(checkpoint / "config.json")
    for key in ("thinker_config", "text_config"):
        inner = config.get(key)
        config = cast("Mapping[str, object]", inner) if isinstance(inner, dict) else config
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None
