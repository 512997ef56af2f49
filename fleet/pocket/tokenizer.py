"""Pocket's tokenizer, chat template and processor files, as `transformers` and any other server of the checkpoint reads them.

The tokenizer writes typed text as the corpus's `encode(spoken(text))` does, by rules alone: nothing is learnt. Names of symbols
within tokenizer.json: `a` begins a word, `##a` goes on with it. Knows no weights and no model dimensions.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from fleet.models.qwen3_omni.tiny_tokenizer import NAMED_TOKENS, write_json, write_processor_files
from fleet.pocket.corpus import SYMBOLS
from fleet.pocket.corpus.text import ACCENT, SIGNS, number
from fleet.pocket.shape import SPECIALS, TOKEN_ID

GOES_ON = "##"
MAX_WORD_LEN = 100_000
"""Longer words are dropped: more than any prompt holds."""

# The roles' symbols are names of their own; a system message is dropped, since Pocket reads no instructions.
CHAT_TEMPLATE = """\
{%- for message in messages if message.role in ('user', 'assistant') -%}
{{- '<|im_start|><|' + message.role + '|><|says|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- elif part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|><|assistant|><|says|>' -}}
{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """The tokenizer, every id as `shape` numbers it."""
    vocabulary = {_piece(symbol): index for index, symbol in enumerate(SYMBOLS)}
    # No text has a piece that is unknown: what is no letter does not pass the normalizer.
    pieces = WordPiece(
        vocabulary, unk_token=_piece("'"), continuing_subword_prefix=GOES_ON, max_input_chars_per_word=MAX_WORD_LEN
    )
    tokenizer = Tokenizer(pieces)
    tokenizer.normalizer = normalizers.Sequence([_as_plain(), *_as_said(), *_as_words()])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The first piece keeps its mark where a text is cut within a word.
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(prefix=GOES_ON, cleanup=False), decoders.Replace(GOES_ON, "")])
    specials = [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    tokenizer.add_special_tokens(specials)  # pyright: ignore[reportUnknownMemberType]
    assert {name: tokenizer.token_to_id(name) for name in SPECIALS} == TOKEN_ID
    return tokenizer


def write_files(out_dir: Path) -> None:
    """Everything of the checkpoint's folder that reads and writes text, and how sound is cut into features."""
    build_tokenizer().save(str(out_dir / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {str(TOKEN_ID[name]): _added_token(name) for name in SPECIALS},
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": NAMED_TOKENS,
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3OmniMoeProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    } | NAMED_TOKENS
    write_json(out_dir / "tokenizer_config.json", config)
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(out_dir / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    write_processor_files(out_dir)


def _piece(symbol: str) -> str:
    return symbol.lower() if symbol.isupper() else GOES_ON + symbol


def _as_plain() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"),
            normalizers.NFKD(),
            normalizers.Replace(Regex(ACCENT), ""),
        ]
    )


def _as_said() -> Iterator[normalizers.Normalizer]:
    """Signs and numbers in words. A rule's replacement is fixed text, so a number is said from its first digit to its last."""
    yield from (_rule(sign, f" {word} ") for sign, word in SIGNS.items())
    yield _rule("(?<=[0-9])(?=[0-9]{3})|(?<=[0-9]{2})(?=[0-9]{2})|(?<=[0-9]{3})(?=[0-9])", " ")
    yield _rule("(?<![0-9])0+(?=[0-9])", "")
    for digit in range(1, 10):
        yield _rule(f"{digit}(00(?![0-9])|0(?=[1-9](?![0-9]))|(?=[1-9][0-9]))", f" {number(100 * digit)} ")
    for value in range(10, 20):
        yield _rule(str(value), f" {number(value)} ")
    for digit in range(2, 10):
        yield _rule(f"{digit}(0|(?=[1-9]))", f" {number(10 * digit)} ")
    for digit in range(10):
        yield _rule(str(digit), f" {number(digit)} ")


def _as_words() -> Iterator[normalizers.Normalizer]:
    """Apostrophes are letters within a word only; whatever else is no letter parts words."""
    yield _rule("[^a-z']", " ")
    yield _rule("(?<![a-z'])'+|'+(?![a-z'])", "")


def _rule(pattern: str, text: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), text)


def _added_token(name: str) -> dict[str, object]:
    flags = ("lstrip", "normalized", "rstrip", "single_word")
    return {"content": name, "special": True, **dict.fromkeys(flags, False)}
