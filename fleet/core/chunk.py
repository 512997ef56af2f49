"""The chunk: unit of an edge, identified by (request, edge, index). Knows no transport: tensors are
inline bytes or refs to pull.

A header never changes once appended. The location of a tensor may, so locations are stored in
`loc`, not here.
"""

import math

import msgspec

from fleet.core.errors import ChunkOrderError, UnknownWireVersion
from fleet.core.ids import EdgeName, Epoch, RequestId, Walk, WorkerId

WIRE_VERSION = 1
DTYPE_BYTES = {
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint8": 1,
}


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Location of a tensor's bytes in its producer's arena. `generation` and `checksum` are
    verified before use.
    """

    agent: WorkerId
    address: int
    length_bytes: int
    device_id: int
    generation: int
    checksum: int
    slot: int


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on an edge: C-contiguous little-endian bytes inline, or a ref to pull them by.

    Invariants: length = product(shape) x itemsize; in a stored header `ref` is unset, and no `data`
    means "see `loc`".
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    ref: TensorRef | None = None

    @property
    def length_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Chunk(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Immutable chunk header.

    `walk` is the transition marker: from this chunk on, the consumer is in that walk (None: no
    change). `producer_walk` is the walk of the producer when it produced the chunk.
    `boundary`: a transition begins at this chunk; `walk` names it, or the conductor's notice if the
    conductor drives walks. `ordinal` counts the producer's items in `producer_walk` before this
    chunk.
    `final`: no chunk follows; the edge ends when `consumed` reaches index + 1. A final chunk may be
    empty.
    `produced_us`: wall clock of the producer when it produced the chunk, for the trace only.
    `first_row`: position of its first row in the edge, which does not depend on how earlier rows
    were divided into chunks.
    """

    request: RequestId
    edge: EdgeName
    index: int
    epoch: Epoch
    tensors: dict[str, WireTensor] = {}
    walk: Walk | None = None
    producer_walk: Walk | None = None
    boundary: bool = False
    ordinal: int = 0
    final: bool = False
    produced_us: int = 0
    version: int = WIRE_VERSION
    first_row: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of its first tensor; the rows of an edge are counted by these."""
        return next((tensor.shape[0] for tensor in self.tensors.values() if tensor.shape), 0)

    def without(self, num_rows: int) -> "Chunk":
        """Return the chunk without its first rows. Raises: ChunkOrderError unless it has exactly
        one tensor, inline.
        """
        if num_rows >= self.num_rows:
            return msgspec.structs.replace(
                self, tensors={}, first_row=self.first_row + self.num_rows
            )
        (name, tensor), *others = self.tensors.items()
        if others or tensor.data is None:
            raise ChunkOrderError(
                f"edge {self.edge}: chunk {self.index} cannot be cut; it has more than one "
                "inline tensor"
            )
        rest = WireTensor(
            dtype=tensor.dtype,
            shape=(tensor.shape[0] - num_rows, *tensor.shape[1:]),
            data=tensor.data[num_rows * tensor.length_bytes // tensor.shape[0] :],
        )
        return msgspec.structs.replace(
            self, tensors={name: rest}, first_row=self.first_row + num_rows
        )


Location = dict[str, TensorRef | bytes]
"""Location of each remote tensor of a chunk, by tensor name; its bytes if it was recomputed and the
arena had no room for it.
"""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)
decode_location = msgspec.msgpack.Decoder(Location).decode


def encode_location(location: Location) -> bytes:
    return _encoder.encode(location)


def encode_chunk(chunk: Chunk) -> bytes:
    return _encoder.encode(chunk)


def decode_chunk(raw: bytes) -> Chunk:
    """Raises: UnknownWireVersion if another protocol version wrote it."""
    try:
        chunk = _decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise UnknownWireVersion(
            f"a chunk header could not be read ({error}); are all processes of one version?"
        ) from error
    if chunk.version != WIRE_VERSION:
        raise UnknownWireVersion(
            f"chunk header version {chunk.version}, this process speaks {WIRE_VERSION}"
        )
    return chunk
