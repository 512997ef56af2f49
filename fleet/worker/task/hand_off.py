"""Hand-offs of KV blocks, at both ends: offers of the source (prefill) worker, and imports of the
new owner (decode). Knows no Redis.

If peers can read both KV pools, pages are lent where they lie in the source's pool; else a copy is
offered. An import that fails, including for lack of memory at either end, costs only time: the new
owner computes the positions itself.
"""

import logging
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
NO_MEMORY = (MemoryError, RuntimeError)
"""Errors of a failed allocation; torch raises RuntimeError."""


def _pool_memory(engine: Engine) -> Memory | None:
    pages = engine.kv.pages if engine.kv is not None else None
    return pages.memory if pages is not None else None


def pages_of(kv: KVTransfer | None) -> KVPagePool:
    """Return the pool of an engine that lends or reserves pages."""
    assert kv is not None and kv.pages is not None, "pages of an engine without a shared pool"
    return kv.pages


def pool_on_gpu(engine: Engine, buffer_device: str) -> bool:
    """Return True if the engine's KV pool is in GPU memory and peers are to read it there, where
    NIXL can. `buffer_device`: value of `transfer.buffer_device`.
    """
    memory = _pool_memory(engine)
    return memory is not None and memory.device is not None and buffer_device != "cpu"


def share_pool(engine: Engine, transfer: Transfer, buffer_device: str = "auto") -> None:
    """Register the engine's KV pool with `transfer`, so that peers read its pages in place, where
    that is possible. Call before the transfer's metadata is published.

    Raises: TransferError if NIXL refuses host memory; ConfigError if NIXL refuses GPU memory and
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
    """Keys and values of a task's first `num_rows` positions, which worker `source` offers to the
    next owner: as `pages` of its pool, as a copy at `location` in its arena, or inline as `data`.
    """

    num_rows: int
    source: WorkerId
    pages: PagesRef | None
    location: Location
    data: bytes


class Offers:
    """KV blocks that this worker offers to next owners of its tasks. An offer stands until the
    blocks are imported, the new owner declines them, or the request ends.

    A peer that reads a lent page cannot tell whether it was reused. So call `free` only when no
    peer can still be importing: after the script that ensures this (`confirm`, `release`), or after
    the end of the request or of this incarnation.
    """

    def __init__(self, engine: Engine, transfer: Transfer, worker: WorkerId) -> None:
        self._engine, self._kv = engine, engine.kv
        self._transfer = transfer
        self._worker = worker
        self._open: set[RequestId] = set()
        self._withdrawn: set[RequestId] = set()
        self._lent: dict[RequestId, KVPages] = {}

    def open_requests(self) -> list[RequestId]:
        return list(self._open)

    def num_copies(self) -> int:
        """Return the number of offered copies, each of which frees its room in the arena when its
        offer ends.
        """
        return len(self._open) - len(self._lent)

    def has_room(self) -> bool:
        """Return False while lent pages leave the pool too few pages for further requests."""
        pages = self._kv.pages if self._kv is not None and self._lent else None
        return pages is None or pages.may_lend()

    def finish(self, request: RequestId) -> KVBlocks | KVPages | None:
        """End a request in the engine and return its computed keys and values: the pages themselves
        if they can be lent, else a copy; None if there is nothing to hand off or the engine fails.
        Pass the result to `publish` or `free_blocks`.
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
        """Free blocks that `finish` returned and that were not published."""
        if isinstance(blocks, KVPages):
            pages_of(self._kv).free(blocks)

    def publish(self, request: RequestId, blocks: KVBlocks | KVPages | None) -> Offer | None:
        """Offer blocks to the request's next owner, in place of an earlier offer. Return None if
        there are no blocks, or no room for a copy.
        """
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
                self._transfer.release(_arena_owner(request))
                if not self.num_copies():
                    log.warning(
                        "request %s: the computed rows are not offered: %s",
                        request,
                        str(error) or type(error).__name__,
                    )
                return None
            if wire.ref is not None:
                location[KV] = wire.ref
            else:
                data = wire.data or b""
        self._open.add(request)
        return Offer(
            num_rows=blocks.num_rows, source=self._worker, pages=pages, location=location, data=data
        )

    def withdraw(self, request: RequestId) -> None:
        """Mark a request's offer as to be withdrawn: its blocks stay until the script `release` has
        ensured that no worker imports them.
        """
        if request in self._open:
            self._withdrawn.add(request)

    def withdrawn(self) -> list[RequestId]:
        return list(self._withdrawn)

    def free(self, request: RequestId) -> None:
        self._withdrawn.discard(request)
        if request not in self._open:
            return
        self._open.remove(request)
        pages = self._lent.pop(request, None)
        if pages is not None:
            self.free_blocks(pages)
        else:
            self._transfer.release(_arena_owner(request))


def _arena_owner(request: RequestId) -> RequestId:
    """Return the name under which a request's copied blocks are stored in the arena. The name
    differs from the request's own id, since the arena frees by name and the request's other tensors
    must stay.
    """
    return RequestId(f"{request}/{KV}")


class ImportState(Enum):
    """State of an import of KV blocks by the new owner of a task."""

    PULLING = "pulling"
    """The blocks are being read from the source."""
    ARRIVED = "arrived"
    """Blocks have arrived; the source may still withdraw the offer."""
    CONFIRMING = "confirming"
    """A script asks Redis whether the blocks are still on offer."""
    IMPORTED = "imported"
    FAILED = "failed"
    """Blocks cannot arrive, or cannot be imported: the engine computes the positions."""
    ABANDONED = "abandoned"
    """The import has ended without use: the task has ended, the offer was withdrawn, or the import
    failed.
    """


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
    """Import of KV blocks that another worker offers. `blocks` is set when they have arrived, at
    time `pulled_us`.

    Destination pages of a read belong to the import until the engine imports them, or `free_pages`
    frees them.
    """

    def __init__(
        self,
        offer: Offer,
        kv: KVTransfer | None,
        transfer: Transfer,
        peer: Callable[[WorkerId], bytes],
        deadline_s: float,
    ) -> None:
        """Prepare an import; `poll` begins it. `peer`: function that returns the metadata needed to
        read from a worker, or raises TransferError if the worker is gone. `deadline_s`: longest
        time of the read.
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
        """Check whether the blocks have arrived; the first call begins to read them."""
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
        """End the import, and cancel reads in progress."""
        self.enter(ImportState.ABANDONED)
        for pending in (self._pull, self._read):
            if pending is not None and self.blocks is None:
                pending.cancel()

    def import_into(self, request: RequestId) -> bool:
        """Give the arrived blocks, whose offer is confirmed, to the engine; return False if it must
        compute the positions instead.
        """
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
        """Free destination pages that the engine did not import, once no read can write to them any
        more. Return True when no such pages are left.
        """
        if self._pages is not None and (self._read is None or self._read.settled):
            pages_of(self._kv).free(self._pages)
            self._pages = None
        return self._pages is None


class AbandonedImports:
    """Imports that are no longer wanted, kept until their destination pages are free."""

    def __init__(self) -> None:
        self._imports: list[KVImport] = []

    def abandon(self, kv_import: KVImport | None) -> None:
        if kv_import is not None:
            kv_import.abandon()
            self._imports.append(kv_import)

    def free_pages(self) -> None:
        self._imports = [kv_import for kv_import in self._imports if not kv_import.free_pages()]

    def close(self) -> None:
        """Free all destination pages. Call after the transfer was closed, when no read is left."""
        self.free_pages()
        assert not self._imports, "a read continues although its transfer is closed"
