"""Export and import of a draft head in the format of the package `speculators`, which vLLM reads.

Layer ids have Fleet's meaning: an id i in `eagle_aux_hidden_state_layer_ids` names the input of
layer i. vLLM appends this hidden state after layer i - 1, under the number i
(`EagleModelMixin._maybe_add_hidden_state`, and `forward` of its models). `norm_before_residual` is
always written: vLLM reads a missing one as true, the package itself as false.
Source: speculators 0.9, `drafts/eagle3/config.py`, `models/eagle3/core.py`; vLLM 0.32,
`transformers_utils/configs/speculators`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.files import read_json, stored_weights
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.llama_layer import (
    CONFIG_FILE,
    check_fixed,
    check_known,
    fields_of,
    layer_settings,
    named_weights,
    read_head,
    vocabulary_maps,
    write_folder,
)

LAYER = "layers.0"
OFF = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "embed_requires_grad": False,
}
"""Settings of head variants that Fleet does not compute; only these values are accepted."""
KNOWN = {
    *OFF,
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "draft_vocab_size",
    "norm_before_residual",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "auto_map",
    "tie_word_embeddings",
}
VERSION = "0.9.0"


def export_speculators(
    head: Eagle3Head,
    folder: Path,
    *,
    target: str,
    target_architectures: Sequence[str],
    num_drafts: int,
    embedding_VH: Tensor | None = None,
) -> None:
    """Write a draft head to a folder, in the format of the `speculators` library.

    `target`: name or folder of the target model's checkpoint. `num_drafts`: number of tokens to
    draft by default. `embedding_VH`: the target's token embedding, to be written too, for programs
    that need it in the draft's folder; vLLM needs none, since it uses the target's own.
    Raises: ConfigError if a weight is not finite.
    """
    config = head.config
    described = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": layer_settings(config),
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        **OFF,
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }
    weights = named_weights(config, stored_weights(head), LAYER)
    if config.draft_vocab_size < config.vocab_size:
        # vLLM has no place for the maps of a whole vocabulary.
        weights |= vocabulary_maps(config, head.vocabulary_D)
    if embedding_VH is not None:
        weights["embed_tokens.weight"] = embedding_VH.detach().cpu().contiguous()
    write_folder(folder, described, weights)


def import_speculators(
    folder: Path,
    *,
    num_layers: int,
    target_hash: str,
    embedding_VH: Tensor | None = None,
    device: torch.device | None = None,
) -> Eagle3Head:
    """Read a draft head from a folder in the format of the `speculators` library.

    `num_layers`: number of the target's layers. `target_hash`: hash of the target's weights.
    `embedding_VH`: the target's embedding, needed if the folder contains one. Raises: ConfigError
    with the name of a field or weight that is missing, unknown or unsupported.
    """
    path = folder / CONFIG_FILE
    config = _config_of(read_json(path), str(path), num_layers=num_layers, target_hash=target_hash)
    return read_head(folder, config, LAYER, embedding_VH=embedding_VH, device=device)


def _config_of(
    described: Mapping[str, Any], source: str, *, num_layers: int, target_hash: str
) -> Eagle3Config:
    check_known(described, KNOWN, source)
    required = (
        "speculators_model_type",
        "transformer_layer_config",
        "draft_vocab_size",
        "norm_before_residual",
        "eagle_aux_hidden_state_layer_ids",
    )
    missing = [name for name in required if described.get(name) is None]
    if missing:
        raise ConfigError(
            f"{source}: no field {missing[0]} ({len(missing)} missing)", param=missing[0]
        )
    if described["speculators_model_type"] != "eagle3":
        kind = described["speculators_model_type"]
        raise ConfigError(
            f"{source}: speculators_model_type {kind}, not eagle3", param="speculators_model_type"
        )
    check_fixed(described, OFF | {"tie_word_embeddings": False}, source)
    fields = fields_of(cast("Mapping[str, Any]", described["transformer_layer_config"]), (), source)
    check_fixed(described, {"target_hidden_size": fields["hidden_size"]}, source)
    own = {
        "dtype": described.get("dtype") or described.get("torch_dtype") or fields["dtype"],
        "layer_ids": described["eagle_aux_hidden_state_layer_ids"],
        "draft_vocab_size": described["draft_vocab_size"],
        "norm_before_residual": described["norm_before_residual"],
    }
    return Eagle3Config.from_json(
        fields | own | {"num_layers": num_layers, "target_hash": target_hash}, source
    )
