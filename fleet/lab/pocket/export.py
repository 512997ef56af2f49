"""Export of the trained parts to one folder that `transformers` and Fleet load like any other
Qwen3-Omni.

Weights are stored in half precision and computed in single precision: half the download, and no
audible loss. Weights that are never trained (the vision tower) stay as initialized from the seed.
Independent of how the parts are trained.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.lab.pocket import shape
from fleet.lab.pocket.shape import Json
from fleet.lab.pocket.tokenizer import write_files
from fleet.models.qwen3_omni.tiny_tokenizer import write_json

PLACES: Mapping[str, Mapping[str, str]] = {
    "thinker": {"model.": "thinker.model.language_model.", "lm_head.": "thinker.lm_head."},
    "hearing": {"audio_tower.": "thinker.model.audio_tower."},
    "talker": {"talker.": "talker."},
    "codec": {"": "code2wav."},
}
"""Exported weights by part: prefix of the part's weight names, and the prefix that replaces it in
the model. Weights with other prefixes are used in training only.
"""

EXAMPLES = (
    "what is your name",
    "what is seven plus five",
    "what day comes after monday",
    "what is the opposite of hot",
    "what colour is the sky",
    "spell horse",
    "say the green boat is near the bridge",
    "what is the capital of france",
    "my name is anna",
)
"""Questions with which to try the checkpoint, from most of the families."""


def _sampling(prefix: str, max_new_tokens: int) -> Json:
    """Return the default sampling parameters of a language stage, which are greedy. `prefix`:
    prefix of the parameter names.
    """
    return {
        f"{prefix}do_sample": False,
        f"{prefix}max_new_tokens": max_new_tokens,
        f"{prefix}repetition_penalty": 1.0,
    }


GENERATION_CONFIG: Mapping[str, Any] = {
    "eos_token_id": shape.TOKEN_ID["<|im_end|>"],
    "pad_token_id": shape.TOKEN_ID["<|endoftext|>"],
    **_sampling("", max_new_tokens=128),
    **_sampling("talker_", max_new_tokens=375),
}
"""Content of generation_config.json. The Talker's length limit of half a minute is far longer than
any answer.
"""


def export(parts: Mapping[str, Path], out_dir: Path) -> Path:
    """Write the checkpoint folder, created if absent, from each part's weight file; return the
    folder. Equal inputs give equal bytes.

    Raises: ConfigError if a file is missing, or does not have Pocket's shape.
    """
    model = _initial_model()
    for name in PLACES:
        _fill(model, name, parts[name])
    _write(model, out_dir)
    return out_dir


def part_of(folder: Path, part: str) -> dict[str, Tensor]:
    """Return the weights of one part of an exported folder, in single precision, under the names
    used by its training.

    Raises: ConfigError if the folder holds no weights.
    """
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"{folder} holds no model.safetensors; name a folder that `fleet pocket train` wrote",
            param="start",
        )
    # maps the stored names to the model's newer ones
    transformers: Any = import_module("transformers")
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True
    )
    return {
        prefix + name.removeprefix(target): value.contiguous()
        for prefix, target in PLACES[part].items()
        for name, value in model.state_dict().items()
        if name.startswith(target)
    }


def _initial_model() -> Any:
    # takes seconds to import, and its types are incomplete
    transformers: Any = import_module("transformers")
    config = transformers.Qwen3OmniMoeConfig.from_dict(shape.model_config())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.SEED)
        model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
        for layer in model.talker.model.layers:
            # transformers 5.23 initializes only the Thinker's experts; these are uninitialized
            # memory.
            for weight in layer.mlp.experts.parameters():
                torch.nn.init.normal_(
                    weight, std=config.talker_config.text_config.initializer_range
                )
    model.thinker.model.language_model.embed_tokens.weight.data.copy_(shape.text_table())
    return model


@torch.no_grad()
def _fill(model: Any, part: str, file: Path) -> None:
    """Copy a part's weight file into the model. Raises: ConfigError if names or sizes do not match
    the part.
    """
    wanted: dict[str, Tensor] = {
        name: value
        for name, value in model.state_dict().items()
        if name.startswith(tuple(PLACES[part].values()))
    }
    trained = dict(_renamed_weights(part, file))
    for name, value in wanted.items():
        if name not in trained or trained[name].shape != value.shape:
            found = tuple(trained[name].shape) if name in trained else "nothing"
            raise ConfigError(
                f"{file}: {name} must be {tuple(value.shape)}, found {found}; train {part} again",
                param="parts",
            )
        value.copy_(trained[name])
    extra = sorted(trained.keys() - wanted.keys())
    if extra:
        raise ConfigError(
            f"{file}: Pocket's {part} has no {extra[0]}; train {part} again", param="parts"
        )


def _renamed_weights(part: str, file: Path) -> Iterator[tuple[str, Tensor]]:
    if not file.is_file():
        raise ConfigError(f"parts: {part} has no file {file}; train it first", param="parts")
    for name, value in load_file(file).items():
        for prefix, target in PLACES[part].items():
            if name.startswith(prefix):
                yield target + name.removeprefix(prefix), value


def _write(model: Any, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    _halve(model)
    model.save_pretrained(out_dir)
    # `save_pretrained` writes it with mode 0600, unlike the other files
    (out_dir / "model.safetensors").chmod(0o644)
    # `save_pretrained` writes the config without the keys that only vLLM reads.
    write_json(out_dir / "config.json", shape.model_config())
    write_json(out_dir / "generation_config.json", GENERATION_CONFIG)
    write_json(out_dir / "examples.json", {"examples": list(EXAMPLES), "languages": ["en"]})
    write_files(out_dir)


def _halve(model: Any) -> None:
    """Convert the model to half precision. Raises: ConfigError naming a weight that overflows."""
    model.half()
    for name, value in model.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            raise ConfigError(
                f"{name} is not finite in half precision; train its part again", param="parts"
            )
