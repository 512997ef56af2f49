"""Random causal language models (Qwen3, dense) of any given size, for measurements, written file by
file.

Answers are noise; the duration of a step does not depend on the values of weights.
"""

from dataclasses import dataclass
from json import dumps
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from fleet.models.checkpoint import INDEX
from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer, write_tokenizer

SHARD_BYTES = 64 << 20
"""Size of a weight file. Small, so that the files of one span have few weights of other layers,
since a file is mapped as a whole.
"""
STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a model, named as in its configuration. Weights are float32."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int = 8192


def write_sized_checkpoint(folder: Path, size: ModelSize, seed: int = 0) -> int:
    """Write a checkpoint with random weights into `folder` (created if absent); return the size of
    its weights in bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=max(size.vocabulary, tokenizer.get_vocab_size()),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.positions,
        tie_word_embeddings=False,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    write_tokenizer(
        tokenizer,
        folder,
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
    )
    with torch.device("meta"):
        shapes = {
            name: tuple(weight.shape)
            for name, weight in Qwen3ForCausalLM(config).state_dict().items()
        }
    return _write_weights(folder, shapes, torch.Generator().manual_seed(seed))


def _write_weights(
    folder: Path, shapes: dict[str, tuple[int, ...]], generator: torch.Generator
) -> int:
    """Write weights in files of about `SHARD_BYTES`; only one file's weights are in memory at a
    time.
    """
    file_of: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        shard[name] = (
            torch.ones(shape)
            if len(shape) == 1
            else torch.empty(shape).normal_(0, STD, generator=generator)
        )
        total += 4 * prod(shape)
        if number < len(shapes) and sum(weight.nbytes for weight in shard.values()) < SHARD_BYTES:
            continue
        file = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
        shard = {}
    (folder / INDEX).write_text(dumps({"metadata": {"total_size": total}, "weight_map": file_of}))
    return total
