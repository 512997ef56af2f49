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
PROMPT_TOKENS = "prompt_tokens"
"""Name of a figure in the first chunk of an answer: number of prompt tokens. Stages that build the
prompt themselves send it, since the gateway cannot know the number.
"""
LOGPROBS, TOP_IDS = "logprobs", "top_ids"
"""Tensors beside the token `ids` [n] of an answer whose request asks for log probabilities:
`logprobs` float32 [n, 1 + k], of each token and of the k most likely ids at its place, and
`top_ids` int32 [n, k], these ids.
"""
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
    """Location of a tensor's bytes in its producer's arena. A consumer verifies `generation` and
    `checksum` before use.
    """

    agent: WorkerId
    address: int
    length_bytes: int
    device_id: int
    generation: int
    checksum: int
    slot: int


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on an edge: C-contiguous little-endian bytes inline, or a reference from which to
    pull them.

    Invariants: length = product(shape) x itemsize. In a stored header `ref` is unset; without
    `data`, the location is in the field `loc` of the log.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    ref: TensorRef | None = None

    @property
    def length_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def without(self, num_rows: int) -> "WireTensor":
        """Return an inline tensor without its first `num_rows` rows."""
        num_bytes = num_rows * math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]
        return WireTensor(
            dtype=self.dtype,
            shape=(self.shape[0] - num_rows, *self.shape[1:]),
            data=None if self.data is None else self.data[num_bytes:],
        )


class Chunk(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Immutable chunk header.

    `walk`: the consumer is in this walk from this chunk on; None: no change. `producer_walk`: walk
    of the producer when it produced the chunk. `boundary`: the consumer changes its walk at this
    chunk; `walk` names the new walk, or the conductor's notice does if the conductor drives walks.
    `ordinal`: number of items that the producer made in `producer_walk` before this chunk. `final`:
    no chunk follows; the edge ends when `consumed` reaches index + 1. A final chunk may be empty.
    `produced_us`: wall clock of the producer when it produced the chunk, for the trace only.
    `first_row`: position in the edge of the chunk's first row, which does not depend on how earlier
    rows were divided into chunks. `figures`: numbers about the request, by name, for the consumer
    to report; for example `PROMPT_TOKENS`.
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
    figures: dict[str, int] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows of the chunk's first tensor, by which the rows of an edge are counted."""
        return next((tensor.shape[0] for tensor in self.tensors.values() if tensor.shape), 0)

    @property
    def num_bytes(self) -> int:
        """Size of the chunk's tensors, inline or not."""
        return sum(tensor.length_bytes for tensor in self.tensors.values())

    def without(self, num_rows: int) -> "Chunk":
        """Return the chunk without its first `num_rows` rows, and without tensors if it has no more
        rows. Raises: ChunkOrderError if rows remain, and a tensor is not stored inline or differs
        in its number of rows from the first.
        """
        if num_rows >= self.num_rows:
            return msgspec.structs.replace(
                self, tensors={}, first_row=self.first_row + self.num_rows
            )
        if any(
            tensor.data is None or tensor.shape[:1] != (self.num_rows,)
            for tensor in self.tensors.values()
        ):
            raise ChunkOrderError(
                f"edge {self.edge}: chunk {self.index} cannot be cut; its tensors differ in rows, "
                "or are not inline"
            )
        rest = {name: tensor.without(num_rows) for name, tensor in self.tensors.items()}
        return msgspec.structs.replace(self, tensors=rest, first_row=self.first_row + num_rows)


Location = dict[str, TensorRef | bytes]
"""Location of each remote tensor of a chunk, by tensor name; the bytes themselves if the tensor was
recomputed and did not fit into the arena.
"""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)
decode_location = msgspec.msgpack.Decoder(Location).decode


def encode_location(location: Location) -> bytes:
    return _encoder.encode(location)


def encode_chunk(chunk: Chunk) -> bytes:
    return _encoder.encode(chunk)


def decode_chunk(raw: bytes) -> Chunk:
    """Decode a chunk header. Raises: UnknownWireVersion if another protocol version wrote it."""
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
