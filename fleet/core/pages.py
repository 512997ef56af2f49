"""Locations of KV pool pages in a process's memory, from which other processes read them. Knows no
transport and no pool.
"""

from typing import NamedTuple

import msgspec


class Memory(NamedTuple):
    """A region of memory that is neither moved nor freed while its process lives. `device`: GPU
    number; None for host memory.
    """

    address: int
    length_bytes: int
    device: int | None = None


class Span(NamedTuple):
    """A contiguous copy from another process's memory (`remote_*`) to this process's (`local_*`).
    Devices: GPU numbers as the respective process counts them; None for host memory.
    """

    remote_address: int
    local_address: int
    length_bytes: int
    remote_device: int | None = None
    local_device: int | None = None


class PagesRef(msgspec.Struct, frozen=True, array_like=True):
    """Location of some pages of a KV pool that is stored layer by layer. The pool begins at
    `address`; its `num_layers` layers are `layer_bytes` apart, and in each layer page n is the nth
    block of `block_bytes`.

    `pages`: page numbers. `layout`: name of a block's format. `device`: GPU number; None for host
    memory.
    """

    address: int
    num_layers: int
    layer_bytes: int
    block_bytes: int
    pages: tuple[int, ...]
    layout: str = ""
    device: int | None = None

    @property
    def length_bytes(self) -> int:
        return self.num_layers * self.block_bytes * len(self.pages)


def spans_between(remote: PagesRef, local: PagesRef) -> list[Span]:
    """Return the copies that bring `remote` pages to the `local` pages of this process. Pages that
    are adjacent on both sides are copied together.

    Empty if the two pools differ in shape or layout.
    """
    shapes = {
        (ref.num_layers, ref.block_bytes, ref.layout, len(ref.pages)) for ref in (remote, local)
    }
    if len(shapes) > 1:
        return []
    blocks = _common_runs(remote, local)
    return [
        Span(
            remote.address + layer * remote.layer_bytes + remote.pages[first] * remote.block_bytes,
            local.address + layer * local.layer_bytes + local.pages[first] * local.block_bytes,
            count * remote.block_bytes,
            remote.device,
            local.device,
        )
        for layer in range(remote.num_layers)
        for first, count in blocks
    ]


def _common_runs(remote: PagesRef, local: PagesRef) -> list[tuple[int, int]]:
    """Return the runs of pages with consecutive numbers on both sides: the first index into
    `pages`, and the length.
    """
    runs: list[tuple[int, int]] = []
    for position in range(len(remote.pages)):
        follows = position > 0 and all(
            ref.pages[position] == ref.pages[position - 1] + 1 for ref in (remote, local)
        )
        if follows:
            first, count = runs[-1]
            runs[-1] = (first, count + 1)
        else:
            runs.append((position, 1))
    return runs


_encoder = msgspec.msgpack.Encoder()
decode_pages = msgspec.msgpack.Decoder(PagesRef).decode


def encode_pages(pages: PagesRef) -> bytes:
    return _encoder.encode(pages)
