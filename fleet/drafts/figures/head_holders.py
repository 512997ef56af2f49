"""Records of the packed draft heads that workers hold in memory for other workers to read."""

import msgspec


class HeldHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A version of the draft head that a worker holds in registered host memory, for other workers
    to read.

    `sha256`: hash of its weights. `address`: address in the worker's memory. `num_bytes`: size of
    the packed head.
    """

    sha256: str
    address: int
    num_bytes: int
