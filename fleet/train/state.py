"""The state of a trainer on disk: its head, beside it the optimizer's moments, and which samples it was trained on.

A folder is complete when its JSON file exists, which is written last and has the hash of the moments' bytes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.models.eagle3.config import check_names
from fleet.models.eagle3.files import load_head, parse_weights, read_bytes, read_json, save_head, write_whole
from fleet.train.trainer import Trainer

STATE_FILE, MOMENTS_FILE = "trainer.json", "moments.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSamples:
    """Ids of samples in a state, the latest ones. `contained`: those that need not be trained on again, held-out ones included.

    `windows`: those that were new in each window, in order; `first`: the number of the first of these windows.
    """

    contained: tuple[str, ...] = ()
    windows: tuple[tuple[str, ...], ...] = ()
    first: int = 1


def save_trainer(trainer: Trainer, folder: Path, samples: TrainedSamples = TrainedSamples()) -> None:
    """Write the state to a folder, which is created; it is durable when this returns."""
    head_sha256 = save_head(trainer.head, folder)
    state = trainer.optimizer.state_dict()["state"]
    moments: dict[str, Tensor] = {
        f"{at}.{name}": part.detach().cpu().contiguous() for at, parts in state.items() for name, part in parts.items()
    }
    data = save(moments)
    write_whole(folder / MOMENTS_FILE, data)
    hashes = {"head_sha256": head_sha256, "sha256": hashlib.sha256(data).hexdigest()}
    _write_state(folder, {"windows": trainer.num_windows, **hashes}, samples)


def save_samples(folder: Path, samples: TrainedSamples, previous: Path) -> None:
    """Write a state that differs from the one in `previous` by its samples only, with the same files of weights and moments."""
    described = _read_state(previous)
    folder.mkdir(parents=True)
    for file in previous.iterdir():
        if file.name != STATE_FILE:
            os.link(file, folder / file.name)
    _write_state(folder, described, samples)


def _write_state(folder: Path, described: Mapping[str, Any], samples: TrainedSamples) -> None:
    own = {"samples": samples.contained, "first_window": samples.first, "new_samples": samples.windows}
    write_whole(folder / STATE_FILE, (json.dumps({**described, **own}) + "\n").encode())


def read_samples(folder: Path) -> TrainedSamples:
    """Return which samples a state contains. Raises: ConfigError if its file is missing or damaged."""
    return _samples_of(_read_state(folder))


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    described = read_json(path)
    check_names(described, ["windows", "samples", "first_window", "new_samples", "head_sha256", "sha256"], str(path), "field")
    return described


def _samples_of(described: dict[str, Any]) -> TrainedSamples:
    return TrainedSamples(
        contained=tuple(described["samples"]),
        windows=tuple(map(tuple, described["new_samples"])),
        first=described["first_window"],
    )


def restore_trainer(trainer: Trainer, folder: Path) -> TrainedSamples:
    """Continue from a state: the trainer's head gets the weights, its optimizer the moments. Return which samples it contains.

    Raises: ConfigError if a file is missing, damaged or of another save, or if the head's configuration is another one.
    """
    described = _read_state(folder)
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
    return _samples_of(described)
