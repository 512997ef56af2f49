"""Pocket's tokenizer, chat template and processor files, in the formats of `transformers`.

The tokenizer encodes typed text like the corpus's `encode(spoken(text))`, by rules alone. Symbol
names in tokenizer.json: `a` begins a word, `##a` continues one.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from fleet.lab.pocket.corpus import SYMBOLS
from fleet.lab.pocket.corpus.text import ACCENT, SIGNS, number
from fleet.lab.pocket.shape import SPECIALS, TOKEN_ID
from fleet.models.qwen3_omni.tiny_tokenizer import write_processor_files, write_tokenizer_config

CONTINUATION = "##"

# Each role is one special symbol; system messages are dropped, because Pocket was not trained on
# instructions.
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
    """Build the tokenizer, whose ids are defined in `shape`."""
    vocabulary = {_piece(symbol): index for index, symbol in enumerate(SYMBOLS)}
    # Without merges each letter is a token, in a time that grows with the length of the text.
    # WordPiece would look up every part of a word. No letter is unknown: the normalizer removes
    # everything else.
    tokenizer = Tokenizer(BPE(vocabulary, [], continuing_subword_prefix=CONTINUATION))
    tokenizer.normalizer = normalizers.Sequence(
        [_plain_letters(), *_spoken_signs(), *_word_boundaries()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The first piece keeps its mark if the ids start within a word.
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix=CONTINUATION, cleanup=False), decoders.Replace(CONTINUATION, "")]
    )
    specials = [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    tokenizer.add_special_tokens(specials)  # pyright: ignore[reportUnknownMemberType]
    assert {name: tokenizer.token_to_id(name) for name in SPECIALS} == TOKEN_ID
    return tokenizer


def write_files(out_dir: Path) -> None:
    """Write the tokenizer, the chat template and the processor's configuration to the checkpoint
    folder `out_dir`.
    """
    build_tokenizer().save(str(out_dir / "tokenizer.json"))
    config = {"model_max_length": 4096, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_tokenizer_config(
        out_dir, {TOKEN_ID[name]: name for name in SPECIALS}, config, CHAT_TEMPLATE
    )
    write_processor_files(out_dir)


def _piece(symbol: str) -> str:
    return symbol.lower() if symbol.isupper() else CONTINUATION + symbol


def _plain_letters() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"),
            normalizers.NFKD(),
            normalizers.Replace(Regex(ACCENT), ""),
        ]
    )


def _spoken_signs() -> Iterator[normalizers.Normalizer]:
    """Yield normalizer rules that replace signs and numbers by words. Numbers are replaced digit by
    digit, because a rule's replacement is a fixed text.
    """
    yield from (_rule(sign, f" {word} ") for sign, word in SIGNS.items())
    yield _rule("(?<=[0-9])(?=[0-9]{3})|(?<=[0-9]{2})(?=[0-9]{2})|(?<=[0-9]{3})(?=[0-9])", " ")
    yield _rule("(?<![0-9])0+(?=[0-9])", "")
    for digit in range(1, 10):
        yield _rule(
            f"{digit}(00(?![0-9])|0(?=[1-9](?![0-9]))|(?=[1-9][0-9]))", f" {number(100 * digit)} "
        )
    for value in range(10, 20):
        yield _rule(str(value), f" {number(value)} ")
    for digit in range(2, 10):
        yield _rule(f"{digit}(0|(?=[1-9]))", f" {number(10 * digit)} ")
    for digit in range(10):
        yield _rule(str(digit), f" {number(digit)} ")


def _word_boundaries() -> Iterator[normalizers.Normalizer]:
    """Yield normalizer rules that split words at all characters but letters and apostrophes; an
    apostrophe is a letter only within a word.
    """
    yield _rule("[^a-z']", " ")
    # The second lookbehind changes no match: without it, a run of apostrophes is read again from
    # each of them.
    yield _rule("(?<![a-z'])'+|(?<!')'+(?![a-z'])", "")


def _rule(pattern: str, text: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), text)
