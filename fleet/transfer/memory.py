"""The arena's memory, and the layout of a slot: a header with the generation, then the tensor.
Knows no NIXL.

A read copies header and tensor together; a private copy is verified, so that late writes cannot
change it.
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
"""Generation, tensor length in bytes. A wiped header is zero, which is no generation."""


def flat_bytes(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> memoryview:
    """Return a tensor's bytes as one flat view, whose size is checked before anything is allocated
    for it.
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
        """`huge_pages`: use them where the kernel allows it: a read in the host's memory is up to
        three times as fast then.
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
        """Copy a tensor's flat bytes into a slot under their header; return their checksum."""
        start = slot.offset + HEADER.size
        # The header is written last: until then, readers of the slot's former content are refused.
        self.wipe(slot)
        self.view[start : start + source.nbytes] = source
        HEADER.pack_into(self.view, slot.offset, slot.generation, source.nbytes)
        return zlib.crc32(source)

    def wipe(self, slot: ArenaSlot) -> None:
        """Make later reads of this slot fail, without changing its tensor."""
        HEADER.pack_into(self.view, slot.offset, 0, 0)

    def open(self, slot: ArenaSlot, ref: TensorRef) -> bytes:
        """Copy what a read of `ref` has written to `slot`, and verify it.

        Raises: TransferError if the producer's slot was freed or reused, or the bytes are not those
        that were published.
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
