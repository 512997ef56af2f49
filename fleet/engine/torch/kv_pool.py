"""Paged memory for keys and values: one tensor for life, pages lent to requests and given back. Knows no scheduling."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fleet.core.pages import Memory, PagesRef


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one position costs: keys and values of every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages one request holds, in order of position. Owned by the pool that lent them."""

    pages: list[int] = field(default_factory=list[int])


class KVPool:
    """Allocated once. Page `num_pages` is scratch: rows that only pad a tile write there.

    Shapes: `data` is [layers, pages + 1, page_size, 2 (keys, values), kv_heads, head_dim].
    Invariants: every page is free or in exactly one lent table; `check()` holds between calls.
    """

    def __init__(self, shape: KVShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.num_pages, self.page_size = shape, num_pages, page_size
        self.scratch_page = num_pages
        size = (shape.num_layers, num_pages + 1, page_size, 2, shape.num_kv_heads, shape.head_dim)
        self.data = torch.zeros(size, dtype=dtype, device=device)
        self.pages_of_layer = list(self.data)
        self.slots_of_layer = list(self.data.flatten(1, 2).flatten(2, 3))
        """Views of `data`: per layer [pages + 1, page_size, 2, kv_heads, head_dim], and [slots, 2 x kv_heads, head_dim]."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._lent: list[PageTable] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def page_bytes(self) -> int:
        """Of one page, in all layers."""
        return self.data[:, 0].nbytes

    @property
    def layout(self) -> str:
        """How bytes of a page are to be read: pools of one stage may differ in it, and then cannot read each other's."""
        return f"{str(self.data.dtype).removeprefix('torch.')}, {self.page_size} positions a page"

    def pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def borrow(self) -> PageTable:
        """A table with no pages yet; `grow` fills it."""
        table = PageTable()
        self._lent.append(table)
        return table

    @property
    def memory(self) -> Memory | None:
        """All of it, where the host can read it."""
        return Memory(self.data.data_ptr(), self.data.nbytes) if self.data.device.type == "cpu" else None

    def place(self, table: PageTable) -> PagesRef:
        """Where a table's pages lie."""
        layer = self.data[0]
        return PagesRef(
            address=self.data.data_ptr(),
            num_layers=len(self.data),
            layer_bytes=layer.nbytes,
            block_bytes=layer[0].nbytes,
            pages=tuple(table.pages),
            layout=self.layout,
        )

    def grow(self, table: PageTable, num_positions: int, *, clean: bool = True) -> bool:
        """Give the table pages for so many positions; False, and nothing taken, when too few are free.

        Not `clean`: they are written over as a whole before anything is computed from them.
        """
        missing = self.pages_for(num_positions) - len(table.pages)
        if missing > len(self._free):
            return False
        if missing > 0:
            taken = [self._free.pop() for _ in range(missing)]
            table.pages += taken
            # what a failed request left may be NaN, which no mask hides: 0 x NaN is NaN
            if clean:
                self.data[:, taken] = 0
        return True

    def shrink(self, table: PageTable, num_positions: int) -> None:
        """Take back the pages beyond so many positions; what the last page holds beyond them is wiped, as of a new one."""
        num_pages, rest = self.pages_for(num_positions), num_positions % self.page_size
        self._free.extend(reversed(table.pages[num_pages:]))
        del table.pages[num_pages:]
        if rest:
            self.data[:, table.pages[-1], rest:] = 0

    def give_back(self, table: PageTable) -> None:
        self._free.extend(reversed(table.pages))
        table.pages.clear()
        self._lent.remove(table)

    def read(self, table: PageTable, num_positions: int) -> NDArray[np.uint8]:
        """A copy of the pages of a table's first positions: uint8 [bytes], layer by layer."""
        pages = table.pages[: self.pages_for(num_positions)]
        return self.data[:, pages].contiguous().flatten().view(torch.uint8).cpu().numpy()

    def write(self, table: PageTable, data: NDArray[np.uint8], num_positions: int) -> bool:
        """Put what `read` gave of so many positions into a table's pages, which may be fewer.

        False, and nothing done, if it is not to the byte what those positions take here: another pool's numbers are wider, say.
        """
        num_pages, wanted = self.pages_for(num_positions), len(table.pages)
        if len(data) != num_pages * self.page_bytes or num_pages < wanted:
            return False
        whole = torch.from_numpy(np.array(data)).view(self.data.dtype).view(self.data.shape[0], -1, *self.data.shape[2:])
        self.data[:, table.pages] = whole[:, :wanted].to(self.data.device)
        return True

    def check(self) -> None:
        """Raises: AssertionError when a page is lost, lent twice, or not of this pool."""
        held = [page for table in self._lent for page in table.pages]
        assert len(held) == self.num_used, f"{self.num_used} pages used, {len(held)} held"
        assert sorted(held + self._free) == list(range(self.num_pages)), "a page is lost or lent twice"
