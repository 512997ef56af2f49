"""Reader of a checkpoint folder: finds the file of each weight and reads only those that are requested. Knows no model."""

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.core.errors import ConfigError, NoSafeWeights

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightReader:
    """Weights by name, read on request and moved to one device and dtype. `names`: those read so far.

    Raises: ConfigError if the folder holds no safetensors.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self._folder, self._device, self._dtype = folder, device, dtype
        self._file_of = _file_of_each_weight(folder)
        self._open: dict[Path, safe_open] = {}
        self.names: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._file_of

    def under(self, prefix: str) -> list[str]:
        return [name for name in self._file_of if name.startswith(prefix)]

    def first_prefix(self, prefixes: Sequence[str]) -> str:
        """Return the first prefix that any weight has: folders written by different tools nest differently.

        Raises: ConfigError if there is none.
        """
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in self._file_of):
                return prefix
        raise ConfigError(f"checkpoint {self._folder}: no weights under {' or '.join(prefixes)}", param="checkpoint")

    def get(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read a weight. Raises: ConfigError if the folder lacks it, or its file is missing or damaged."""
        path = self._file_of.get(name)
        if path is None:
            raise ConfigError(f"checkpoint {self._folder}: no weight {name}", param="checkpoint")
        with naming(path):
            weight = self._file(path).get_tensor(name)
        self.names.append(name)
        return weight.to(device=self._device, dtype=dtype or self._dtype)

    def check(self) -> None:
        """Open every file of weights. Raises: ConfigError if one is missing or damaged."""
        for path in dict.fromkeys(self._file_of.values()):
            with naming(path):
                self._file(path)

    def joined(self, names: Iterable[str]) -> Tensor:
        """Read several matrices as one, stacked along their outputs."""
        return torch.cat([self.get(name) for name in names])

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Convert errors of reading a file to ConfigError with its name."""
    try:
        yield
    except (ValueError, KeyError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {path.parent}: {path.name} cannot be read ({error}); fetch it again", param="checkpoint"
        ) from error


def _file_of_each_weight(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.exists():
        with naming(index):
            shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {name: folder / shard for name, shard in shards.items()}
    if single.exists():
        with naming(single), safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    raise NoSafeWeights.of(folder, f"{SINGLE} or {INDEX}")
