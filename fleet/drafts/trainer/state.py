"""A trainer's state on disk: the head, the optimizer's moments, and the ids of samples that it was
trained on.

A folder is complete when its JSON file exists, which is written last and has the hash of the
moments' bytes.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import check_names
from fleet.drafts.eagle3.files import (
    load_head,
    parse_weights,
    read_bytes,
    read_json,
    save_head,
    write_whole,
)
from fleet.drafts.trainer.trainer import Trainer

STATE_FILE, MOMENTS_FILE = "trainer.json", "moments.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSamples:
    """Ids of the latest samples in a trainer's state.

    `contained`: samples that need not be trained on again, including held-out ones. `windows`:
    samples that were new in each window, in order. `first`: number of the first window in
    `windows`.
    """

    contained: tuple[str, ...] = ()
    windows: tuple[tuple[str, ...], ...] = ()
    first: int = 1


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a state's JSON file.

    `windows`: optimizer steps made. `samples`: see `TrainedSamples.contained`. `first_window`,
    `new_samples`: see `first` and `windows` of `TrainedSamples`. `head_sha256`, `sha256`: hashes of
    the head's weights and of the moments.
    """

    windows: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    samples: tuple[str, ...]
    first_window: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    new_samples: tuple[tuple[str, ...], ...]
    head_sha256: str
    sha256: str

    @property
    def trained(self) -> TrainedSamples:
        return TrainedSamples(
            contained=self.samples, windows=self.new_samples, first=self.first_window
        )


def save_trainer(
    trainer: Trainer, folder: Path, samples: TrainedSamples = TrainedSamples()
) -> None:
    """Write a trainer's state to `folder`, which is created; the state is durable when this
    returns.
    """
    head_sha256 = save_head(trainer.head, folder)
    of_parameters = trainer.optimizer.state_dict()["state"]
    moments: dict[str, Tensor] = {
        f"{at}.{name}": part.detach().cpu().contiguous()
        for at, parts in of_parameters.items()
        for name, part in parts.items()
    }
    data = save(moments)
    write_whole(folder / MOMENTS_FILE, data)
    state = StoredState(
        windows=trainer.num_windows,
        samples=samples.contained,
        first_window=samples.first,
        new_samples=samples.windows,
        head_sha256=head_sha256,
        sha256=hashlib.sha256(data).hexdigest(),
    )
    _write_state(folder, state)


def save_samples(folder: Path, samples: TrainedSamples, previous: Path) -> None:
    """Write a state with new sample ids, and with the weights and moments of the state in
    `previous` (hard links).
    """
    stored = _read_state(previous)
    folder.mkdir(parents=True)
    for file in previous.iterdir():
        if file.name != STATE_FILE:
            os.link(file, folder / file.name)
    _write_state(
        folder,
        msgspec.structs.replace(
            stored,
            samples=samples.contained,
            first_window=samples.first,
            new_samples=samples.windows,
        ),
    )


def _write_state(folder: Path, state: StoredState) -> None:
    write_whole(folder / STATE_FILE, msgspec.json.encode(state) + b"\n")


def read_samples(folder: Path) -> TrainedSamples:
    """Return the ids of the samples that a stored state contains.

    Raises: ConfigError if its JSON file is missing or damaged.
    """
    return _read_state(folder).trained


def _read_state(folder: Path) -> StoredState:
    path = folder / STATE_FILE
    described = read_json(path)
    check_names(described, list(StoredState.__struct_fields__), str(path), "field")
    try:
        return msgspec.convert(described, StoredState)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", param="training.folder") from error


def restore_trainer(trainer: Trainer, folder: Path) -> TrainedSamples:
    """Load a stored state into a trainer, head and optimizer; return the samples that it contains.

    Raises: ConfigError if a file is missing, damaged or from another save, or if the head's
    configuration differs.
    """
    described = _read_state(folder)
    stored = load_head(folder, target_hash=trainer.head.config.target_hash)
    data = read_bytes(folder / MOMENTS_FILE)
    head_sha256 = read_json(folder / "eagle3.json")["sha256"]
    if (hashlib.sha256(data).hexdigest(), head_sha256) != (described.sha256, described.head_sha256):
        raise ConfigError(f"{folder}: the files are not of one save", param="sha256")
    if stored.config != trainer.head.config or not torch.equal(
        stored.vocabulary_D, trainer.head.vocabulary_D.cpu()
    ):
        raise ConfigError(
            f"{folder}: the head has another configuration or draft vocabulary", param="config"
        )
    state = _moments_of(trainer, parse_weights(data, folder / MOMENTS_FILE), folder)
    with torch.no_grad():
        for own, given in zip(trainer.head.parameters(), stored.parameters(), strict=True):
            own.copy_(given)
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
    trainer.num_windows = described.windows
    return described.trained


def _moments_of(
    trainer: Trainer, given: Mapping[str, Tensor], folder: Path
) -> dict[int, dict[str, Tensor]]:
    """Return the optimizer's moments for each parameter, by its index. Raises: ConfigError if they
    do not fit the head.
    """
    shapes = [weight.shape for weight in trainer.head.parameters()]
    state: dict[int, dict[str, Tensor]] = {}
    for name, part in given.items():
        at, _, kind = name.partition(".")
        number = int(at) if at.isascii() and at.isdecimal() and len(at) < 9 else len(shapes)
        if number >= len(shapes) or (part.ndim and part.shape != shapes[number]):
            raise ConfigError(
                f"{folder / MOMENTS_FILE}: {name[:64]} is no moment of this head",
                param="training.folder",
            )
        state.setdefault(number, {})[kind] = part
    return state
