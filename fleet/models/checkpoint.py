"""Readers of model weights by name; the checkpoint reader opens only the files of requested
weights. Knows no model.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.core.errors import ConfigError, NoSafeWeights

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_MAPPED_BYTES = 512 << 20
"""Bytes of weights read from mapped files after which all files are closed, since pages that were
read count as this process's memory until then.
"""


class WeightReader(ABC):
    """Base class of sources of weights. A weight is read by name directly into memory of one device
    and dtype.

    `source`: description of the source for errors. `known`: names of the source's weights.
    `fp8_experts`: the matrices of experts are to be held as float8_e4m3fn, rounded while they are
    read. `names`: names of the weights read so far, in order. `rounded`: tensors that were rounded
    from weights so far.
    """

    def __init__(
        self,
        source: str,
        known: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8_experts: bool = False,
    ) -> None:
        self._source = source
        self._known = known
        self._device = device
        self._dtype = dtype
        self.fp8_experts = fp8_experts
        self._progress: Callable[[float], None] = lambda _: None
        self._num_read, self._num_expected = 0, 0
        """Elements of the weights read so far, and of all weights that `report_to` expects."""
        self.names: list[str] = []
        self.rounded: list[Tensor] = []

    def report_to(self, progress: Callable[[float], None], names: Sequence[str]) -> None:
        """Call `progress` after each weight read from now on, with the share (0 to 1) of the
        elements of the weights `names` that has been read.
        """
        self._progress, self._num_expected = (
            progress,
            sum(math.prod(self.shape(name)) for name in names),
        )

    def has(self, name: str) -> bool:
        return name in self._known

    def under(self, prefix: str) -> list[str]:
        return [name for name in self._known if name.startswith(prefix)]

    def first_prefix(self, prefixes: Sequence[str]) -> str:
        """Return the first of the prefixes with which any weight's name begins. Folders written by
        different tools nest names differently.

        Raises: ConfigError if no name begins with any of the prefixes.
        """
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in self._known):
                return prefix
        raise ConfigError(
            f"{self._source}: no weights under {' or '.join(prefixes)}", param="checkpoint"
        )

    def get(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read a weight, converted to `dtype`, by default the reader's own. Raises: ConfigError if
        the source has no weight of this name, or its file is missing or damaged.
        """
        out = self.empty(self.shape(name), dtype=dtype)
        self.read_into(out, name)
        return out

    def joined(self, names: Sequence[str]) -> Tensor:
        """Read several matrices into one, concatenated along the output dimension (the first)."""
        heights = [self.shape(name)[0] for name in names]
        out = self.empty((sum(heights), *self.shape(names[0])[1:]))
        for part, name in zip(out.split(heights), names, strict=True):
            self.read_into(part, name)
        return out

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Read several weights of the same shape into one tensor, stacked along a new first
        dimension.
        """
        out = self.empty((len(names), *self.shape(names[0])))
        for part, name in zip(out, names, strict=True):
            self.read_into(part, name)
        return out

    def parts(self, name: str) -> Iterator[Tensor]:
        """Read a weight in parts along its first dimension, for example expert by expert. The same
        memory holds each part in turn.
        """
        num_parts, *shape = self.shape(name)
        out = self.empty(shape)
        for number in range(num_parts):
            self._write(out, name, number)
            self._count(out)
            yield out
        self.names.append(name)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor on the reader's device, in its dtype unless `dtype` is
        set.
        """
        return torch.empty(tuple(shape), device=self._device, dtype=dtype or self._dtype)

    def read_into(self, out: Tensor, name: str) -> None:
        """Read a weight into the tensor `out` of the same shape. Raises: ConfigError as `get`, and
        if the shapes differ.
        """
        self._write(out, name)
        self.names.append(name)
        self._count(out)

    def _count(self, out: Tensor) -> None:
        """Report that the tensor `out` has been read."""
        self._num_read += out.numel()
        if self._num_expected:
            self._progress(min(1.0, self._num_read / self._num_expected))

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight. Raises: ConfigError as `get`."""

    @abstractmethod
    def _write(self, out: Tensor, name: str, part: int | None = None) -> None:
        """Write a weight, or one part of it along the first dimension, into the tensor `out`.
        Raises: ConfigError as `read_into`.
        """

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self._source}: no weight {name}", param="checkpoint")


class CheckpointReader(WeightReader):
    """Reader of the weights in a checkpoint folder, which copies each weight once from its file to
    its place.

    Invariants: memory beside the returned weights is at most `MAX_MAPPED_BYTES` and one weight.

    Raises: ConfigError if the folder has no safetensors files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8_experts: bool = False,
    ) -> None:
        self._file_of = file_of_each_weight(folder)
        super().__init__(
            f"checkpoint {folder}",
            self._file_of,
            device=device,
            dtype=dtype,
            fp8_experts=fp8_experts,
        )
        self._open: dict[Path, safe_open] = {}
        self._num_mapped = 0
        """Bytes read since the files were last closed."""

    def check(self) -> None:
        """Check that all weight files can be opened. Raises: ConfigError if a file is missing or
        damaged.
        """
        for path in dict.fromkeys(self._file_of.values()):
            with naming(path), safe_open(path, "pt"):
                pass

    def shape(self, name: str) -> tuple[int, ...]:
        with self._opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def _write(self, out: Tensor, name: str, part: int | None = None) -> None:
        with self._opened(name) as file:
            weight = (
                file.get_tensor(name) if part is None else file.get_slice(name)[part : part + 1][0]
            )
            if weight.shape != out.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(weight.shape)}, the configuration means "
                    f"{tuple(out.shape)}"
                )
            out.copy_(weight)
        self._num_mapped += weight.nbytes
        if self._num_mapped > MAX_MAPPED_BYTES:
            self._open.clear()
            self._num_mapped = 0

    @contextmanager
    def _opened(self, name: str) -> Generator[safe_open]:
        path = self._file_of.get(name)
        if path is None:
            raise self._missing(name)
        with naming(path):
            yield self._file(path)

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Context manager that converts errors of reading the file `path` to a ConfigError that names
    the file.
    """
    try:
        yield
    except (ValueError, KeyError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {path.parent}: {path.name} cannot be read ({error}); fetch it again",
            param="checkpoint",
        ) from error


def file_of_each_weight(folder: Path) -> dict[str, Path]:
    """Return the file of each weight by name. Raises: ConfigError if the folder holds no
    safetensors, or a damaged index.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.exists():
        with naming(index):
            shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {name: folder / shard for name, shard in shards.items()}
    if single.exists():
        with naming(single), safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    raise NoSafeWeights.of(folder, f"{SINGLE} or {INDEX}")
