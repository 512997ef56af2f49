"""Execution of a pass by calls of the program: all rows in one call (fast), or in fixed tiles
(invariant). Knows no requests. `graph_runner` has a third runner, for GPUs.

Legend: N rows, H hidden size, S rows drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from fleet.engine.base import EngineOutput
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent, index_tensor
from fleet.engine.torch.program import (
    DraftedProgram,
    DraftedTask,
    Forwarded,
    Program,
    ProgramTask,
    TaskT,
)
from fleet.engine.torch.rows import joined
from fleet.engine.torch.tiles import TILE_ROWS, in_tiles, padded

Drawn = dict[int, Sequence[EngineOutput]]
"""Outputs of draws by `id` of the extent after which they were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Hidden rows of a pass. `first` maps an extent to its first row."""

    forwarded: Forwarded
    first: dict[int, int]

    def last_rows(self, extents: Sequence[Extent]) -> Tensor:
        """Return the hidden rows after which the extents draw: of their last position, or of those
        before and at each draft.
        """
        stops = [
            (self.first[id(extent)] + extent.num_rows, len(extent.drafts)) for extent in extents
        ]
        rows = [row for stop, num_drafts in stops for row in range(stop - num_drafts - 1, stop)]
        last_NH = self.forwarded.last_NH
        if rows == list(range(len(rows))):
            return last_NH[: len(rows)]
        return last_NH.index_select(0, index_tensor(rows, last_NH.device))

    def tapped(self) -> dict[int, Tensor]:
        """Return each extent's tapped rows, if the program taps any."""
        return self._divided(self.forwarded.tapped_NH)

    def features(self) -> dict[int, Tensor]:
        """Return each extent's rows for a draft head, if there is one."""
        return self._divided(self.forwarded.features_NT)

    def last(self) -> dict[int, Tensor]:
        """Return each extent's final hidden rows."""
        return self._divided(self.forwarded.last_NH)

    def _divided(self, rows_N: Tensor | None) -> dict[int, Tensor]:
        if rows_N is None:
            return {}
        stops = [*list(self.first.values())[1:], len(rows_N)]
        return {
            extent: rows_N[first:stop]
            for (extent, first), stop in zip(self.first.items(), stops, strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDone:
    """Results of a pass by `id` of the extent: tapped rows, outputs of the draws that were due,
    rows for a draft head, and final hidden rows.
    """

    tapped: dict[int, Tensor]
    drawn: Drawn
    features: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    last: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def tapped_rows(self, extent: Extent, start: int, stop: int) -> Tensor | None:
        """Return the extent's tapped rows of positions [start, stop)."""
        tapped_NH = self.tapped.get(id(extent))
        return None if tapped_NH is None else tapped_NH[start - extent.start : stop - extent.start]

    def num_rejected(self, extent: Extent) -> int:
        """Return how many of the extent's last rows are drafts that were not drawn."""
        num_drawn = len(self.drawn.get(id(extent), ()))
        return max(0, len(extent.drafts) - max(0, num_drawn - 1))


def is_due(task: ProgramTask, extent: Extent) -> bool:
    """Return True if a draw follows the extent's last row that is known."""
    return extent.stop - len(extent.drafts) == task.num_rows and task.wants_draw


def rows_of(program: Program[TaskT], task: TaskT, extent: Extent) -> Tensor:
    """Return the input rows of an extent: [rows, H]."""
    if not extent.drafts:
        return task.rows(extent.start, extent.stop)
    drafted = cast("DraftedProgram[DraftedTask]", program).draft_rows(extent.drafts)
    return torch.cat([task.rows(extent.start, extent.stop - len(extent.drafts)), drafted])


def draw_drafted(
    program: Program[TaskT], due: Sequence[tuple[TaskT, Extent]], last_RH: Tensor, *, tiled: bool
) -> Sequence[Sequence[EngineOutput]]:
    """Sample a token after the last known row of each extent and after each of its draft tokens.
    `last_RH`: the hidden states from `PassRows.last_rows`.
    """
    drafted = cast("DraftedProgram[DraftedTask]", program)
    logits_RV = in_tiles(drafted.logits, last_RH) if tiled else drafted.logits(last_RH)
    tasks = cast("Sequence[DraftedTask]", [task for task, _ in due])
    return drafted.draw_drafted(tasks, [extent.drafts for _, extent in due], logits_RV)


SomeTask = TypeVar("SomeTask", bound=ProgramTask, contravariant=True)


class PassRunner(Protocol[SomeTask]):
    """Computes a pass: each request's rows, then the draws that are due."""

    def forward(self, entries: Sequence[tuple[SomeTask, Extent]]) -> PassDone: ...


class FastRunner(Generic[TaskT]):
    """Runs every row of the pass in one call. Results of a row vary in the last bits with the other
    rows of the batch.
    """

    def __init__(self, program: Program[TaskT], pool: KVPool) -> None:
        self._program, self._pool = program, pool

    def forward(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassDone:
        rows = self.compute(entries)
        return PassDone(
            tapped=rows.tapped(),
            drawn=self.draw(entries, rows),
            features=rows.features(),
            last=rows.last(),
        )

    def compute(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassRows:
        extents = [extent for _, extent in entries]
        rows_NH = joined([rows_of(self._program, task, extent) for task, extent in entries])
        forwarded = self._program.forward(
            rows_NH, FastLayout(self._pool, extents), [task for task, _ in entries]
        )
        return PassRows(forwarded=forwarded, first=_first_rows(extents))

    def draw(self, entries: Sequence[tuple[TaskT, Extent]], rows: PassRows) -> Drawn:
        due = [(task, extent) for task, extent in entries if is_due(task, extent)]
        if not due:
            return {}
        last_RH = rows.last_rows([extent for _, extent in due])
        if any(extent.drafts for _, extent in due):
            outputs = draw_drafted(self._program, due, last_RH, tiled=False)
        else:
            outputs = self._program.draw([task for task, _ in due], last_RH)
        return {id(extent): output for (_, extent), output in zip(due, outputs, strict=True)}


class TileRunner(Generic[TaskT]):
    """Runs rows in tiles of exactly `TILE_ROWS`, padded, so that no shape depends on other rows of
    the pass.
    """

    def __init__(self, program: Program[TaskT], pool: KVPool) -> None:
        self._program, self._pool = program, pool

    def forward(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassDone:
        rows_NH = joined([rows_of(self._program, task, extent) for task, extent in entries])
        done = [
            self._tile(rows, tile)
            for rows, tile in zip(rows_NH.split(TILE_ROWS), tiles(entries), strict=True)
        ]
        forwarded = Forwarded(
            last_NH=torch.cat([forwarded.last_NH for forwarded in done]),
            tapped_NH=_all_joined([forwarded.tapped_NH for forwarded in done]),
            features_NT=_all_joined([forwarded.features_NT for forwarded in done]),
        )
        rows = PassRows(forwarded=forwarded, first=_first_rows([extent for _, extent in entries]))
        return PassDone(
            tapped=rows.tapped(),
            drawn=self._draw(entries, rows),
            features=rows.features(),
            last=rows.last(),
        )

    def _tile(self, rows_NH: Tensor, tile: Sequence[tuple[TaskT, Extent]]) -> Forwarded:
        extents = [extent for _, extent in tile]
        layout = RowLayout(self._pool, extents, TILE_ROWS)
        done = self._program.forward(padded(rows_NH), layout, [task for task, _ in tile])
        return Forwarded(
            last_NH=done.last_NH[: len(rows_NH)],
            tapped_NH=None if done.tapped_NH is None else done.tapped_NH[: len(rows_NH)],
            features_NT=None if done.features_NT is None else done.features_NT[: len(rows_NH)],
        )

    def _draw(self, entries: Sequence[tuple[TaskT, Extent]], rows: PassRows) -> Drawn:
        due = [(task, extent) for task, extent in entries if is_due(task, extent)]
        if any(extent.drafts for _, extent in due):
            last_RH = rows.last_rows([extent for _, extent in due])
            outputs = draw_drafted(self._program, due, last_RH, tiled=True)
            return {id(extent): output for (_, extent), output in zip(due, outputs, strict=True)}
        drawn: Drawn = {}
        for first in range(0, len(due), TILE_ROWS):
            tile = due[first : first + TILE_ROWS]
            last_SH = padded(rows.last_rows([extent for _, extent in tile]))
            outputs = self._program.draw([task for task, _ in tile], last_SH)
            drawn |= {id(extent): output for (_, extent), output in zip(tile, outputs, strict=True)}
        return drawn


def _all_joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the parts; return None if any part is missing."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if len(found) == len(parts) else None


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
            groups[-1].append((task, replace(extent, start=start, stop=stop, drafts=())))
            room -= stop - start
            start = stop
    return groups


def _first_rows(extents: Sequence[Extent]) -> dict[int, int]:
    first, row = {}, 0
    for extent in extents:
        first[id(extent)] = row
        row += extent.num_rows
    return first
