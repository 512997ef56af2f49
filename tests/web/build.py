"""Builders of msgspec structs of the production types (chunks, views of workers and requests) for
tests. A test names the fields that matter to it; the other required fields get empty values.
"""

from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from msgspec.structs import replace

from fleet.core.chunk import LOGPROBS, TOP_IDS, Chunk, WireTensor
from fleet.core.ids import Epoch
from fleet.core.request import Sampling

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


def with_logprobs(chunk: Chunk, sampling: Sampling) -> Chunk:
    """Return the chunk of token n with its log probability, -n / 8, and the ids 0, 1, ... as the
    most likely ones, with 0, -1, ...; unchanged if the request asks for none. Ids that it names
    have 0, -1, ... in their order.
    """
    if sampling.top_logprobs is None:
        return chunk
    ids = sampling.logprob_ids or range(sampling.top_logprobs)
    top = np.array(ids, dtype="<i4")[None]
    logprobs = np.concatenate([[[-chunk.index / 8]], -np.arange(len(ids))[None]], 1).astype("<f4")
    tensors = {
        name: WireTensor(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())
        for name, array in ((LOGPROBS, logprobs), (TOP_IDS, top))
    }
    return replace(chunk, tensors={**chunk.tensors, **tensors})
