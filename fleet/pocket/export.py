"""Export of the trained parts to one folder that `transformers` and Fleet load like any other Qwen3-Omni.

Weights are stored in half precision and computed in single precision: half the download, and no audible loss. Weights that are
never trained (the vision tower) stay as initialized from the seed. Independent of how the parts are trained.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.models.qwen3_omni.tiny_tokenizer import write_json
from fleet.pocket import shape
from fleet.pocket.shape import Json
from fleet.pocket.tokenizer import write_files

PLACES: Mapping[str, Mapping[str, str]] = {
    "thinker": {"model.": "thinker.model.language_model.", "lm_head.": "thinker.lm_head."},
    "hearing": {"audio_tower.": "thinker.model.audio_tower."},
    "talker": {"talker.": "talker."},
    "codec": {"": "code2wav."},
}
"""Part -> prefix of its names -> their prefix in the model. Names with other prefixes are used in training only."""

EXAMPLES = (
    "what is your name", "what is seven plus five", "what day comes after monday", "what is the opposite of hot",
    "what colour is the sky", "spell horse", "say the green boat is near the bridge", "what is the capital of france",
    "my name is anna",
)  # fmt: skip
"""Questions to try the checkpoint with, one of most kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSampling:
    """Default sampling of one of the two language stages. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    max_new_tokens: int

    def keys(self, prefix: str = "") -> Json:
        """Return the keys of generation_config.json."""
        sampling: Json = {"do_sample": self.temperature > 0, "max_new_tokens": self.max_new_tokens}
        if self.temperature > 0:
            sampling |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {prefix + key: value for key, value in (sampling | {"repetition_penalty": self.repetition_penalty}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling of requests that set none. The Talker's limit of half a minute is far longer than any answer."""

    thinker: StageSampling = field(default_factory=lambda: StageSampling(max_new_tokens=128))
    talker: StageSampling = field(default_factory=lambda: StageSampling(max_new_tokens=375))

    def config(self) -> Json:
        """Return the content of generation_config.json."""
        ends = {"eos_token_id": shape.TOKEN_ID["<|im_end|>"], "pad_token_id": shape.TOKEN_ID["<|endoftext|>"]}
        return ends | self.thinker.keys() | self.talker.keys("talker_")


def export(
    parts: Mapping[str, Path], out_dir: Path, *, defaults: GenerationDefaults | None = None, may_lack_parts: bool = False
) -> Path:
    """Write the folder (created if absent) from the parts' weight files, and return it; equal inputs give equal bytes.

    With `may_lack_parts`, a missing part keeps its initial weights.
    Raises: ConfigError if a part is missing, unknown, or not of Pocket's shape.
    """
    unknown, missing = sorted(parts.keys() - PLACES.keys()), sorted(PLACES.keys() - parts.keys())
    if unknown:
        raise ConfigError(f"parts: no part is called {unknown[0]!r}; there are {', '.join(PLACES)}", param="parts")
    if missing and not may_lack_parts:
        raise ConfigError(f"parts: {', '.join(missing)} missing; train it, or allow parts to be missing", param="parts")
    model = _initial_model()
    for name, file in parts.items():
        _fill(model, name, file)
    _write(model, out_dir, defaults or GenerationDefaults())
    return out_dir


def part_of(folder: Path, part: str) -> dict[str, Tensor]:
    """Return the weights of one part of an exported folder, in single precision, with the names that its training uses.

    Raises: ConfigError if the folder holds no weights.
    """
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(f"{folder} holds no model.safetensors; name a folder that `fleet pocket train` wrote", param="start")
    transformers: Any = import_module("transformers")  # maps the stored names to the model's newer ones
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return {
        prefix + name.removeprefix(target): value.contiguous()
        for prefix, target in PLACES[part].items()
        for name, value in model.state_dict().items()
        if name.startswith(target)
    }


def _initial_model() -> Any:
    transformers: Any = import_module("transformers")  # takes seconds to import, and its types are incomplete
    config = transformers.Qwen3OmniMoeConfig.from_dict(shape.model_config())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.SEED)
        model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
        for layer in model.talker.model.layers:
            # transformers 5.23 initializes only the Thinker's experts; these are uninitialized memory.
            for weight in layer.mlp.experts.parameters():
                torch.nn.init.normal_(weight, std=config.talker_config.text_config.initializer_range)
    model.thinker.model.language_model.embed_tokens.weight.data.copy_(shape.text_table())
    return model


@torch.no_grad()
def _fill(model: Any, part: str, file: Path) -> None:
    """Copy the file's weights into the model. Raises: ConfigError if names or sizes are not those of the part."""
    wanted: dict[str, Tensor] = {
        name: value for name, value in model.state_dict().items() if name.startswith(tuple(PLACES[part].values()))
    }
    trained = dict(_renamed_weights(part, file))
    for name, value in wanted.items():
        if name not in trained or trained[name].shape != value.shape:
            found = tuple(trained[name].shape) if name in trained else "nothing"
            raise ConfigError(f"{file}: {name} must be {tuple(value.shape)}, found {found}; train {part} again", param="parts")
        value.copy_(trained[name])
    extra = sorted(trained.keys() - wanted.keys())
    if extra:
        raise ConfigError(f"{file}: Pocket's {part} has no {extra[0]}; train {part} again", param="parts")


def _renamed_weights(part: str, file: Path) -> Iterator[tuple[str, Tensor]]:
    if not file.is_file():
        raise ConfigError(f"parts: {part} has no file {file}; train it first", param="parts")
    for name, value in load_file(file).items():
        for prefix, target in PLACES[part].items():
            if name.startswith(prefix):
                yield target + name.removeprefix(prefix), value


def _write(model: Any, out_dir: Path, defaults: GenerationDefaults) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    _halve(model)
    model.save_pretrained(out_dir)
    (out_dir / "model.safetensors").chmod(0o644)  # `save_pretrained` writes it with mode 0600, unlike the other files
    # `save_pretrained` writes the config without the keys that only vLLM reads.
    write_json(out_dir / "config.json", shape.model_config())
    write_json(out_dir / "generation_config.json", defaults.config())
    write_json(out_dir / "examples.json", {"examples": list(EXAMPLES)})
    write_files(out_dir)


def _halve(model: Any) -> None:
    """Convert to half precision. Raises: ConfigError naming a weight that overflows."""
    model.half()
    for name, value in model.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            raise ConfigError(f"{name} is not finite in half precision; train its part again", param="parts")
