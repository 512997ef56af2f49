"""Where pages of a KV pool lie in a process's memory, so that another process can read them. Knows no transport and no pool."""

from typing import NamedTuple

import msgspec


class Memory(NamedTuple):
    """A region of host memory that neither moves nor goes away while its process lives."""

    address: int
    length_bytes: int


class Span(NamedTuple):
    """A piece of another process's memory, and where it is to go in ours."""

    remote_address: int
    local_address: int
    length_bytes: int


class PagesRef(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a pool that lies in memory layer by layer: in each of `num_layers` layers, which follow each other every
    `layer_bytes` from `address` on, page n is the nth block of `block_bytes`. `layout`: how a block is to be read.
    """

    address: int
    num_layers: int
    layer_bytes: int
    block_bytes: int
    pages: tuple[int, ...]
    layout: str = ""

    @property
    def length_bytes(self) -> int:
        return self.num_layers * self.block_bytes * len(self.pages)


def spans_between(remote: PagesRef, local: PagesRef) -> list[Span]:
    """What is to be read so that the local pages hold what the remote ones do; neighbours on both sides are one span.

    Empty if a block of one has no place in the other: the pools are not alike.
    """
    shapes = {(ref.num_layers, ref.block_bytes, ref.layout, len(ref.pages)) for ref in (remote, local)}
    if len(shapes) > 1:
        return []
    blocks = _common_runs(remote, local)
    return [
        Span(
            remote.address + layer * remote.layer_bytes + remote.pages[first] * remote.block_bytes,
            local.address + layer * local.layer_bytes + local.pages[first] * local.block_bytes,
            count * remote.block_bytes,
        )
        for layer in range(remote.num_layers)
        for first, count in blocks
    ]


def _common_runs(remote: PagesRef, local: PagesRef) -> list[tuple[int, int]]:
    """(first position, length) of pages whose numbers follow each other on both sides."""
    runs: list[tuple[int, int]] = []
    for position in range(len(remote.pages)):
        follows = position > 0 and all(ref.pages[position] == ref.pages[position - 1] + 1 for ref in (remote, local))
        if follows:
            first, count = runs[-1]
            runs[-1] = (first, count + 1)
        else:
            runs.append((position, 1))
    return runs


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PagesRef)


def encode_pages(pages: PagesRef) -> bytes:
    return _encoder.encode(pages)


def decode_pages(raw: bytes) -> PagesRef:
    return _decoder.decode(raw)
