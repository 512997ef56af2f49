"""Execution of a pass by calls of the program: all rows in one call (fast), or in fixed tiles (invariant). Knows no requests.
`graph_runner` has a third runner, for GPUs.

Legend: N rows, H hidden size, S rows drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fleet.engine.base import EngineOutput
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent, index_tensor
from fleet.engine.torch.program import Forwarded, Program, ProgramTask, TaskT
from fleet.engine.torch.rows import joined
from fleet.engine.torch.tiles import TILE_ROWS, padded

Drawn = dict[int, Sequence[EngineOutput]]
"""Outputs of draws by `id` of the extent after which they were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Hidden rows of a pass. `first` maps an extent to its first row."""

    forwarded: Forwarded
    first: dict[int, int]

    def last_rows(self, extents: Sequence[Extent]) -> Tensor:
        """Return the hidden rows of the extents' last positions: [extents, H]."""
        rows = [self.first[id(extent)] + extent.num_rows - 1 for extent in extents]
        last_NH = self.forwarded.last_NH
        if rows == list(range(len(rows))):
            return last_NH[: len(rows)]
        return last_NH.index_select(0, index_tensor(rows, last_NH.device))

    def tapped(self) -> dict[int, Tensor]:
        """Return each extent's tapped rows, if the program taps any."""
        tapped_NH = self.forwarded.tapped_NH
        if tapped_NH is None:
            return {}
        stops = [*list(self.first.values())[1:], len(tapped_NH)]
        return {extent: tapped_NH[first:stop] for (extent, first), stop in zip(self.first.items(), stops, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDone:
    """Results of a pass by `id` of the extent: tapped rows, and outputs of the draws that were due."""

    tapped: dict[int, Tensor]
    drawn: Drawn

    def tapped_rows(self, extent: Extent, start: int) -> Tensor | None:
        """Return the extent's tapped rows from position `start` on."""
        tapped_NH = self.tapped.get(id(extent))
        return None if tapped_NH is None else tapped_NH[start - extent.start :]


def is_due(task: ProgramTask, extent: Extent) -> bool:
    """Return True if a draw follows the extent's last row."""
    return extent.stop == task.num_rows and task.wants_draw


SomeTask = TypeVar("SomeTask", bound=ProgramTask, contravariant=True)


class PassRunner(Protocol[SomeTask]):
    """Computes a pass: each request's rows, then the draws that are due."""

    def forward(self, entries: Sequence[tuple[SomeTask, Extent]]) -> PassDone: ...


class FastRunner(Generic[TaskT]):
    """Runs every row of the pass in one call. Results of a row vary in the last bits with the other rows of the batch."""

    def __init__(self, program: Program[TaskT], pool: KVPool) -> None:
        self._program, self._pool = program, pool

    def forward(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassDone:
        rows = self.compute(entries)
        return PassDone(tapped=rows.tapped(), drawn=self.draw(entries, rows))

    def compute(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassRows:
        extents = [extent for _, extent in entries]
        rows_NH = joined([task.rows(extent.start, extent.stop) for task, extent in entries])
        forwarded = self._program.forward(rows_NH, FastLayout(self._pool, extents), [task for task, _ in entries])
        return PassRows(forwarded=forwarded, first=_first_rows(extents))

    def draw(self, entries: Sequence[tuple[TaskT, Extent]], rows: PassRows) -> Drawn:
        due = [(task, extent) for task, extent in entries if is_due(task, extent)]
        if not due:
            return {}
        outputs = self._program.draw([task for task, _ in due], rows.last_rows([extent for _, extent in due]))
        return {id(extent): output for (_, extent), output in zip(due, outputs, strict=True)}


class TileRunner(Generic[TaskT]):
    """Runs rows in tiles of exactly `TILE_ROWS`, padded, so that no shape depends on other rows of the pass."""

    def __init__(self, program: Program[TaskT], pool: KVPool) -> None:
        self._program, self._pool = program, pool

    def forward(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassDone:
        done = [self._tile(tile) for tile in tiles(entries)]
        taps = [forwarded.tapped_NH for forwarded in done if forwarded.tapped_NH is not None]
        forwarded = Forwarded(
            last_NH=torch.cat([forwarded.last_NH for forwarded in done]),
            tapped_NH=torch.cat(taps) if len(taps) == len(done) else None,
        )
        rows = PassRows(forwarded=forwarded, first=_first_rows([extent for _, extent in entries]))
        return PassDone(tapped=rows.tapped(), drawn=self._draw(entries, rows))

    def _tile(self, tile: Sequence[tuple[TaskT, Extent]]) -> Forwarded:
        rows_NH = torch.cat([task.rows(extent.start, extent.stop) for task, extent in tile])
        extents = [extent for _, extent in tile]
        layout = RowLayout(self._pool, extents, TILE_ROWS)
        done = self._program.forward(padded(rows_NH), layout, [task for task, _ in tile])
        tapped = done.tapped_NH
        return Forwarded(last_NH=done.last_NH[: len(rows_NH)], tapped_NH=None if tapped is None else tapped[: len(rows_NH)])

    def _draw(self, entries: Sequence[tuple[TaskT, Extent]], rows: PassRows) -> Drawn:
        due = [(task, extent) for task, extent in entries if is_due(task, extent)]
        drawn: Drawn = {}
        for first in range(0, len(due), TILE_ROWS):
            tile = due[first : first + TILE_ROWS]
            last_SH = padded(rows.last_rows([extent for _, extent in tile]))
            outputs = self._program.draw([task for task, _ in tile], last_SH)
            drawn |= {id(extent): output for (_, extent), output in zip(tile, outputs, strict=True)}
        return drawn


AnyTask = TypeVar("AnyTask")


def tiles(entries: Sequence[tuple[AnyTask, Extent]]) -> list[list[tuple[AnyTask, Extent]]]:
    """Cut extents, in order, into groups of `TILE_ROWS` rows."""
    groups: list[list[tuple[AnyTask, Extent]]] = [[]]
    room = TILE_ROWS
    for task, extent in entries:
        start = extent.start
        while start < extent.stop:
            if room == 0:
                groups.append([])
                room = TILE_ROWS
            stop = min(extent.stop, start + room)
            groups[-1].append((task, Extent(table=extent.table, start=start, stop=stop)))
            room -= stop - start
            start = stop
    return groups


def _first_rows(extents: Sequence[Extent]) -> dict[int, int]:
    first, row = {}, 0
    for extent in extents:
        first[id(extent)] = row
        row += extent.num_rows
    return first
