"""From the trained parts to one folder that `transformers` and Fleet load as any other Qwen3-Omni.

Weights are stored in half precision and computed with in single: half the download, and nothing lost that is heard. What was
never trained (the vision tower) stays as drawn from the seed. Knows how no part is trained.
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
"""Part -> how its names begin -> how they begin in the model. Names that begin otherwise served the training only."""


EXAMPLES = (
    "what is your name", "what is seven plus five", "what day comes after monday", "what is the opposite of hot",
    "what colour is the sky", "spell horse", "say the green boat is near the bridge", "what is the capital of france",
    "my name is anna",
)  # fmt: skip
"""What to try it with, a question of most kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaking:
    """How one of the two language stages draws what it says. Temperature 0 is always the likeliest."""

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    max_new_tokens: int

    def keys(self, prefix: str = "") -> Json:
        """As generation_config.json has them."""
        drawn: Json = {"do_sample": self.temperature > 0, "max_new_tokens": self.max_new_tokens}
        if self.temperature > 0:
            drawn |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {prefix + key: value for key, value in (drawn | {"repetition_penalty": self.repetition_penalty}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What a server uses where a request says nothing. Half a minute of speech is far more than an answer has."""

    thinker: Speaking = field(default_factory=lambda: Speaking(max_new_tokens=128))
    talker: Speaking = field(default_factory=lambda: Speaking(max_new_tokens=375))

    def config(self) -> Json:
        """generation_config.json."""
        ends = {"eos_token_id": shape.TOKEN_ID["<|im_end|>"], "pad_token_id": shape.TOKEN_ID["<|endoftext|>"]}
        return ends | self.thinker.keys() | self.talker.keys("talker_")


def export(parts: Mapping[str, Path], out_dir: Path, *, answering: Answering | None = None, may_lack_parts: bool = False) -> Path:
    """Write the folder (created if absent) from the parts' weight files, and return it; equal files give equal bytes.

    Raises: ConfigError if a part is missing (unless it may be: it then stays as drawn), unknown, or not of Pocket's shape.
    """
    unknown, missing = sorted(parts.keys() - PLACES.keys()), sorted(PLACES.keys() - parts.keys())
    if unknown:
        raise ConfigError(f"parts: no part is called {unknown[0]!r}; there are {', '.join(PLACES)}", param="parts")
    if missing and not may_lack_parts:
        raise ConfigError(f"parts: {', '.join(missing)} missing; train it, or allow parts to be missing", param="parts")
    model = _drawn_model()
    for name, file in parts.items():
        _fill(model, name, file)
    _write(model, out_dir, answering or Answering())
    return out_dir


def part_of(folder: Path, part: str) -> dict[str, Tensor]:
    """The weights of one part of an exported folder, in single precision and by the names of its training.

    Raises: ConfigError if the folder holds no weights.
    """
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(f"{folder} holds no model.safetensors; name a folder that `fleet pocket train` wrote", param="start")
    transformers: Any = import_module("transformers")  # its reading of the folder: the stored names are older than the model's
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return {
        begins + name.removeprefix(placed): value.contiguous()
        for begins, placed in PLACES[part].items()
        for name, value in model.state_dict().items()
        if name.startswith(placed)
    }


def _drawn_model() -> Any:
    transformers: Any = import_module("transformers")  # seconds to import, and its types are incomplete
    config = transformers.Qwen3OmniMoeConfig.from_dict(shape.model_config())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.SEED)
        model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
        for layer in model.talker.model.layers:
            # transformers 5.23 draws the Thinker's experts only and leaves these as the memory was.
            for weight in layer.mlp.experts.parameters():
                torch.nn.init.normal_(weight, std=config.talker_config.text_config.initializer_range)
    model.thinker.model.language_model.embed_tokens.weight.data.copy_(shape.text_table())
    return model


@torch.no_grad()
def _fill(model: Any, part: str, file: Path) -> None:
    """Raises: ConfigError if the file's names or sizes are not those of the part."""
    wanted: dict[str, Tensor] = {
        name: value for name, value in model.state_dict().items() if name.startswith(tuple(PLACES[part].values()))
    }
    given = dict(_placed(part, file))
    for name, value in wanted.items():
        if name not in given or given[name].shape != value.shape:
            found = tuple(given[name].shape) if name in given else "nothing"
            raise ConfigError(f"{file}: {name} must be {tuple(value.shape)}, found {found}; train {part} anew", param="parts")
        value.copy_(given[name])
    strange = sorted(given.keys() - wanted.keys())
    if strange:
        raise ConfigError(f"{file}: Pocket's {part} has no {strange[0]}; train {part} anew", param="parts")


def _placed(part: str, file: Path) -> Iterator[tuple[str, Tensor]]:
    if not file.is_file():
        raise ConfigError(f"parts: {part} has no file {file}; train it first", param="parts")
    for name, value in load_file(file).items():
        for begins, placed in PLACES[part].items():
            if name.startswith(begins):
                yield placed + name.removeprefix(begins), value


def _write(model: Any, out_dir: Path, answering: Answering) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    _halve(model)
    model.save_pretrained(out_dir)
    (out_dir / "model.safetensors").chmod(0o644)  # written 0600; the tokenizer beside it is readable by all
    # save_pretrained writes transformers' own reading of the config, which drops the keys that only vLLM reads.
    write_json(out_dir / "config.json", shape.model_config())
    write_json(out_dir / "generation_config.json", answering.config())
    write_json(out_dir / "examples.json", {"examples": list(EXAMPLES)})
    write_files(out_dir)


def _halve(model: Any) -> None:
    """Raises: ConfigError naming a weight that is beyond half precision."""
    model.half()
    for name, value in model.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            raise ConfigError(f"{name} is not finite in half precision; train its part anew", param="parts")
