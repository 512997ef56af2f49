"""Wire format of span connections: a frame is a prefix of fixed size, a header and a payload. Knows
nothing of a header's contents.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase

import numpy as np

from fleet.core.errors import FleetError

MAX_HEADER_BYTES = 16 * 2**20
MAX_PAYLOAD_BYTES = 2 * 2**30
MAGIC = b"FSP1"
READS_BLOCKS, RING, BLOCK_AT, BLOCK_READ = b"FSPA", b"FSPM", b"FSPB", b"FSPF"
"""Magic bytes of frames that concern blocks (payloads read by NIXL). In order: the sender can read
blocks; name and metadata of the sender's NIXL agent; a frame whose payload is a block's place, as
`ring.BLOCK`; the receiver has read the oldest block.
"""
KINDS = frozenset((MAGIC, READS_BLOCKS, RING, BLOCK_AT, BLOCK_READ))
ByteSource = bytes | bytearray | memoryview
"""C-contiguous memory of any shape and item type. For a NumPy array, pass its `data`."""
PREFIX = struct.Struct(">4sIQ")
"""Prefix of a frame: magic bytes, which include the version of this format; header length; payload
length.
"""


class BadFrame(FleetError):
    """The bytes from a peer are not a frame, or end within one. The connection cannot be used
    further.
    """


@dataclass(frozen=True, slots=True)
class SpanFrame:
    """A received frame. `kind`: magic bytes, a member of `KINDS`. `payload`: memory that belongs to
    this frame alone, which no later frame overwrites; may be empty.
    """

    header: bytes
    payload: memoryview
    kind: bytes = MAGIC


def frame_parts(
    header: bytes, buffers: Sequence[ByteSource], kind: bytes = MAGIC
) -> tuple[list[memoryview], int]:
    """Return a frame as a list of memory views, without copying `header` or `buffers`, and its
    length.

    Raises: TypeError if a buffer is not C-contiguous.
    """
    views = [flat_view(buffer) for buffer in buffers]
    payload_len = sum(view.nbytes for view in views)
    assert len(header) <= MAX_HEADER_BYTES, (
        f"a header has {len(header)} bytes, limit {MAX_HEADER_BYTES}"
    )
    assert payload_len <= MAX_PAYLOAD_BYTES, (
        f"a payload has {payload_len} bytes, limit {MAX_PAYLOAD_BYTES}"
    )
    parts = [memoryview(PREFIX.pack(kind, len(header), payload_len)), memoryview(header), *views]
    return [part for part in parts if part.nbytes], PREFIX.size + len(header) + payload_len


def flat_view(buffer: ByteSource) -> memoryview:
    """Return a flat byte view of a buffer of any shape and item type, without copying."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def read_frame(
    stream: BufferedIOBase, max_payload_bytes: int = MAX_PAYLOAD_BYTES
) -> SpanFrame | None:
    """Read the next frame, or return None if the stream ends before it. Raises: BadFrame,
    OSError.
    """
    prefix = stream.read(PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < PREFIX.size:
        raise BadFrame("the peer closed the connection in the middle of a frame")
    magic, header_len, payload_len = PREFIX.unpack(prefix)
    if magic not in KINDS:
        raise BadFrame(
            f"the peer sent {magic!r} in place of a frame, which begins with {MAGIC!r}; run one "
            "version of Fleet on both"
        )
    if header_len > MAX_HEADER_BYTES or payload_len > max_payload_bytes:
        raise BadFrame(
            f"the peer announced a frame with a header of {header_len} and a payload of "
            f"{payload_len} bytes; "
            f"the limits are {MAX_HEADER_BYTES} and {max_payload_bytes}"
        )
    header, payload = stream.read(header_len), _allocate(payload_len)
    if len(header) < header_len or stream.readinto(payload) < payload_len:
        raise BadFrame("the peer closed the connection in the middle of a frame")
    return SpanFrame(header, payload, magic)


def _allocate(num_bytes: int) -> memoryview:
    """Return memory for a payload. The kernel provides pages only as bytes arrive, so that an
    announced length alone costs no memory.
    """
    try:
        return np.empty(num_bytes, np.uint8).data
    except MemoryError as error:
        raise BadFrame(f"this process has no memory for a payload of {num_bytes} bytes") from error
