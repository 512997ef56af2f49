"""Packed draft heads in the memory of workers, as they publish them for others to read."""

import msgspec


class HeldHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A version of the draft head in a worker's registered host memory. Units: bytes."""

    version: int
    address: int
    num_bytes: int
