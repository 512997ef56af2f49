"""Computation of a step by a span worker: checks, KV pool changes, layers. Knows no connection.

The anchor alone allocates pages; a span worker's pool has the same number of pages, and uses the
page numbers that a step names.
Legend: N rows of a step, H hidden size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput, SpanPrefixMismatch
from fleet.engine.torch.kv_pool import KVPool, PageTable, PoolChanges
from fleet.engine.torch.layout import Extent
from fleet.spans.protocol.messages import Returned, SpanExtent, SpanFetch, SpanPass
from fleet.spans.torch.model import SpanComputer, SpanLayers, last_rows
from fleet.spans.torch.prefix_hashes import PrefixHashes

KEY_BYTES = 8
"""Size of a row's key, by which prefixes are compared."""


def extents_of(work: SpanPass) -> list[Extent]:
    """Return where a step's rows lie in a KV pool that has the anchor's page numbers."""
    return [
        Extent(
            table=PageTable(pages=list(each.pages), number=each.table),
            start=each.start,
            stop=each.stop,
            rope_len=each.rope_len,
        )
        for each in work.extents
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRows:
    """Hidden states that leave a span worker after a step.

    `rows`: input of the next worker, or result of the last worker (hidden states or logits); None
    if no process reads them. `tapped_NH`: hidden states of the tapped layer; None if they are not
    wanted.
    """

    rows: Tensor | None
    tapped_NH: Tensor | None


@dataclass(slots=True)
class HostedTable:
    """State of one request's page table in a span worker: its pages, and hashes of the computed
    rows.
    """

    hashes: PrefixHashes = field(default_factory=PrefixHashes)
    pages: tuple[int, ...] = ()


class SpanHost:
    """A loaded span with a KV pool: computes the steps of one anchor's requests.

    `returned`: what the last worker of a route returns; None if another worker follows.
    `last_number`: number of the last computed step. `num_rows`: rows computed so far;
    `num_rows_again`: rows among them that had been computed before.
    """

    def __init__(
        self, layers: SpanLayers, pool: KVPool, *, tiled: bool, returned: Returned | None
    ) -> None:
        self._computer = SpanComputer(layers, pool, tiled=tiled)
        self._pool = pool
        self._returned = returned
        self._tables: dict[int, HostedTable] = {}
        self._used_pages: set[int] = set()
        self.last_number = 0
        self.num_rows = 0
        self.num_rows_again = 0

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    @property
    def has_tapped_layer(self) -> bool:
        return self._computer.layers.has_tapped_layer

    def check(self, work: SpanPass) -> None:
        """Check a step's page numbers and extents before anything is changed.

        Raises: BadInput if the message is damaged.
        """
        page_size = self._pool.page_size
        self._check_pages([page for page, _ in work.zeroed])
        if len({extent.table for extent in work.extents}) < len(work.extents):
            raise BadInput(f"pass {work.number} has a table twice")
        for extent in work.extents:
            self._check_pages(extent.pages)
            num_rows, room = extent.stop - extent.start, len(extent.pages) * page_size
            if num_rows < 1 or extent.stop > room or len(extent.keys) != KEY_BYTES * num_rows:
                rows = (
                    f"rows {extent.start} to {extent.stop} of {room}, with "
                    f"{len(extent.keys)} bytes of keys"
                )
                raise BadInput(f"pass {work.number} has {rows}")

    def _check_pages(self, pages: Sequence[int]) -> None:
        if pages and not 0 <= min(pages) <= max(pages) < self._pool.num_pages:
            raise BadInput(f"page {max(pages)} is not among the {self._pool.num_pages} of the pool")

    def close_tables(self, tables: Iterable[int]) -> None:
        for table in tables:
            self._tables.pop(table, None)

    def resume(self, tables: Iterable[int], completed: int) -> None:
        """Close all page tables except `tables`, at the start of a new route.

        `completed`: the last step that every worker of the last route computed. A worker that
        missed this step also missed changes of the pool; instead, all used pages that are in no
        open table are zeroed.
        """
        self.close_tables(set(self._tables) - set(tables))
        if self.last_number < completed:
            kept = {page for table in self._tables.values() for page in table.pages}
            self._pool.apply(
                PoolChanges(zeroed=[(page, 0) for page in sorted(self._used_pages - kept)])
            )
            self._used_pages = kept

    def advance(self, work: SpanPass) -> None:
        """Zero the pages and close the tables that a step names, and set `last_number` to the
        number of the step.
        """
        assert work.number > self.last_number, f"pass {work.number} after {self.last_number}"
        self.last_number = work.number
        self._pool.apply(PoolChanges(zeroed=list(work.zeroed)))
        self.close_tables(work.closed)

    @torch.inference_mode()
    def run(self, work: SpanPass, rows_NH: Tensor) -> HostedRows:
        """Compute a step after `advance`, and return the hidden states that leave this worker.

        Raises: SpanPrefixMismatch if earlier rows are missing or differ from the anchor's; errors
        of the computation.
        """
        self._check_prefixes(work.extents)
        extents = extents_of(work)
        self._used_pages.update(page for extent in work.extents for page in extent.pages)
        done = self._computer.run(rows_NH, extents)
        for extent in work.extents:
            table = self._tables.setdefault(extent.table, HostedTable())
            self.num_rows_again += max(0, min(table.hashes.num_rows, extent.stop) - extent.start)
            table.hashes.extend(extent.start, np.frombuffer(extent.keys, np.uint64))
            table.pages = extent.pages
        self.num_rows += len(rows_NH)
        tapped_NH = done.tapped_NH if any(extent.taps for extent in work.extents) else None
        return HostedRows(rows=self._to_return(work, done.rows_NH, extents), tapped_NH=tapped_NH)

    def read_rows(self, fetch: SpanFetch) -> dict[int, NDArray[np.uint8]]:
        """Return keys and values of the first rows of a table: uint8 [bytes] by layer number in the
        model.

        Raises: SpanPrefixMismatch if this worker does not have these rows, for example after
        another worker was lost.
        """
        self._check_pages(fetch.pages)
        hashes = self._tables.get(fetch.table, HostedTable()).hashes
        if hashes.before(fetch.num_rows) != fetch.before:
            raise SpanPrefixMismatch(
                f"this worker has {hashes.num_rows} of the {fetch.num_rows} rows, since another "
                "one was lost; try again later, "
                "or after another turn"
            )
        first = self._computer.layers.span.first
        rows = self._pool.read_rows(PageTable(pages=list(fetch.pages)), fetch.num_rows)
        return {first + at: its for at, its in enumerate(rows)}

    def write_rows(
        self, layer: int, table: int, pages: Sequence[int], keys: bytes, rows: NDArray[np.uint8]
    ) -> None:
        """Store one layer's keys and values of a new table.

        `layer`: layer number in the model. `keys`: row keys, 8 bytes each. `rows`: keys and values
        as bytes. Raises: BadInput if the layer is not in this span, or the sizes do not fit.
        """
        at, shape = layer - self._computer.layers.span.first, self._pool.shape
        self._check_pages(pages)
        num_rows, room = len(keys) // KEY_BYTES, len(pages) * self._pool.page_size
        wanted = num_rows * 2 * shape.num_kv_heads * shape.head_dim * self._pool.data.dtype.itemsize
        if (
            not 0 <= at < shape.num_layers
            or len(keys) % KEY_BYTES
            or num_rows > room
            or rows.nbytes != wanted
        ):
            raise BadInput(
                f"{rows.nbytes} bytes are not {num_rows} rows of layer {layer}, in {len(pages)} "
                "pages"
            )
        self._pool.write_layer(at, PageTable(pages=list(pages)), rows)
        hashes = PrefixHashes()
        hashes.extend(0, np.frombuffer(keys, np.uint64))
        self._tables[table] = HostedTable(hashes, tuple(pages))
        self._used_pages.update(pages)

    def _check_prefixes(self, extents: Sequence[SpanExtent]) -> None:
        for extent in extents:
            hashes = self._tables.get(extent.table, HostedTable()).hashes
            if hashes.before(extent.start) != extent.before:
                raise SpanPrefixMismatch(
                    f"this worker has {hashes.num_rows} rows of table {extent.table}, which are "
                    "not those before row "
                    f"{extent.start}; they are computed again"
                )

    def _to_return(
        self, work: SpanPass, rows_NH: Tensor, extents: Sequence[Extent]
    ) -> Tensor | None:
        if self._returned in (None, "rows"):
            return rows_NH
        if work.number <= work.completed:
            return None  # computed again for its keys and values only
        wanted = [extent.draws for extent in work.extents]
        if not any(wanted):
            return None
        last_SH = last_rows(rows_NH, extents, wanted)
        return self._computer.head(last_SH) if self._returned == "logits" else last_SH
