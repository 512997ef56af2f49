"""Headers of a checkpoint's weight files: names, shapes and types, and their comparison with a
model's configuration.

No weight is read: memory and time do not grow with the size of the files. Knows no model.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from fleet.core.errors import ConfigError
from fleet.models.checkpoint import file_of_each_weight, naming
from fleet.spans.protocol.plan import ModelSizes

TOLERANCE = 0.01
"""Share of a layer's elements by which headers and configuration may differ, since a process may
store norms in another form than the files.
"""
MAX_DIMS = 3
"""Most dimensions of a weight in a layer; a tensor with more is a constant, such as the causal mask
of GPT-2.
"""
_LAYER = re.compile(r"(.*?)\.(\d+)\.")
_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F4": 4,
}
_BITS_OF_OTHERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A weight as the header of its file describes it. `dtype`: type in safetensors notation, such
    as BF16.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BITS.get(self.dtype, _BITS_OF_OTHERS) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHeaders:
    """The weights of a checkpoint. `num_files`: number of weight files, missing files included.
    `missing`: names of files that the checkpoint's index names and that do not exist; `weights`
    lacks their weights.
    """

    weights: Mapping[str, StoredWeight]
    num_files: int
    missing: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({weight.dtype for weight in self.weights.values()}))


def read_weight_headers(folder: Path) -> WeightHeaders | None:
    """Read the headers of a checkpoint's files; None if the folder has no weights. Raises:
    ConfigError for a damaged file.
    """
    if not any(folder.glob("*.safetensors*")):
        return None
    files = sorted(set(file_of_each_weight(folder).values()))
    present = [file for file in files if file.exists()]
    weights: dict[str, StoredWeight] = {}
    for path in present:
        with naming(path), safe_open(path, "pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                weights[name] = StoredWeight(shape=tuple(part.get_shape()), dtype=part.get_dtype())
    missing = tuple(file.name for file in files if not file.exists())
    return WeightHeaders(weights=weights, num_files=len(files), missing=missing)


def check_weight_headers(
    folder: Path, headers: WeightHeaders, sizes: ModelSizes, itemsize: int
) -> None:
    """Check that a checkpoint's files have as many elements per layer as its configuration
    describes, and enough elements beside the layers; dtypes may differ.

    `sizes`: sizes of the model in bytes, computed for weights of `itemsize` bytes. Layers are
    recognised by the layer numbers in names; names are not compared otherwise, since a process may
    join several weights. Raises: ConfigError naming the first difference.
    """
    expected = [size // itemsize for size in sizes.layers]
    if not any(expected):
        return
    lists = _numbers_by_list(headers.weights)
    name = min(lists, key=lambda name: _distance(lists[name], expected), default="")
    found = lists.get(name, {})
    for layer, wanted in enumerate(expected):
        stored = found.get(layer, 0)
        if not stored:
            _refuse(
                folder,
                f"the weight files have no layer {layer}, and config.json describes "
                f"{len(expected)} layers",
            )
        if abs(stored - wanted) > TOLERANCE * wanted:
            _refuse(
                folder,
                f"{name}.{layer} has {stored} numbers in the weight files, and {wanted} by "
                "config.json",
            )
    num_all = sum(math.prod(weight.shape) for weight in headers.weights.values())
    beside = num_all - sum(found.values())
    wanted = (
        sizes.embedding + sizes.before + sizes.after + sizes.head * (not sizes.tied)
    ) // itemsize
    if beside < (1 - TOLERANCE) * wanted:
        _refuse(
            folder,
            f"the weight files have {beside} numbers beside the layers, and embedding and "
            f"output head have {wanted}",
        )


def _numbers_by_list(weights: Mapping[str, StoredWeight]) -> dict[str, dict[int, int]]:
    """Return the number of elements in each layer's weights, as {name of the list of layers:
    {layer: number of elements}}.
    """
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, weight in weights.items():
        place = _LAYER.match(name)
        if place is not None and len(weight.shape) <= MAX_DIMS:
            lists[place[1]][int(place[2])] += math.prod(weight.shape)
    return lists


def _distance(found: Mapping[int, int], expected: list[int]) -> int:
    """Return the number of elements by which a list of layers differs from the expected layers;
    additional layers are ignored. `expected`: elements of each layer.
    """
    return sum(abs(found.get(layer, 0) - wanted) for layer, wanted in enumerate(expected))


def _refuse(folder: Path, difference: str) -> None:
    raise ConfigError(
        f"checkpoint {folder}: {difference}; fetch it again, or give one that is not quantized "
        "to packed numbers",
        param="checkpoint",
    )
