"""Paged memory for keys and values: one tensor, whose pages are allocated to requests. Knows no
scheduling.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fleet.core.pages import Memory, PagesRef


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Sizes of the keys and values that one position has in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Return the size of one page in all layers."""
        return self.num_layers * page_size * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one request, in order of position. `number`: a number that identifies the table
    in its pool and is never used again.
    """

    pages: list[int] = field(default_factory=list[int])
    number: int = 0


@dataclass(slots=True, kw_only=True)
class PoolChanges:
    """Recorded changes of a mirrored KV pool, which `apply` makes in the pools of all spans of the
    model, in the order of the steps.

    `zeroed`: parts of pages to be zeroed, as (page, first position in it). `closed`: numbers of
    closed tables.
    """

    zeroed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    closed: list[int] = field(default_factory=list[int])


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros. Raises: MemoryError, RuntimeError.

    On a CPU the kernel provides each page of memory at its first use, since writing all of it would
    take a fifth of a restart.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there is no room for a KV pool of {num_bytes} bytes") from error
    return torch.frombuffer(memory, dtype=dtype).view(size)


class KVPool:
    """Paged memory for keys and values, allocated once. Page `num_pages` is a scratch page, to
    which padding rows write.

    Shapes: `data` is [layers, pages + 1, page_size, 2 (keys, values), kv_heads, head_dim].
    Invariants: every page is free or in exactly one open table; `check()` holds between calls.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        mirrored: bool = False,
    ) -> None:
        """Allocate the pool. `mirrored`: True if the pools of other spans of the model have the
        same pages; changes are then only recorded, and `apply` makes them in all these pools.
        """
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        size = (shape.num_layers, num_pages + 1, page_size, 2, shape.num_kv_heads, shape.head_dim)
        self.data = _zeros(size, dtype, device)
        self.pages_of_layer = list(self.data)
        self.slots_of_layer = list(self.data.flatten(1, 2).flatten(2, 3))
        """Views of `data` per layer: `pages_of_layer` is [pages + 1, page_size, 2, kv_heads,
        head_dim], `slots_of_layer` is [slots, 2 x kv_heads, head_dim].
        """
        self._free = list(range(num_pages - 1, -1, -1))
        self._tables: list[PageTable] = []
        self._num_opened = 0
        self._changes = PoolChanges() if mirrored else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def page_bytes(self) -> int:
        """Size of one page in all layers."""
        return self.shape.page_bytes(self.page_size, self.data.dtype)

    @property
    def layout(self) -> str:
        """Description of the layout of a page's bytes; two pools can read each other's pages only
        if their layouts are equal.
        """
        return f"{str(self.data.dtype).removeprefix('torch.')}, {self.page_size} positions a page"

    def pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def rounded_pages_for(self, num_positions: int) -> int:
        """Return `pages_for`, rounded up to a power of two where the pool has as many pages."""
        return min(1 << (self.pages_for(num_positions) - 1).bit_length(), self.num_pages)

    def open_table(self) -> PageTable:
        """Open a table without pages; `grow` adds them."""
        self._num_opened += 1
        table = PageTable(number=self._num_opened)
        self._tables.append(table)
        return table

    @property
    def memory(self) -> Memory | None:
        """Address and size of the pool's memory, if it is in host memory or on an Nvidia GPU; else
        None.
        """
        kind, number = self.data.device.type, self.data.device.index
        if kind not in ("cpu", "cuda"):
            return None
        return Memory(self.data.data_ptr(), self.data.nbytes, number if kind == "cuda" else None)

    def locate(self, table: PageTable) -> PagesRef:
        """Wait until no earlier step writes to a table's pages any more, then return the location
        of these pages.
        """
        if self.data.device.type == "cuda":
            # reads of other processes are not ordered with this one's kernels
            torch.cuda.synchronize(self.data.device)
        layer, memory = self.data[0], self.memory
        return PagesRef(
            address=self.data.data_ptr(),
            num_layers=len(self.data),
            layer_bytes=layer.nbytes,
            block_bytes=layer[0].nbytes,
            pages=tuple(table.pages),
            layout=self.layout,
            device=memory.device if memory is not None else None,
        )

    def grow(self, table: PageTable, num_positions: int, *, clean: bool = True) -> bool:
        """Allocate pages to a table, up to `num_positions` positions; return False without effect
        if too few pages are free.

        If `clean` is False, new pages are not zeroed: the caller overwrites them before anything is
        computed from them.
        """
        missing = self.pages_for(num_positions) - len(table.pages)
        if missing > len(self._free):
            return False
        if missing > 0:
            added = [self._free.pop() for _ in range(missing)]
            table.pages += added
            # a failed request may leave NaN, which no mask hides: 0 x NaN is NaN
            if clean:
                self._zero([(page, 0) for page in added])
        return True

    def _zero(self, parts: list[tuple[int, int]]) -> None:
        if self._changes is not None:
            self._changes.zeroed += parts
        else:
            self.apply(PoolChanges(zeroed=parts))

    @property
    def open_tables(self) -> list[int]:
        """Numbers of the open tables."""
        return [table.number for table in self._tables]

    def take_changes(self) -> PoolChanges:
        """Return the changes of a mirrored pool since the last call, for the pools of other
        spans.
        """
        assert self._changes is not None, "not a mirrored pool"
        changes, self._changes = self._changes, PoolChanges()
        return changes

    def apply(self, changes: PoolChanges) -> None:
        """Make recorded changes of a mirrored pool: zero the parts of pages in `changes.zeroed`.
        `changes.closed` has no effect here.
        """
        whole = [page for page, first in changes.zeroed if first == 0]
        if whole:
            self.data[:, whole] = 0
        for page, first in changes.zeroed:
            if first:
                self.data[:, page, first:] = 0

    def shrink(self, table: PageTable, num_positions: int) -> None:
        """Free a table's pages beyond `num_positions` positions and zero the rest of its last
        page.
        """
        num_pages, rest = self.pages_for(num_positions), num_positions % self.page_size
        self._free.extend(reversed(table.pages[num_pages:]))
        del table.pages[num_pages:]
        if rest:
            self._zero([(table.pages[-1], rest)])

    def close_table(self, table: PageTable) -> None:
        self._free.extend(reversed(table.pages))
        table.pages.clear()
        self._tables.remove(table)
        if self._changes is not None:
            self._changes.closed.append(table.number)

    def read_rows(self, table: PageTable, num_rows: int) -> list[NDArray[np.uint8]]:
        """Return a copy of the keys and values of a table's first `num_rows` positions: per layer
        uint8 [bytes], position by position.
        """
        return [
            self._rows_of(layer, table)[:num_rows]
            .contiguous()
            .view(torch.uint8)
            .flatten()
            .cpu()
            .numpy()
            for layer in self.data
        ]

    def _rows_of(self, layer: torch.Tensor, table: PageTable) -> torch.Tensor:
        return layer[table.pages].flatten(0, 1)

    def write_rows(self, table: PageTable, layers: Sequence[NDArray[np.uint8]]) -> None:
        """Write keys and values in the form of `read_rows` to a table's pages, and zero the rest of
        the pages. Raises: RuntimeError if sizes differ.
        """
        for at, rows in enumerate(layers):
            self.write_layer(at, table, rows)

    def write_layer(self, at: int, table: PageTable, rows: NDArray[np.uint8]) -> None:
        """Write the keys and values of layer `at`, in the form of `read_rows`, to a table's pages,
        and zero the rest of the pages.
        """
        layer = self.data[at]
        given = (
            torch.from_numpy(np.array(rows))
            .view(self.data.dtype)
            .view(-1, *layer.shape[2:])
            .to(layer.device)
        )
        pages = self._rows_of(layer, table)
        pages[: len(given)], pages[len(given) :] = given, 0
        layer[table.pages] = pages.view(-1, *layer.shape[1:])

    def read(self, table: PageTable, num_positions: int) -> NDArray[np.uint8]:
        """Return a copy of the pages of a table's first `num_positions` positions: uint8 [bytes],
        layer by layer.
        """
        pages = table.pages[: self.pages_for(num_positions)]
        return self.data[:, pages].contiguous().flatten().view(torch.uint8).cpu().numpy()

    def write(self, table: PageTable, data: NDArray[np.uint8], num_positions: int) -> bool:
        """Write the pages that `read` returned for `num_positions` positions to a table's pages. A
        table with fewer pages gets the first ones.

        Return False without effect if the size of the data does not fit the pages of this pool, for
        example because the pool has another dtype.
        """
        num_pages, wanted = self.pages_for(num_positions), len(table.pages)
        if len(data) != num_pages * self.page_bytes or num_pages < wanted:
            return False
        whole = (
            torch.from_numpy(np.array(data))
            .view(self.data.dtype)
            .view(self.data.shape[0], -1, *self.data.shape[2:])
        )
        self.data[:, table.pages] = whole[:, :wanted].to(self.data.device)
        return True

    def check(self) -> None:
        """Check that every page is free or in one table. Raises: AssertionError."""
        held = [page for table in self._tables for page in table.pages]
        assert len(held) == self.num_used, f"{self.num_used} pages used, {len(held)} held"
        assert sorted(held + self._free) == list(range(self.num_pages)), (
            "a page is lost or in two tables"
        )
