"""Hand-offs of KV blocks, at both ends: the offers of the source, and the import of the new owner.
Knows no Redis.

Pages are lent where they lie in the source's pool if peers can read both pools; else a copy is
offered. An import that fails, for lack of memory at either end too, costs time only: the new owner
computes the rows.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fleet.core.chunk import Location, TensorRef
from fleet.core.clock import now_us
from fleet.core.errors import ConfigError, TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, PagesRef, spans_between
from fleet.engine.base import Engine
from fleet.engine.capabilities import KVBlocks, KVPagePool, KVPages, KVTransfer
from fleet.transfer.base import BlockRead, Pull, Transfer

log = logging.getLogger(__name__)

KV = "kv"
OFFER_LEASE_S = 10.0
"""Lifetime of an offer that no worker imports."""
NO_MEMORY = (MemoryError, RuntimeError)
"""Errors of a failed allocation: torch raises the second."""


def _pool_memory(engine: Engine) -> Memory | None:
    pages = engine.kv.pages if engine.kv is not None else None
    return pages.memory if pages is not None else None


def pages_of(kv: KVTransfer | None) -> KVPagePool:
    """Return the pool of an engine whose pages are lent or reserved."""
    assert kv is not None and kv.pages is not None, "pages of an engine without a shared pool"
    return kv.pages


def pool_on_gpu(engine: Engine, buffer_device: str) -> bool:
    """Return True if peers are to read the engine's pages in a GPU's memory, where NIXL can
    (`transfer.buffer_device`).
    """
    memory = _pool_memory(engine)
    return memory is not None and memory.device is not None and buffer_device != "cpu"


def share_pool(engine: Engine, transfer: Transfer, buffer_device: str = "auto") -> None:
    """Let peers read the engine's pages in place, where that is possible. Call before the
    transfer's metadata is published.

    Raises: TransferError if NIXL refuses host memory; ConfigError if it refuses a GPU's and
    `buffer_device` is cuda.
    """
    memory = _pool_memory(engine)
    if memory is None or (memory.device is not None and not pool_on_gpu(engine, buffer_device)):
        return
    try:
        shared, reason = transfer.register(memory), f"transfers use {transfer.backend}"
    except TransferError as error:
        if memory.device is None:
            raise
        shared, reason = False, error.message
    if shared or memory.device is None:
        return
    if buffer_device == "cuda":
        message = (
            "transfer.buffer_device: peers cannot read the memory of "
            f"cuda:{memory.device} ({reason}); set auto or cpu"
        )
        raise ConfigError(message, param="transfer.buffer_device")
    log.info(
        "keys and values on cuda:%d are handed off through host memory: %s", memory.device, reason
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Blocks of `num_rows` rows that `source` holds: in `pages` of its pool, at `location` in its
    arena, or inline as `data`.
    """

    num_rows: int
    source: WorkerId
    pages: PagesRef | None
    location: Location
    data: bytes


class Offers:
    """Blocks that this worker holds for others, until they are imported or withdrawn.

    Lent pages have no generation, so no peer may still import them when they are reused: call
    `free` only after the script that ensures this (`confirm`, `release`), or after the end of the
    request or of this incarnation.
    """

    def __init__(
        self, engine: Engine, transfer: Transfer, worker: WorkerId, lease_s: float
    ) -> None:
        self._engine, self._kv = engine, engine.kv
        self._transfer = transfer
        self._worker, self._lease_s = worker, lease_s
        self._until: dict[RequestId, float] = {}
        self._lent: dict[RequestId, KVPages] = {}

    def open_requests(self) -> list[RequestId]:
        return list(self._until)

    def finish(self, request: RequestId) -> KVBlocks | KVPages | None:
        """End a request in the engine and keep its computed rows: the pages themselves if they can
        be lent, else a copy.

        None if nothing is computed, or neither was possible.
        """
        blocks: KVBlocks | KVPages | None = None
        try:
            blocks = self._lend(request) or (self._kv.export_blocks(request) if self._kv else None)
        # the engine's failure over one request, which continues without the blocks
        except Exception:
            log.exception(
                "request %s: the computed rows cannot be handed off; the next owner recomputes "
                "them",
                request,
            )
        if not isinstance(blocks, KVPages):
            self._engine.finish(request)
        return blocks

    def _lend(self, request: RequestId) -> KVPages | None:
        pages = self._kv.pages if self._kv is not None and self._transfer.shares_memory else None
        return pages.lend(request) if pages is not None else None

    def free_blocks(self, blocks: KVBlocks | KVPages | None) -> None:
        """Free blocks that were not published."""
        if isinstance(blocks, KVPages):
            pages_of(self._kv).free(blocks)

    def publish(self, request: RequestId, blocks: KVBlocks | KVPages | None) -> Offer | None:
        """Open an offer to the next owner; None if there are no blocks, or no room for a copy."""
        if blocks is None:
            return None
        self.free(request)
        pages, location, data = None, Location(), b""
        if isinstance(blocks, KVPages):
            self._lent[request], pages = blocks, blocks.at
        else:
            try:
                wire = self._transfer.publish(
                    _arena_owner(request), "uint8", blocks.data.shape, blocks.data.tobytes()
                )
            except (TransferError, *NO_MEMORY) as error:
                log.warning(
                    "request %s: the computed rows are not offered: %s",
                    request,
                    str(error) or type(error).__name__,
                )
                self._transfer.release(_arena_owner(request))
                return None
            if wire.ref is not None:
                location[KV] = wire.ref
            else:
                data = wire.data or b""
        self._until[request] = time.monotonic() + self._lease_s
        return Offer(
            num_rows=blocks.num_rows, source=self._worker, pages=pages, location=location, data=data
        )

    def expire(self, request: RequestId) -> None:
        """Make an offer due for withdrawal."""
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
            self.free_blocks(pages)
        else:
            self._transfer.release(_arena_owner(request))


def _arena_owner(request: RequestId) -> RequestId:
    """A name of its own for the copy, since the arena frees by owner and the request's other
    tensors must stay.
    """
    return RequestId(f"{request}/{KV}")


class ImportState(Enum):
    """State of the blocks that a new owner imports."""

    PULLING = "pulling"
    """The blocks are being read from the source."""
    ARRIVED = "arrived"
    """The blocks are here; the source may still withdraw the offer."""
    CONFIRMING = "confirming"
    """Redis is asked whether the blocks are still on offer."""
    IMPORTED = "imported"
    FAILED = "failed"
    """The blocks cannot arrive, or not be imported: the engine computes the rows."""
    ABANDONED = "abandoned"
    """The task has ended, or the offer was withdrawn."""


IMPORT_TRANSITIONS: dict[ImportState, frozenset[ImportState]] = {
    ImportState.PULLING: frozenset(
        {ImportState.ARRIVED, ImportState.FAILED, ImportState.ABANDONED}
    ),
    ImportState.ARRIVED: frozenset({ImportState.CONFIRMING, ImportState.ABANDONED}),
    ImportState.CONFIRMING: frozenset(
        {ImportState.IMPORTED, ImportState.FAILED, ImportState.ABANDONED}
    ),
    ImportState.FAILED: frozenset({ImportState.ABANDONED}),
    ImportState.IMPORTED: frozenset(),
    ImportState.ABANDONED: frozenset(),
}


class KVImport:
    """Import of offered blocks. `blocks` is set from their arrival on, at `pulled_us`.

    Pages that are read into belong to the import until the engine imports them, or `free_pages`.
    """

    def __init__(
        self,
        offer: Offer,
        kv: KVTransfer | None,
        transfer: Transfer,
        peer: Callable[[WorkerId], bytes],
        deadline_s: float,
    ) -> None:
        """`peer` returns the metadata needed to read from a worker; it raises TransferError if the
        worker is gone.
        """
        self._offer, self._kv = offer, kv
        self._transfer, self._peer = transfer, peer
        self._deadline_s = deadline_s
        self._pull: Pull | None = None
        self._read: BlockRead | None = None
        self._pages: KVPages | None = None
        self.state = ImportState.PULLING
        self.pulled_us: int | None = None
        self.blocks: KVBlocks | KVPages | None = None
        if offer.data:
            self._on_arrival(self._as_blocks(offer.data))

    def enter(self, state: ImportState) -> None:
        assert state in IMPORT_TRANSITIONS[self.state], (
            f"blocks of {self._offer.source}: {self.state} cannot become {state}"
        )
        self.state = state

    @property
    def num_bytes(self) -> int:
        """Size of the blocks; 0 before they have arrived."""
        if isinstance(self.blocks, KVPages):
            return self.blocks.at.length_bytes
        return self.blocks.data.nbytes if self.blocks is not None else 0

    def poll(self) -> None:
        """Continue the pull; the first call begins it."""
        if self.state is not ImportState.PULLING:
            return
        try:
            blocks = (
                self._poll_pages(self._offer.pages)
                if self._offer.pages is not None
                else self._poll_copy()
            )
        except (TransferError, *NO_MEMORY) as error:
            log.info(
                "blocks of %s cannot be pulled: %s",
                self._offer.source,
                str(error) or type(error).__name__,
            )
            self.enter(ImportState.FAILED)
            return
        if blocks is not None:
            self._on_arrival(blocks)

    def _poll_pages(self, remote: PagesRef) -> KVPages | None:
        if self._read is None:
            pages = self._kv.pages if self._kv is not None else None
            self._pages = pages.reserve(self._offer.num_rows) if pages is not None else None
            spans = spans_between(remote, self._pages.at) if self._pages is not None else []
            if not spans:
                raise TransferError(
                    "there is no room for the blocks, or the two pools differ in layout"
                )
            source = self._offer.source
            self._read = self._transfer.read_blocks(
                source, self._peer(source), spans, self._deadline_s
            )
        return self._pages if self._read.poll() else None

    def _poll_copy(self) -> KVBlocks | None:
        if self._pull is None:
            ref = self._offer.location[KV]
            assert isinstance(ref, TensorRef), "blocks without room are not offered"
            self._pull = self._transfer.pull(ref, self._peer(ref.agent), self._deadline_s)
        data = self._pull.poll()
        return self._as_blocks(data) if data is not None else None

    def _as_blocks(self, data: bytes) -> KVBlocks:
        return KVBlocks(num_rows=self._offer.num_rows, data=np.frombuffer(data, np.uint8))

    def _on_arrival(self, blocks: KVBlocks | KVPages) -> None:
        self.enter(ImportState.ARRIVED)
        self.blocks, self.pulled_us = blocks, now_us()

    def abandon(self) -> None:
        """Cancel what is still read."""
        self.enter(ImportState.ABANDONED)
        for pending in (self._pull, self._read):
            if pending is not None and self.blocks is None:
                pending.cancel()

    def import_into(self, request: RequestId) -> bool:
        """Give confirmed blocks to the engine; return False if it must compute the rows instead."""
        try:
            imported = self._import_into(request)
        # the engine's failure over one request, which continues without the blocks
        except Exception:
            log.exception(
                "request %s: the pulled blocks cannot be imported; the rows are computed here",
                request,
            )
            imported = False
        self.enter(ImportState.IMPORTED if imported else ImportState.FAILED)
        if imported:
            self._pages = None
        return imported

    def _import_into(self, request: RequestId) -> bool:
        if self._kv is None or self.blocks is None:
            return False
        if isinstance(self.blocks, KVPages):
            return pages_of(self._kv).import_pages(request, self.blocks)
        return self._kv.import_blocks(request, self.blocks)

    def free_pages(self) -> bool:
        """Free pages that were not imported, once no read can write to them any more; return True
        when none are left.
        """
        if self._pages is not None and (self._read is None or self._read.settled):
            pages_of(self._kv).free(self._pages)
            self._pages = None
        return self._pages is None


class AbandonedImports:
    """Imports that are no longer wanted, each until its pages are free."""

    def __init__(self) -> None:
        self._imports: list[KVImport] = []

    def abandon(self, kv_import: KVImport | None) -> None:
        if kv_import is not None:
            kv_import.abandon()
            self._imports.append(kv_import)

    def free_pages(self) -> None:
        self._imports = [kv_import for kv_import in self._imports if not kv_import.free_pages()]

    def close(self) -> None:
        """Free everything after the transfer was closed: no read is left."""
        self.free_pages()
        assert not self._imports, "a read continues although its transfer is closed"
