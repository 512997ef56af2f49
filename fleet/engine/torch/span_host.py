"""The part of a pass that a span worker computes: checks, the pool's changes, its layers. Knows no connection.

The anchor alone allocates pages; a span worker's pool has as many, and uses those that a pass names.
Legend: N rows of a pass, H hidden size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import SpanPrefixMismatch
from fleet.core.span_messages import Returned, SpanExtent, SpanPass
from fleet.engine.torch.kv_pool import KVPool, PageTable, PoolChanges
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.prefix_hashes import PrefixHashes
from fleet.engine.torch.span_model import SpanComputer, SpanLayers, last_rows


def extents_of(work: SpanPass) -> list[Extent]:
    """Return the places of a pass's rows, in pools with the anchor's pages."""
    return [
        Extent(table=PageTable(pages=list(each.pages), number=each.table), start=each.start, stop=each.stop)
        for each in work.extents
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRows:
    """Rows that leave a span worker. `rows`: for the next worker, or what the last one returns, None if nothing is wanted."""

    rows: Tensor | None
    tapped_NH: Tensor | None


class SpanHost:
    """A span with the rows of one anchor's requests. `returned`: None if another worker follows.

    `last_number`: of the passes that it has computed. `num_rows`: computed rows, `num_rows_again`: those it had computed before.
    """

    def __init__(self, layers: SpanLayers, pool: KVPool, *, tiled: bool, returned: Returned | None) -> None:
        self._computer, self._pool, self._returned = SpanComputer(layers, pool, tiled=tiled), pool, returned
        self._hashes: dict[int, PrefixHashes] = {}
        self.last_number = self.num_rows = self.num_rows_again = 0

    @property
    def num_tables(self) -> int:
        return len(self._hashes)

    def close_tables(self, tables: Iterable[int]) -> None:
        for table in tables:
            self._hashes.pop(table, None)

    def keep_only(self, tables: Iterable[int]) -> None:
        """Close all tables but these."""
        self.close_tables(set(self._hashes) - set(tables))

    def advance(self, work: SpanPass) -> None:
        """Make the pool's changes that come before a pass, and count the pass as computed."""
        assert work.number > self.last_number, f"pass {work.number} after {self.last_number}"
        self.last_number = work.number
        self._pool.apply(PoolChanges(zeroed=list(work.zeroed)))
        self.close_tables(work.closed)

    @torch.inference_mode()
    def run(self, work: SpanPass, rows_NH: Tensor) -> HostedRows:
        """Compute a pass whose changes were made. Raises: SpanPrefixMismatch; errors of the computation."""
        self._check_prefixes(work.extents)
        extents = extents_of(work)
        done = self._computer.run(rows_NH, extents)
        for extent in work.extents:
            hashes = self._hashes.setdefault(extent.table, PrefixHashes())
            self.num_rows_again += max(0, min(hashes.num_rows, extent.stop) - extent.start)
            hashes.extend(extent.start, np.frombuffer(extent.keys, np.uint64))
        self.num_rows += len(rows_NH)
        return HostedRows(rows=self._to_return(work, done.rows_NH, extents), tapped_NH=done.tapped_NH)

    def read_rows(self, pages: Sequence[int], num_rows: int) -> dict[int, NDArray[np.uint8]]:
        """Return the first rows of a table with these pages: uint8 [bytes] by the number of the layer in the model."""
        first = self._computer.layers.span.first
        rows = self._pool.read_rows(PageTable(pages=list(pages)), num_rows)
        return {first + at: its for at, its in enumerate(rows)}

    def write_rows(self, layer: int, table: int, pages: Sequence[int], keys: bytes, rows: NDArray[np.uint8]) -> None:
        """Set the rows of one layer of a new table."""
        at = layer - self._computer.layers.span.first
        self._pool.write_layer(at, PageTable(pages=list(pages)), rows)
        self._hashes[table] = PrefixHashes()
        self._hashes[table].extend(0, np.frombuffer(keys, np.uint64))

    def _check_prefixes(self, extents: Sequence[SpanExtent]) -> None:
        for extent in extents:
            hashes = self._hashes.get(extent.table) or PrefixHashes()
            if hashes.before(extent.start) != extent.before:
                raise SpanPrefixMismatch(
                    f"this worker has {hashes.num_rows} rows of table {extent.table}, which are not those before row "
                    f"{extent.start}; they are computed again"
                )

    def _to_return(self, work: SpanPass, rows_NH: Tensor, extents: Sequence[Extent]) -> Tensor | None:
        if self._returned in (None, "rows"):
            return rows_NH
        wanted = [extent.draws for extent in work.extents]
        if not any(wanted):
            return None
        last_SH = last_rows(rows_NH, extents, wanted)
        return self._computer.head(last_SH) if self._returned == "logits" else last_SH
