"""Both ends of a hand-off of computed blocks: the source's offers, and the new owner's pull. Knows no Redis and no engine.

A pull that fails costs time only: what was to be adopted is computed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import Location
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.engine.base import KVBlocks
from fleet.transfer.base import Pull, Transfer

KV = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Blocks of `num_rows` rows that an earlier owner holds for us, at `location` or here as `data`."""

    num_rows: int
    location: Location
    data: bytes


class Offers:
    """What this worker holds for others: freed when it was taken, when its lease is over, or when the request has ended."""

    def __init__(self, transfer: Transfer, lease_s: float) -> None:
        self._transfer, self._lease_s = transfer, lease_s
        self._until: dict[RequestId, float] = {}

    def requests(self) -> list[RequestId]:
        return list(self._until)

    def publish(self, request: RequestId, blocks: KVBlocks) -> tuple[Location, bytes]:
        """Where the blocks are from now on; nowhere if the arena has no room for them."""
        try:
            wire = self._transfer.publish(_owner(request), "uint8", blocks.data.shape, blocks.data.tobytes())
        except TransferError:
            return {}, b""
        self._until[request] = time.monotonic() + self._lease_s
        return ({KV: wire.ref}, b"") if wire.ref is not None else ({}, wire.data or b"")

    def overdue(self) -> list[RequestId]:
        now = time.monotonic()
        return [request for request, until in self._until.items() if now > until]

    def free(self, request: RequestId) -> None:
        if self._until.pop(request, None) is not None:
            self._transfer.release(_owner(request))


def _owner(request: RequestId) -> RequestId:
    """The arena frees by owner, and what else was published for the request must stay."""
    return RequestId(f"{request}/{KV}")


class Adoption:
    """The pull of what was offered. `blocks` once it is here; `failed` once it will not come."""

    def __init__(self, offer: Offer, transfer: Transfer, peer: Callable[[WorkerId], bytes | None], deadline_s: float) -> None:
        self._offer, self._transfer, self._peer = offer, transfer, peer
        self._deadline_s = deadline_s
        self._pull: Pull | None = None
        self.failed = False
        self.blocks = self._made(offer.data) if offer.data else None

    def poll(self) -> None:
        """Go on with the pull, beginning it the first time."""
        if self.failed or self.blocks is not None:
            return
        try:
            data = self._begun().poll()
        except TransferError:
            self.failed = True
            return
        self.blocks = self._made(data) if data is not None else None

    def _begun(self) -> Pull:
        if self._pull is None:
            ref = self._offer.location[KV]
            metadata = self._peer(ref.agent)
            if metadata is None:
                raise TransferError(f"worker {ref.agent}, which holds the blocks, is gone")
            self._pull = self._transfer.pull(ref, metadata, self._deadline_s)
        return self._pull

    def _made(self, data: bytes) -> KVBlocks:
        return KVBlocks(num_rows=self._offer.num_rows, data=np.frombuffer(data, np.uint8))

    def cancel(self) -> None:
        if self._pull is not None and self.blocks is None:
            self._pull.cancel()
