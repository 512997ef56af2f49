"""The part of a tiny checkpoint that a gateway reads (tokenizer, chat template, configs), written
without weights and without torch.
"""

from pathlib import Path

from fleet.models.qwen3_omni.tiny_config import generation_config, model_config
from fleet.models.qwen3_omni.tiny_tokenizer import (
    build_tokenizer,
    write_json,
    write_processor_files,
    write_tokenizer_files,
)

EXAMPLES = ["what can you do", "who's <there>"]


def write_frontend_files(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    write_tokenizer_files(tokenizer, folder)
    write_processor_files(folder)
    write_json(folder / "config.json", model_config(ids))
    write_json(folder / "generation_config.json", generation_config(ids))
    write_json(folder / "examples.json", {"examples": EXAMPLES})
    return folder
