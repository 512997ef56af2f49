"""Tokenizer, chat template and processor files of the tiny checkpoint.

The tokenizer is Qwen's (byte-level BPE, Qwen2's splitting rule, NFC) with 512 entries trained on a
text that is written here, followed by Qwen3-Omni's added tokens in its own order. `system`, `user`
and `assistant` are one token each, as the model config requires. Does not know about weights or
model dimensions.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from fleet.processing.tokenizer import qwen_tokenizer

NUM_TEXT_TOKENS = 512
"""Number of byte-level BPE entries, 256 of them single bytes. Their ids are below this number; the
added tokens follow.
"""

ADDED_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
    "<|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> "
    "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> "
    "<think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> "
    "<tts_text_bos_single> <|audio_pad|>"
).split()
"""Qwen3-Omni's added tokens in the order of its ids (151643 and up)."""
_NOT_SPECIAL = frozenset(
    ADDED_TOKENS[ADDED_TOKENS.index("<tool_call>") : ADDED_TOKENS.index("<|audio_start|>")]
)
"""Added tokens that are not special, so that decoding with `skip_special_tokens` keeps them."""

NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""Tokens that `Qwen3OmniMoeProcessor` reads from attributes of its tokenizer, by attribute name."""

# ChatML as Qwen3-Omni writes it: content is a string or a list of parts, and audio, images and
# video sit where they stand in the list, inside the turn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- elif part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_WORDS = (
    "the of and to in is that it was for on are as with his they at be this have from or one "
    "had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other "
    "about out many then them "
    "these so some her would make like him into time has look two more write go see number no "
    "way could people my than "
    "first water been call who oil its now find long down day did get come made may part over "
    "new sound take only "
    "little work know place year live me back give most very after thing our just name good "
    "sentence man think say "
    "great where help through much before line right too mean old any same tell boy follow came "
    "want show also around "
    "form three small set put end does another well large must big even such because turn here "
    "why ask went men read "
    "need land different home us move try kind hand picture again change off play spell air "
    "away animal house point "
    "page letter mother answer found study still learn should world hello please listen speak "
    "voice speech music song"
).split()
_OTHER_SCRIPTS = "café naïve über señor señal garçon Straße ñandú 你好 世界 你 好 語 日本 мир да"


def build_tokenizer() -> Tokenizer:
    """Train and return the tiny checkpoint's tokenizer. Training is deterministic.

    Raises: AssertionError if a role name did not become one token.
    """
    tokenizer = qwen_tokenizer(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    assert tokenizer.get_vocab_size() == NUM_TEXT_TOKENS
    added = [
        AddedToken(text, special=text not in _NOT_SPECIAL, normalized=False)
        for text in ADDED_TOKENS
    ]
    tokenizer.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    for role in ("system", "user", "assistant"):
        assert len(tokenizer.encode(role).ids) == 1, f"role {role!r} is not one token"
    return tokenizer


def speakable_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of text tokens of whole letters and plain punctuation, which the tiny model's
    answers consist of.
    """
    texts = [(token, tokenizer.decode([token])) for token in range(NUM_TEXT_TOKENS)]
    return [
        token for token, text in texts if all(char.isalpha() or char in " .,!?'" for char in text)
    ]


def write_tokenizer_files(tokenizer: Tokenizer, out_dir: Path) -> None:
    """Write vocab.json, merges.txt, tokenizer_config.json and the chat template."""
    tokenizer.model.save(str(out_dir))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "errors": "replace",
        "model_max_length": 32768,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_tokenizer_config(
        out_dir, dict(enumerate(ADDED_TOKENS, NUM_TEXT_TOKENS)), config, CHAT_TEMPLATE
    )


def write_tokenizer_config(
    out_dir: Path, added: Mapping[int, str], config: Mapping[str, object], chat_template: str
) -> None:
    """Write tokenizer_config.json with the keys that every Qwen3-Omni has, and the chat template in
    both forms.
    """
    shared = {
        "added_tokens_decoder": {str(token): _added_token(text) for token, text in added.items()},
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": NAMED_TOKENS,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3OmniMoeProcessor",
    }
    write_json(out_dir / "tokenizer_config.json", {**shared, **NAMED_TOKENS, **config})
    (out_dir / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    write_json(out_dir / "chat_template.json", {"chat_template": chat_template})


def write_tokenizer(tokenizer: Tokenizer, out_dir: Path, config: Mapping[str, object]) -> None:
    """Write tokenizer.json and, with `config`, tokenizer_config.json."""
    tokenizer.save(str(out_dir / "tokenizer.json"))
    write_json(out_dir / "tokenizer_config.json", config)


def write_processor_files(out_dir: Path) -> None:
    """Write the feature extractor, image and video processor configs, in the real checkpoint's
    layout.
    """
    images = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_pixels": 12845056,
        "merge_size": 2,
        "min_pixels": 3136,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }
    audio = {
        "chunk_length": 300,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 4800000,
        "nb_max_frames": 30000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16000,
    }
    processor = {"processor_class": "Qwen3OmniMoeProcessor"}
    write_json(
        out_dir / "preprocessor_config.json",
        audio | images | processor | {"image_processor_type": "Qwen2VLImageProcessor"},
    )
    write_json(
        out_dir / "video_preprocessor_config.json",
        images
        | processor
        | {"video_processor_type": "Qwen2VLVideoProcessor", "max_frames": 768, "min_frames": 4},
    )


def write_json(path: Path, value: object) -> None:
    """Write JSON with sorted keys, so that equal values are equal bytes."""
    path.write_text(
        json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _added_token(text: str) -> dict[str, object]:
    flags = ("lstrip", "normalized", "rstrip", "single_word")
    return {"content": text, "special": text not in _NOT_SPECIAL, **dict.fromkeys(flags, False)}


def _training_text() -> Iterator[str]:
    # Role names are repeated most, as the first thing of a line, so that their merges come first.
    # Word n of a list in falling frequency is repeated in proportion to 1 / n, with and without the
    # space before it.
    for role in ("system", "user", "assistant"):
        yield f"{role}\n" * 2000
    for rank, word in enumerate(_WORDS):
        yield f" {word}" * (1 + 600 // (rank + 1))
        yield f"{word.capitalize()}, {word}. " * (1 + 60 // (rank + 1))
    yield f"{_OTHER_SCRIPTS} " * 12
