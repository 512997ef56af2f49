"""Locations of KV pool pages in a process's memory, for other processes to read. Knows no transport
and no pool.
"""

from typing import NamedTuple

import msgspec


class Memory(NamedTuple):
    """A region of memory that is neither moved nor freed while its process lives. `device`: number
    of its GPU; None: the host.
    """

    address: int
    length_bytes: int
    device: int | None = None


class Span(NamedTuple):
    """A piece of another process's memory, and its destination in this process. Devices as in
    `Memory`, each of its process.
    """

    remote_address: int
    local_address: int
    length_bytes: int
    remote_device: int | None = None
    local_device: int | None = None


class PagesRef(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a pool that is stored layer by layer: `num_layers` layers, `layer_bytes` apart from
    `address` on, in each of which page n is the nth block of `block_bytes`. `layout` names the
    format of a block. `device` as in `Memory`.
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
    """Return the reads that copy the remote pages to the local ones; pages adjacent on both sides
    are one span.

    Empty if the pools differ in shape or layout.
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
    """Return (first position, length) of each run of pages with consecutive numbers on both
    sides.
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
