"""Both ends of a hand-off of computed blocks: the source's offers, and the new owner's pull. Knows no Redis.

Blocks are lent where they lie, in the pool's own pages, if both pools are memory that peers can read; else a copy is offered. A
pull that fails costs time only: what was to be adopted is computed. So does memory that is not found, at either end.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import Location, TensorRef
from fleet.core.clock import now_us
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import PagesRef, spans_between
from fleet.engine.base import Engine, KVBlocks, KVPages
from fleet.transfer.base import BlockRead, Pull, Transfer

log = logging.getLogger(__name__)

KV = "kv"
NO_MEMORY = (MemoryError, RuntimeError)
"""What is raised where none is found: by torch the second."""


def share_pool(engine: Engine, transfer: Transfer) -> None:
    """Let peers read the engine's pages where they lie, where that is possible. Comes before the transfer's metadata is told."""
    memory = engine.kv_memory()
    if memory is not None:
        transfer.register(memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Blocks of `num_rows` rows that `source` holds: in `pages` of its pool, at `location` in its arena, or here as `data`."""

    num_rows: int
    source: WorkerId
    pages: PagesRef | None
    location: Location
    data: bytes


class Offers:
    """What this worker holds for others, until it was taken or withdrawn.

    Lent pages have no generation, so nobody may still take them when they are used again: `free` comes after the script that says
    so (`confirm`, `release`), or after the end of the request, or of this incarnation.
    """

    def __init__(self, engine: Engine, transfer: Transfer, worker: WorkerId, lease_s: float) -> None:
        self._engine, self._transfer, self._worker, self._lease_s = engine, transfer, worker, lease_s
        self._until: dict[RequestId, float] = {}
        self._lent: dict[RequestId, KVPages] = {}

    def open_requests(self) -> list[RequestId]:
        return list(self._until)

    def finish(self, request: RequestId) -> KVBlocks | KVPages | None:
        """End a request in the engine, and keep what is computed of it: the pages themselves if they can be lent, or a copy.

        None where there is nothing, or neither could be had.
        """
        blocks: KVBlocks | KVPages | None = None
        try:
            blocks = self._engine.lend_pages(request) if self._transfer.shares_memory else None
            blocks = blocks or self._engine.export_kv(request)
        except Exception:  # the engine's failure over one request, which goes on without
            log.exception("request %s: what is computed of it cannot be handed on; the next owner computes it", request)
        if not isinstance(blocks, KVPages):
            self._engine.finish(request)
        return blocks

    def publish(self, request: RequestId, blocks: KVBlocks | KVPages | None) -> Offer | None:
        """What to tell the next owner; None if there is nothing, or no room for a copy."""
        if blocks is None:
            return None
        self.free(request)
        pages, location, data = None, Location(), b""
        if isinstance(blocks, KVPages):
            self._lent[request], pages = blocks, blocks.at
        else:
            try:
                wire = self._transfer.publish(_owner(request), "uint8", blocks.data.shape, blocks.data.tobytes())
            except (TransferError, *NO_MEMORY) as error:
                log.warning("request %s: what is computed of it is not offered: %s", request, str(error) or type(error).__name__)
                self._transfer.release(_owner(request))
                return None
            if wire.ref is not None:
                location[KV] = wire.ref
            else:
                data = wire.data or b""
        self._until[request] = time.monotonic() + self._lease_s
        return Offer(num_rows=blocks.num_rows, source=self._worker, pages=pages, location=location, data=data)

    def expire(self, request: RequestId) -> None:
        """It is to be withdrawn."""
        if request in self._until:
            self._until[request] = 0.0

    def overdue(self) -> list[RequestId]:
        now = time.monotonic()
        return [request for request, until in self._until.items() if now > until]

    def free(self, request: RequestId) -> None:
        if self._until.pop(request, None) is None:
            return
        pages = self._lent.pop(request, None)
        if pages is not None:
            self._engine.free_pages(pages)
        else:
            self._transfer.release(_owner(request))


def _owner(request: RequestId) -> RequestId:
    """The arena frees by owner, and what else was published for the request must stay."""
    return RequestId(f"{request}/{KV}")


class KVImport:
    """The pull of what was offered. `blocks` once it is here; `failed` once it will not come. `pulled_us`: when it came.

    Pages that are read into belong to it until the engine adopts them, or `take_back`.
    """

    def __init__(
        self, offer: Offer, engine: Engine, transfer: Transfer, peer: Callable[[WorkerId], bytes], deadline_s: float
    ) -> None:
        """`peer`: what is needed to read from a worker. Raises, when called: TransferError for one that is gone."""
        self._offer, self._engine, self._transfer, self._peer = offer, engine, transfer, peer
        self._deadline_s = deadline_s
        self._pull: Pull | None = None
        self._read: BlockRead | None = None
        self._pages: KVPages | None = None
        self.failed = False
        self.pulled_us: int | None = None
        self.blocks: KVBlocks | KVPages | None = None
        if offer.data:
            self._arrived(self._made(offer.data))

    @property
    def num_bytes(self) -> int:
        """Of what was pulled; 0 before it is here."""
        if isinstance(self.blocks, KVPages):
            return self.blocks.at.length_bytes
        return self.blocks.data.nbytes if self.blocks is not None else 0

    def poll(self) -> None:
        """Go on with the pull, beginning it the first time."""
        if self.failed or self.blocks is not None:
            return
        try:
            blocks = self._poll_pages(self._offer.pages) if self._offer.pages is not None else self._poll_copy()
        except (TransferError, *NO_MEMORY) as error:
            log.info("blocks of %s do not come: %s", self._offer.source, str(error) or type(error).__name__)
            self.failed = True
            return
        if blocks is not None:
            self._arrived(blocks)

    def _poll_pages(self, remote: PagesRef) -> KVPages | None:
        if self._read is None:
            self._pages = self._engine.reserve_pages(self._offer.num_rows)
            spans = spans_between(remote, self._pages.at) if self._pages is not None else []
            if not spans:
                raise TransferError("there is no room for the blocks, or the pools are not alike")
            source = self._offer.source
            self._read = self._transfer.read_blocks(source, self._peer(source), spans, self._deadline_s)
        return self._pages if self._read.poll() else None

    def _poll_copy(self) -> KVBlocks | None:
        if self._pull is None:
            ref = self._offer.location[KV]
            assert isinstance(ref, TensorRef), "blocks without room are not offered"
            self._pull = self._transfer.pull(ref, self._peer(ref.agent), self._deadline_s)
        data = self._pull.poll()
        return self._made(data) if data is not None else None

    def _made(self, data: bytes) -> KVBlocks:
        return KVBlocks(num_rows=self._offer.num_rows, data=np.frombuffer(data, np.uint8))

    def _arrived(self, blocks: KVBlocks | KVPages) -> None:
        self.blocks, self.pulled_us = blocks, now_us()

    def cancel(self) -> None:
        for under_way in (self._pull, self._read):
            if under_way is not None and self.blocks is None:
                under_way.cancel()

    def import_into(self, request: RequestId) -> bool:
        """Give the engine what came. Whether it took it; what it fails over, it computes."""
        try:
            taken = self.blocks is not None and self._engine.import_kv(request, self.blocks)
        except Exception:  # the engine's failure over one request, which goes on without
            log.exception("request %s: what came for it cannot be adopted; it is computed here", request)
            taken = False
        if taken:
            self._pages = None
        return taken

    def free_pages(self) -> bool:
        """Free what nobody adopted, as soon as nothing can land in it any more. Whether that is done."""
        if self._pages is not None and (self._read is None or self._read.settled):
            self._engine.free_pages(self._pages)
            self._pages = None
        return self._pages is None
