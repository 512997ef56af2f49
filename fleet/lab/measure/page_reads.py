"""Result of the KV page benchmark: durations of three ways to move KV blocks between two processes.
Measures nothing.
"""

import msgspec
from rich.console import Group

from fleet.lab.report.stats import median, summarise
from fleet.lab.report.tables import cells, figure, table_of, titled


class PageReads(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of three ways to move the same KV blocks, measured in turns.

    Units: microseconds. `blocks_us`: read block by block, from the search for free pages until all
    blocks are in place. `plain_us`: one read of as many contiguous bytes. `copied_us`: copied out
    of the pool into the arena, read, checked, and written into the pool.
    """

    num_bytes: int
    num_blocks: int
    blocks_us: tuple[float, ...]
    plain_us: tuple[float, ...]
    copied_us: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Speed of block-wise reads relative to the plain read."""
        return median(self.plain_us) / median(self.blocks_us)

    def table(self) -> Group:
        table = table_of("", "p50 us", "p95 us", "GB/s")
        rows = (
            ("block by block", self.blocks_us),
            ("one plain read", self.plain_us),
            ("checked copy", self.copied_us),
        )
        for name, durations_us in rows:
            summary = summarise(durations_us)
            speed = self.num_bytes / summary.p50 / 1000 if summary else None
            table.add_row(name, *cells(summary), figure(speed))
        return titled(
            f"{self.num_bytes} bytes of KV rows, {self.num_blocks} blocks, between two processes",
            table,
        )
