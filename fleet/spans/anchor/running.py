"""A step of an anchor while its span workers compute it: what was sent, and which results have
arrived.

Legend: N rows of a step, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from torch import Tensor

from fleet.core.errors import BadInput
from fleet.engine.torch.kv_pool import PoolChanges
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.pass_queue import PassEntry
from fleet.engine.torch.program import TaskT
from fleet.spans.protocol.messages import SpanResult


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunningEntry(Generic[TaskT]):
    """The rows of one request in a running step.

    `extent`: row positions, with the pages that the request's table had when the step began.
    `draws`: True if a token is sampled after the last row. `taps`: True if hidden states of the
    tapped layer must come from a span worker.
    """

    entry: PassEntry[TaskT]
    extent: Extent
    draws: bool
    taps: bool

    @property
    def table(self) -> int:
        return self.extent.table.number


@dataclass(slots=True, eq=False, kw_only=True)
class RunningStep(Generic[TaskT]):
    """A step that was sent to the span workers, with the results that have arrived.

    `changes`: pool changes that the step carries. `tapped`: hidden states of the tapped layer by
    table number; None until they arrive. `result`, `payload`: the last worker's answer and its rows
    as bytes. Times by `time.monotonic`: `began_s`: start of the step; `sent_s`: when its rows were
    ready to be sent; `arrived_s`: when the latest part of its result arrived.
    """

    number: int
    entries: Sequence[RunningEntry[TaskT]]
    changes: PoolChanges
    began_s: float
    sent_s: float = 0.0
    arrived_s: float = 0.0
    tapped: dict[int, Tensor] | None = None
    result: SpanResult | None = None
    payload: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def extents(self) -> list[Extent]:
        return [each.extent for each in self.entries]

    def select(self, tables: Sequence[int]) -> list[RunningEntry[TaskT]]:
        """Return the entries of the given table numbers, in the same order: a step that is sent
        again may list its tables in another order.

        Raises: BadInput if a table is not in the step, or is listed twice.
        """
        entry_of = {each.table: each for each in self.entries}
        if len(set(tables)) < len(tables) or not entry_of.keys() >= set(tables):
            raise BadInput(f"the result of pass {self.number} is of other tables")
        return [entry_of[table] for table in tables]

    @property
    def lacks_taps(self) -> bool:
        """True while a request that has not ended needs hidden states that have not arrived."""
        arrived = self.tapped or {}
        return any(
            each.taps and not each.entry.is_void and each.table not in arrived
            for each in self.entries
        )

    @property
    def is_complete(self) -> bool:
        """True if the step can end: the result has arrived and is an error, or no message with
        tapped hidden states is still expected.
        """
        return self.result is not None and (
            self.result.error is not None or self.tapped is not None or not self.lacks_taps
        )


def by_table(entries: Sequence[RunningEntry[TaskT]], rows_NH: Tensor) -> dict[int, Tensor]:
    """Split the rows of a step by request: return each table's rows by table number."""
    parts = rows_NH.split([each.extent.num_rows for each in entries])
    return {each.table: part for each, part in zip(entries, parts, strict=True)}
