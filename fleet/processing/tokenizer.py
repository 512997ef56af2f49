"""Loading and use of a checkpoint's tokenizer: from tokenizer.json, or from vocab.json and
merges.txt, as Qwen's checkpoints are published.

`token_ids` is the only function by which a process that serves requests may encode a text.

Source of the second form: transformers 5.23, tokenization_qwen2.py, which `AutoTokenizer` uses for
such a folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from fleet.core.errors import BadInput, ConfigError
from fleet.processing.template import read_json, token_text

TOKENIZER, VOCAB, MERGES, CONFIG = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
)
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END_OF_TEXT = "<|endoftext|>"
_SPECIAL_DEFAULTS = {
    "unk_token": _END_OF_TEXT,
    "bos_token": None,
    "eos_token": _END_OF_TEXT,
    "pad_token": _END_OF_TEXT,
}
MAX_WORD_CHARS = 256
"""Longest word that is encoded with a WordPiece vocabulary, whose time grows with the third power
of the word's length. BERT's own limit is 100.
"""
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """Load a checkpoint's tokenizer with truncation and padding switched off: its file may enable
    them, for training.

    Raises: ConfigError naming the missing or damaged file and the remedy. Source: `transformers`
    switches both off for each call that does not ask for them (`set_truncation_and_padding`).
    """
    try:
        file = checkpoint / TOKENIZER
        tokenizer = (
            Tokenizer.from_file(str(file)) if file.is_file() else _load_published(checkpoint)
        )
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ConfigError(
            f"checkpoint {checkpoint}: its tokenizer cannot be read ({error}); fetch it again",
            param="checkpoint",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (pieces := _word_pieces(tokenizer)) is not None:
        pieces.max_input_chars_per_word = min(pieces.max_input_chars_per_word, MAX_WORD_CHARS)
    return tokenizer


def token_ids(
    tokenizer: Tokenizer, text: str, where: str, *, with_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of a text; with `with_special_tokens` also those that the tokenizer adds
    to a text, such as the first one. Releases the interpreter lock, which `Tokenizer.encode` holds.

    Raises: BadInput naming the field `where` if a WordPiece vocabulary would have to look up a word
    of more than `MAX_WORD_CHARS`.
    """
    pieces = _word_pieces(tokenizer)
    if pieces is None or pieces.max_input_chars_per_word < MAX_WORD_CHARS:
        return tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)[0].ids
    encoded = tokenizer.encode_batch([text], add_special_tokens=with_special_tokens)[0]
    if any(end - start > MAX_WORD_CHARS for start, end in encoded.offsets):
        raise BadInput(
            f"{where}: holds a word of more than {MAX_WORD_CHARS} characters; split it", param=where
        )
    return encoded.ids


def _word_pieces(tokenizer: Tokenizer) -> WordPiece | None:
    return tokenizer.model if isinstance(tokenizer.model, WordPiece) else None


def qwen_tokenizer(model: BPE) -> Tokenizer:
    """Return a tokenizer with Qwen2's normaliser, splitting rule and byte-level decoder, without
    added tokens.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _load_published(checkpoint: Path) -> Tokenizer:
    missing = [name for name in (VOCAB, MERGES, CONFIG) if not (checkpoint / name).is_file()]
    if missing:
        raise ConfigError(
            f"checkpoint {checkpoint} has no {TOKENIZER}, and no {' and no '.join(missing)} to "
            "make one from",
            param="checkpoint",
        )
    config = read_json(checkpoint / CONFIG)
    kind = config.get("tokenizer_class")
    if kind not in QWEN_CLASSES or config.get("add_prefix_space"):
        raise ConfigError(
            f"checkpoint {checkpoint} has no {TOKENIZER}, which a {kind} needs (only "
            f"{QWEN_CLASSES[0]} without add_prefix_space "
            f"is read from {VOCAB}); write one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            param="checkpoint",
        )
    tokenizer = qwen_tokenizer(BPE.from_file(str(checkpoint / VOCAB), str(checkpoint / MERGES)))
    _add_tokens(checkpoint, tokenizer, config)
    return tokenizer


def _add_tokens(checkpoint: Path, tokenizer: Tokenizer, config: dict[str, object]) -> None:
    """Add the tokens listed in tokenizer_config.json to a tokenizer, under the ids listed there."""
    listed = cast(dict[str, dict[str, object]], config.get("added_tokens_decoder") or {})
    for token_id, entry in sorted((int(key), entry) for key, entry in listed.items()):
        text = str(entry["content"])
        _add(tokenizer, AddedToken(text, **{flag: bool(entry.get(flag)) for flag in _FLAGS}))
        if tokenizer.token_to_id(text) != token_id:
            raise ConfigError(
                f"checkpoint {checkpoint}: {text!r} has the id {token_id} in {CONFIG}, but "
                f"{tokenizer.token_to_id(text)} "
                f"follows from {VOCAB}; the two files are of different models",
                param="checkpoint",
            )
    for text in _special_tokens(config):
        _add(tokenizer, AddedToken(text, special=True))


def _special_tokens(config: dict[str, object]) -> Iterator[str]:
    """Yield the special tokens that tokenizer_config.json names outside `added_tokens_decoder`."""
    extra = config.get("extra_special_tokens") or {}
    additional = config.get("additional_special_tokens") or []
    entries = [config.get(name, default) for name, default in _SPECIAL_DEFAULTS.items()]
    entries += cast(
        list[object],
        [*(extra.values() if isinstance(extra, dict) else extra), *additional],  # type: ignore
    )
    for entry in entries:
        if (text := token_text(entry)) is not None:
            yield text


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    tokenizer.add_tokens([token])  # pyright: ignore[reportUnknownMemberType]
