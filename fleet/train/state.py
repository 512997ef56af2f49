"""The state of a trainer on disk: its head, beside it the optimizer's moments, and the ids of samples that it was trained on.

A folder is complete when its JSON file exists, which is written last and has the hash of the moments' bytes.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.models.eagle3.config import check_names
from fleet.models.eagle3.files import load_head, parse_weights, read_bytes, read_json, save_head, write_whole
from fleet.train.trainer import Trainer

STATE_FILE, MOMENTS_FILE = "trainer.json", "moments.safetensors"


def save_trainer(trainer: Trainer, folder: Path, sample_ids: Sequence[str] = ()) -> None:
    """Write the state to a folder, which is created; it is durable when this returns."""
    head_sha256 = save_head(trainer.head, folder)
    state = trainer.optimizer.state_dict()["state"]
    moments: dict[str, Tensor] = {
        f"{at}.{name}": part.detach().cpu().contiguous() for at, parts in state.items() for name, part in parts.items()
    }
    data = save(moments)
    write_whole(folder / MOMENTS_FILE, data)
    described = {
        "windows": trainer.num_windows, "samples": list(sample_ids), "head_sha256": head_sha256,
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    write_whole(folder / STATE_FILE, (json.dumps(described) + "\n").encode())


def restore_trainer(trainer: Trainer, folder: Path) -> list[str]:
    """Continue from a state: the trainer's head gets the weights, its optimizer the moments. Return the ids of its samples.

    Raises: ConfigError if a file is missing, damaged or of another save, or if the head's configuration is another one.
    """
    path = folder / STATE_FILE
    described = read_json(path)
    check_names(described, ["windows", "samples", "head_sha256", "sha256"], str(path), "field")
    stored = load_head(folder, target_hash=trainer.head.config.target_hash)
    data = read_bytes(folder / MOMENTS_FILE)
    head_sha256 = read_json(folder / "eagle3.json")["sha256"]
    if (hashlib.sha256(data).hexdigest(), head_sha256) != (described["sha256"], described["head_sha256"]):
        raise ConfigError(f"{folder}: the files are not of one save", param="sha256")
    if stored.config != trainer.head.config or not torch.equal(stored.vocabulary_D, trainer.head.vocabulary_D.cpu()):
        raise ConfigError(f"{folder}: the head has another configuration or draft vocabulary", param="config")
    state: dict[int, dict[str, Tensor]] = {}
    for name, part in parse_weights(data, folder / MOMENTS_FILE).items():
        at, _, kind = name.partition(".")
        state.setdefault(int(at), {})[kind] = part
    with torch.no_grad():
        for own, given in zip(trainer.head.parameters(), stored.parameters(), strict=True):
            own.copy_(given)
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
    trainer.num_windows = int(described["windows"])
    return list(described["samples"])
