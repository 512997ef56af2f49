"""Export and import of a draft head in the format of SpecForge, which SGLang reads.

Layer ids in this format name the layers that the tapped hidden states *leave*, one below Fleet's:
SGLang adds 1 and takes the inputs of these layers (`set_eagle3_layers_to_capture` of its models).
vLLM reads the ids of this format without adding 1: give vLLM the `speculators` format. The target's
embedding is not in the folder. The layer always adds its attention to the hidden state before the
norm.
Source: SGLang, `models/llama_eagle3.py`, `models/llama.py`; SpecForge, `export/to_sglang.py`,
`modeling/draft/llama3_eagle.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.drafts.eagle3.files import read_json, stored_weights
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.llama_layer import (
    CONFIG_FILE,
    check_fixed,
    fields_of,
    layer_settings,
    named_weights,
    read_head,
    vocabulary_maps,
    write_folder,
)

LAYER, ARCHITECTURE = "midlayer", "LlamaForCausalLMEagle3"
LAYER_IDS, IN_USE = "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"
OFF = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Settings of head variants that SGLang computes only in part; only these values are accepted."""


def export_sglang(head: Eagle3Head, folder: Path) -> None:
    """Write a draft head to `folder` in SGLang's format.

    Raises: ConfigError if a weight is not finite, if the head has `norm_before_residual`, or if it
    taps the input of layer 0, which SGLang cannot.
    """
    config = head.config
    if config.norm_before_residual:
        raise ConfigError(
            "draft head: SGLang does not compute norm_before_residual", param="norm_before_residual"
        )
    if config.layer_ids[0] == 0:
        raise ConfigError(
            "draft head: SGLang cannot tap the rows that enter layer 0", param="layer_ids"
        )
    described = layer_settings(config) | {
        "architectures": [ARCHITECTURE],
        "rope_scaling": None,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "eagle_config": {LAYER_IDS: [layer - 1 for layer in config.layer_ids], IN_USE: True},
    }
    weights = named_weights(config, stored_weights(head), LAYER) | vocabulary_maps(
        config, head.vocabulary_D
    )
    write_folder(folder, described, weights)


def import_sglang(
    folder: Path,
    *,
    num_layers: int,
    target_hash: str,
    embedding_VH: Tensor | None = None,
    device: torch.device | None = None,
) -> Eagle3Head:
    """Read a draft head from a folder in SGLang's format.

    `num_layers`: number of the target's layers; if the folder names no tapped layers,
    `default_layer_ids` of it are used. `target_hash`: hash of the target's weights. `embedding_VH`:
    the target's embedding, needed if the folder contains one. Raises: ConfigError with the name of
    a field or weight that is missing, unknown or unsupported.
    """
    path = folder / CONFIG_FILE
    config = _config_of(read_json(path), str(path), num_layers=num_layers, target_hash=target_hash)
    return read_head(folder, config, LAYER, embedding_VH=embedding_VH, device=device)


def _config_of(
    described: Mapping[str, Any], source: str, *, num_layers: int, target_hash: str
) -> Eagle3Config:
    fields = fields_of(
        described, (*OFF, "draft_vocab_size", "target_hidden_size", "eagle_config"), source
    )
    if described.get("architectures") != [ARCHITECTURE]:
        given = described.get("architectures")
        raise ConfigError(
            f"{source}: architectures {given}, not [{ARCHITECTURE}]", param="architectures"
        )
    check_fixed(described, OFF | {"target_hidden_size": fields["hidden_size"]}, source)
    own = {
        "layer_ids": _layer_ids(
            cast("Mapping[str, Any]", described.get("eagle_config") or {}), source, num_layers
        ),
        "draft_vocab_size": described.get("draft_vocab_size") or fields["vocab_size"],
        "norm_before_residual": False,
    }
    return Eagle3Config.from_json(
        fields | own | {"num_layers": num_layers, "target_hash": target_hash}, source
    )


def _layer_ids(eagle: Mapping[str, Any], source: str, num_layers: int) -> list[int]:
    unknown = sorted(set(eagle) - {LAYER_IDS, IN_USE})
    if unknown:
        raise ConfigError(
            f"{source}: unknown field eagle_config.{unknown[0]}", param=f"eagle_config.{unknown[0]}"
        )
    check_fixed(eagle, {IN_USE: True}, source)
    ids = cast("list[int] | None", eagle.get(LAYER_IDS))
    return [layer + 1 for layer in ids] if ids else list(default_layer_ids(num_layers))
