"""A small random checkpoint of the true Qwen3-Omni architecture, for tests and for trying Fleet
without a GPU.

`transformers` loads it with `Qwen3OmniMoeForConditionalGeneration.from_pretrained`, and its config
carries the keys that vLLM needs. About 4 million parameters; its answers are noise, but depend on
every input of the real model.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fleet.models.qwen3_omni.tiny_config import generation_config, model_config, resized
from fleet.models.qwen3_omni.tiny_tokenizer import (
    build_tokenizer,
    speakable_ids,
    write_json,
    write_processor_files,
    write_tokenizer_files,
)
from fleet.models.qwen3_omni.tiny_weights import fill_weights

SHARD_SIZE = "4MB"


def write_tiny_checkpoint(
    out_dir: Path, seed: int = 0, sizes: Mapping[str, Any] | None = None
) -> Path:
    """Write the checkpoint into `out_dir` (created if absent) and return the folder; equal seeds
    give equal bytes.

    `sizes`: values that replace values of the tiny config.json, nested like it. The layout of the
    files is the published Qwen3-Omni-30B-A3B's: weights in shards with an index, experts one by
    one, and a tokenizer of vocab.json and merges.txt without a tokenizer.json.
    """
    # seconds to import, and its types are incomplete
    transformers: Any = import_module("transformers")
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    config = resized(model_config(ids), sizes or {})
    codec_eos_id = config["talker_config"]["codec_eos_token_id"]
    model = transformers.Qwen3OmniMoeForConditionalGeneration(
        transformers.Qwen3OmniMoeConfig.from_dict(config)
    )
    fill_weights(
        model,
        seed,
        answer_ids=speakable_ids(tokenizer),
        im_end_id=ids["<|im_end|>"],
        codec_eos_id=codec_eos_id,
    )
    model.save_pretrained(out_dir, max_shard_size=SHARD_SIZE)
    for shard in out_dir.glob("*.safetensors"):
        shard.chmod(0o644)  # written 0600; the tokenizer beside it is readable by all
    # save_pretrained drops the keys that only vLLM reads.
    write_json(out_dir / "config.json", config)
    write_json(out_dir / "generation_config.json", generation_config(ids))
    write_tokenizer_files(tokenizer, out_dir)
    write_processor_files(out_dir)
    return out_dir
