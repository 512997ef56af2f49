"""A trainer's state on disk: the head, the optimizer's moments, and a manifest that is written
last.

The manifest names the samples that the trainer was trained on, the state's place in the lineage of
checkpoints, and the hash of each other file. A checkpoint's folder is named by the hash of its
manifest, so that a change of any byte is recognized.
"""

import hashlib
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
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_head,
    parse_json,
    parse_weights,
    read_bytes,
    write_head,
    write_whole,
)
from fleet.drafts.trainer.folder import generation_of
from fleet.drafts.trainer.trainer import Trainer

MANIFEST_FILE, MOMENTS_FILE = "trainer.json", "moments.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE, MOMENTS_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSamples:
    """Ids of the latest samples in a trainer's state.

    `contained`: samples that need not be trained on again, including held-out ones. `windows`:
    samples that were new in each of the last windows, in order. `first`: number of the first window
    in `windows`.
    """

    contained: tuple[str, ...] = ()
    windows: tuple[tuple[str, ...], ...] = ()
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Place of a checkpoint among others. `generation`: 1 for the first checkpoint, and above those
    of all earlier ones. `parent`: name of the checkpoint from which its training continued; "" for
    none. `epoch`: epoch of the trainer that wrote it.
    """

    generation: int = 1
    parent: str = ""
    epoch: int = 0


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a state's manifest.

    `generation`, `parent`, `epoch`: see `Lineage`. `windows`: optimizer steps made. `samples`: see
    `TrainedSamples.contained`. `first_window`, `new_samples`: see `first` and `windows` of
    `TrainedSamples`. `files`: SHA-256 of each other file by its name.
    """

    generation: Count
    parent: str
    epoch: Count
    windows: Count
    samples: tuple[str, ...]
    first_window: Count
    new_samples: tuple[tuple[str, ...], ...]
    files: dict[str, str]

    @property
    def trained(self) -> TrainedSamples:
        return TrainedSamples(
            contained=self.samples, windows=self.new_samples, first=self.first_window
        )


def save_trainer(
    trainer: Trainer,
    folder: Path,
    samples: TrainedSamples = TrainedSamples(),
    lineage: Lineage = Lineage(),
) -> str:
    """Write a trainer's state to `folder`, which is created; its parent must exist. The state is
    durable when this returns. Returns the name of a checkpoint with this state.
    """
    folder.mkdir(exist_ok=True)
    write_head(trainer.head, folder)
    of_parameters = trainer.optimizer.state_dict()["state"]
    moments: dict[str, Tensor] = {
        f"{at}.{name}": part.detach().cpu().contiguous()
        for at, parts in of_parameters.items()
        for name, part in parts.items()
    }
    write_whole(folder / MOMENTS_FILE, save(moments))
    manifest = Manifest(
        generation=lineage.generation,
        parent=lineage.parent,
        epoch=lineage.epoch,
        windows=trainer.num_windows,
        samples=samples.contained,
        first_window=samples.first,
        new_samples=samples.windows,
        files={name: _hash_of(folder / name) for name in FILES},
    )
    data = msgspec.json.encode(manifest) + b"\n"
    write_whole(folder / MANIFEST_FILE, data)
    return f"{lineage.generation:08d}-{hashlib.sha256(data).hexdigest()[:16]}"


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_samples(folder: Path) -> TrainedSamples:
    """Return the ids of the samples that a stored state contains.

    Raises: ConfigError if its manifest is missing or damaged.
    """
    return _read_manifest(folder).trained


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_FILE
    data = read_bytes(path)
    described = parse_json(data, path)
    check_names(described, list(Manifest.__struct_fields__), str(path), "field")
    digest = hashlib.sha256(data).hexdigest()[:16]
    if generation_of(folder.name) and not folder.name.endswith(f"-{digest}"):
        raise ConfigError(f"{path}: the bytes do not match the name of their folder", param="name")
    try:
        return msgspec.convert(described, Manifest)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", param="training.folder") from error


def check_whole(folder: Path) -> Manifest:
    """Compare every file of a stored state with the hash in its manifest; return the manifest.

    Raises: ConfigError if a file is missing, damaged or from another save.
    """
    manifest = _read_manifest(folder)
    for name in FILES:
        try:
            digest = _hash_of(folder / name)
        except OSError as error:
            message = f"{folder / name}: cannot be read ({error.strerror})"
            raise ConfigError(message, param="training.folder") from error
        if digest != manifest.files.get(name):
            raise ConfigError(
                f"{folder}: {name} is damaged, or the files are not of one save", param="sha256"
            )
    return manifest


def restore_trainer(trainer: Trainer, folder: Path) -> TrainedSamples:
    """Load a stored state into a trainer, head and optimizer; return the samples that it contains.

    Raises: ConfigError if a file is missing, damaged or from another save, or if the head's
    configuration differs. The trainer is then unchanged.
    """
    manifest = check_whole(folder)
    stored = load_head(folder, target_hash=trainer.head.config.target_hash)
    if stored.config != trainer.head.config or not torch.equal(
        stored.vocabulary_D, trainer.head.vocabulary_D.cpu()
    ):
        raise ConfigError(
            f"{folder}: the head has another configuration or draft vocabulary", param="config"
        )
    data = read_bytes(folder / MOMENTS_FILE)
    state = _moments_of(trainer, parse_weights(data, folder / MOMENTS_FILE), folder)
    with torch.no_grad():
        for own, given in zip(trainer.head.parameters(), stored.parameters(), strict=True):
            own.copy_(given)
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
    trainer.num_windows = manifest.windows
    return manifest.trained


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
