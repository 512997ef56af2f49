"""Memory of an arena, and the layout of a slot: a header with the generation, then the tensor.
Knows no NIXL.

A read copies header and tensor together; a private copy of both is verified, so that late writes
cannot change it.
"""

import ctypes
import math
import mmap
import struct
import zlib
from contextlib import suppress

from fleet.core.chunk import DTYPE_BYTES, TensorRef
from fleet.core.errors import TransferError
from fleet.core.pages import Memory
from fleet.transfer.arena import ArenaSlot

HEADER = struct.Struct("<QQ")
"""Slot header: generation, and length of the tensor in bytes. A wiped header is zero, which is no
valid generation.
"""


def flat_bytes(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> memoryview:
    """Return a tensor's bytes as one flat view, after checking that their number matches `dtype`
    and `shape`.
    """
    view = memoryview(data)
    assert view.nbytes == math.prod(shape) * DTYPE_BYTES[dtype], (
        f"{view.nbytes} bytes published as {dtype}{shape}"
    )
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def stored_bytes(length_bytes: int) -> int:
    """Return the size of a slot for a tensor of `length_bytes`."""
    return HEADER.size + length_bytes


class HostMemory:
    """Page-aligned buffer, registered once and kept for a worker's lifetime."""

    def __init__(self, length_bytes: int, *, huge_pages: bool = False) -> None:
        """Allocate the buffer. `huge_pages`: use huge pages where the kernel allows it; reads
        within the host are then up to three times as fast.
        """
        self._map = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.length_bytes = length_bytes

    @property
    def region(self) -> Memory:
        return Memory(self.address, self.length_bytes)

    def seal(self, slot: ArenaSlot, source: memoryview) -> int:
        """Copy a tensor's flat bytes `source` into a slot, after a header with the slot's
        generation; return the checksum of the bytes.
        """
        start = slot.offset + HEADER.size
        # The header is written last: until then, readers of the slot's former content are refused.
        self.wipe(slot)
        self.view[start : start + source.nbytes] = source
        HEADER.pack_into(self.view, slot.offset, slot.generation, source.nbytes)
        return zlib.crc32(source)

    def wipe(self, slot: ArenaSlot) -> None:
        """Clear the header of a slot, so that later reads of it fail; the tensor's bytes are
        unchanged.
        """
        HEADER.pack_into(self.view, slot.offset, 0, 0)

    def open(self, slot: ArenaSlot, ref: TensorRef) -> bytes:
        """Return a verified copy of the tensor that a read of `ref` has written to `slot`.

        Raises: TransferError if the producer's slot was freed or reused, or the bytes are not the
        published ones.
        """
        generation, length_bytes = HEADER.unpack_from(self.view, slot.offset)
        start = slot.offset + HEADER.size
        data = bytes(self.view[start : start + ref.length_bytes])
        if (generation, length_bytes) != (ref.generation, ref.length_bytes):
            raise TransferError(
                f"slot {ref.slot} of {ref.agent} is at generation {generation} ({length_bytes} "
                "bytes), not at "
                f"{ref.generation} ({ref.length_bytes} bytes): it was freed or reused before "
                "the read"
            )
        if zlib.crc32(data) != ref.checksum:
            raise TransferError(
                f"slot {ref.slot} of {ref.agent} was read with the wrong checksum: it changed "
                "during the read"
            )
        return data
