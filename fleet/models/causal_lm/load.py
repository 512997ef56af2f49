"""Loading of a checkpoint as a model of `transformers`; errors become one line. Knows no batches
and no KV pages.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fleet.core.errors import ConfigError
from fleet.models.causal_lm.paged import NAME, register

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
LOAD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors that `transformers` raises for an unexpected folder or model."""


@contextmanager
def refusing(
    folder: Path, what: str, fix: str = "give a checkpoint of another architecture"
) -> Generator[None]:
    """Convert errors of the model's own code to a ConfigError of one line. `what`: failed
    operation, `fix`: remedy, as the error names them.
    """
    try:
        yield
    except LOAD_ERRORS as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"checkpoint {folder}: {what}: {cause}; {fix}", param="checkpoint"
        ) from error


def read_config(folder: Path) -> PretrainedConfig:
    """Read the text configuration of a checkpoint. Raises: ConfigError unless all layers are
    attention layers.
    """
    with refusing(folder, "no config.json that can be read", "fetch it again"):
        config = cast(
            PretrainedConfig, AutoConfig.from_pretrained(folder, trust_remote_code=False)
        ).get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= KNOWN_LAYERS:
        unknown = ", ".join(sorted(kinds - KNOWN_LAYERS))
        raise ConfigError(
            f"checkpoint {folder}: layers of kind {unknown} cannot be served", param="checkpoint"
        )
    return config


def load_model(
    folder: Path,
    kind: str,
    dtype: torch.dtype,
    *,
    weights: Path | None = None,
    model_class: type[PreTrainedModel] | None = None,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """Load the model of the checkpoint `folder`. With `model_class`, load an instance of that class
    instead, from the folder `weights`, which has a part of the checkpoint's weights.

    `kind`: architecture named in errors. `config`: configuration used instead of the checkpoint's
    own. Raises: ConfigError unless `transformers` supports the model and finds each of its weights.
    """
    register()
    with refusing(folder, f"{kind} cannot be loaded", "fetch it again, or give another"):
        loaded = (model_class or AutoModelForCausalLM).from_pretrained(
            weights or folder,
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            config=config,
        )
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"checkpoint {folder}: lacks {len(missing)} weights of {kind}: {missing[0]}, ...; "
            "fetch it again",
            param="checkpoint",
        )
    return model.eval()
