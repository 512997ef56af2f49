"""Builders of msgspec structs of the production types (chunks, views of workers and requests) for
tests. A test names the fields that matter to it; the other required fields get empty values.
"""

from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from fleet.core.chunk import Chunk, WireTensor
from fleet.core.ids import Epoch

S = TypeVar("S", bound=msgspec.Struct)


def build(kind: type[S], /, **given: Any) -> S:
    """Build a struct. Required fields that are missing in `given` get the empty value of their
    type.
    """
    return kind(**({name: _empty(type_) for name, type_ in _required(kind)} | given))


@cache
def _required(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Return name and type of each required field. Reading them from annotations is slow."""
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.type) for field in fields if field.required]


def build_rows(kind: type[S], names: str, *rows: tuple[object, ...]) -> list[S]:
    """Build one struct per row. `names`: field names of the columns, separated by spaces."""
    return [build(kind, **dict(zip(names.split(), row, strict=True))) for row in rows]


def _empty(kind: Any) -> object:
    kind = getattr(kind, "__supertype__", kind)
    return None if NoneType in get_args(kind) else (get_origin(kind) or kind)()


def tensor_chunk(request: str, edge: str, name: str, data: np.ndarray, **fields: Any) -> Chunk:
    """Build a chunk that holds one tensor, by default the only chunk of its edge."""
    tensor = WireTensor(dtype=data.dtype.name, shape=data.shape, data=data.tobytes())
    given = {"epoch": Epoch(1), "final": True, "tensors": {name: tensor}} | fields
    return build(Chunk, request=request, edge=edge, **given)
