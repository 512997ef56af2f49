"""Frames of a span connection on the wire: a prefix of fixed size, a header, a payload. Knows no
contents of headers.
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
"""Frames with another meaning, in place of `MAGIC`: the sender reads blocks; the name and metadata
of its NIXL agent; a frame whose payload is a block of the ring, as `ring.BLOCK`; the oldest block
has been read.
"""
KINDS = frozenset((MAGIC, READS_BLOCKS, RING, BLOCK_AT, BLOCK_READ))
ByteSource = bytes | bytearray | memoryview
"""C-contiguous memory of any shape and item type; an array of NumPy has a memoryview as `data`."""
PREFIX = struct.Struct(">4sIQ")
"""Magic bytes, which include the version of this format; length of the header; length of the
payload.
"""


class BadFrame(FleetError):
    """A peer sent bytes that are not a frame, or part of one; the connection cannot be used
    further.
    """


@dataclass(frozen=True, slots=True)
class SpanFrame:
    """A received frame of one of `KINDS`. `payload` is memory of its own, which no later frame
    overwrites; it may be empty.
    """

    header: bytes
    payload: memoryview
    kind: bytes = MAGIC


def frame_parts(
    header: bytes, buffers: Sequence[ByteSource], kind: bytes = MAGIC
) -> tuple[list[memoryview], int]:
    """Return the bytes of a frame as parts that share the memory of `header` and `buffers`, and
    their total length.

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
    """Return the bytes of a buffer, of any shape and item type, without copying them."""
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
    """Return memory that the kernel provides as bytes arrive: a length that only was announced
    costs none.
    """
    try:
        return np.empty(num_bytes, np.uint8).data
    except MemoryError as error:
        raise BadFrame(f"this process has no memory for a payload of {num_bytes} bytes") from error
