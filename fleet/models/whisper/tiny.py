"""A small random Whisper checkpoint with tokenizer files, for tests and for trying Fleet.

Its transcripts are noise, but varied, and depend on the sound. The tokenizer is Whisper's
(byte-level BPE, special tokens in its own order) with another tiny checkpoint's text entries.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from fleet.models.qwen3_omni.tiny_tokenizer import (
    NUM_TEXT_TOKENS,
    build_tokenizer,
    speakable_ids,
    write_tokenizer,
)
from fleet.models.qwen3_omni.tiny_weights import Rules, fill_by_rules

LANGUAGES = ("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "it")
WINDOW_S = 30
_TIMESTAMPS = [f"<|{n / 50:.2f}|>" for n in range(WINDOW_S * 50 + 1)]
_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    *(f"<|{name}|>" for name in "translate transcribe startoflm startofprev nospeech".split()),
    "<|notimestamps|>",
)
_NEVER, _END, _TIME = -30.0, 7.0, -3.0
"""Bias of the logits of tokens that a transcript never has, of the end token, of each timestamp."""
_RULES: Rules = (
    (r"layer_norm\.weight$", "around_one", 0.1),
    (r"encoder\.embed_positions", "normal", 0.3),
    (r"decoder\.embed_positions", "normal", 2.5),
    (r"embed_tokens", "normal", 0.3),
    (r"encoder_attn\.(q|k)_proj\.weight$", "fan_in", 2.5),
    (r"encoder_attn\.(v|out)_proj\.weight$", "fan_in", 2.2),
    (r"conv\d\.weight$", "fan_in", 3.0),
    (r"\.bias$", "normal", 0.1),
    (r"", "fan_in", 1.3),
)


def write_tiny_whisper(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint into `folder` (created if absent) and return the folder; equal seeds
    give equal bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _whisper_tokenizer()
    ids = tokenizer.get_vocab()
    config = WhisperConfig(
        vocab_size=len(ids),
        d_model=64,
        num_mel_bins=80,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=WINDOW_S * 50,
        **_special_ids(ids),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    fill_by_rules(dict(model.named_parameters()), _RULES, seed)
    _shape_head(model, speakable_ids(tokenizer), ids)
    model.generation_config = _generation_config(ids)
    model.save_pretrained(folder)
    tokenizer_config = {
        "tokenizer_class": "WhisperTokenizer",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    write_tokenizer(tokenizer, folder, tokenizer_config)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)
    return folder


def _whisper_tokenizer() -> Tokenizer:
    vocabulary = json.loads(build_tokenizer().to_str())["model"]
    merges = [tuple(pair) for pair in vocabulary["merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary["vocab"], merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.get_vocab_size() == NUM_TEXT_TOKENS
    added = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    added += [AddedToken(text, special=False, normalized=False) for text in _TIMESTAMPS]
    tokenizer.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def _special_ids(ids: dict[str, int]) -> dict[str, Any]:
    end = ids["<|endoftext|>"]
    return {
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": end,
    }


def _generation_config(ids: dict[str, int]) -> GenerationConfig:
    return GenerationConfig(
        **_special_ids(ids),
        prev_sot_token_id=ids["<|startofprev|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        suppress_tokens=sorted(ids[text] for text in ("!", "?", *_SPECIAL[1:-1])),
        begin_suppress_tokens=[ids["<|endoftext|>"]],
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": ids[f"<|{language}|>"] for language in LANGUAGES},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
        max_initial_timestamp_index=50,
        alignment_heads=[[0, 1], [1, 0], [1, 3]],
        max_length=448,
    )


@torch.no_grad()
def _shape_head(
    model: WhisperForConditionalGeneration, text_ids: list[int], ids: dict[str, int]
) -> None:
    """Make transcripts consist of whole letters, sometimes of timestamps and the end token. The
    last norm sets channel 0 to 1 for every row, so the embeddings' channel 0 biases the logits.
    """
    norm = model.model.decoder.layer_norm
    norm.weight[0], norm.bias[0] = 0.0, 1.0
    embed = model.model.decoder.embed_tokens.weight
    embed[:, 0] = _NEVER
    embed[text_ids, 0] = 0.0
    embed[ids["<|endoftext|>"], 0] = _END
    embed[[ids[text] for text in _TIMESTAMPS], 0] = _TIME
    embed[[ids[f"<|{language}|>"] for language in LANGUAGES], 0] = 0.0
