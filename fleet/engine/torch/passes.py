"""Execution of a step by calls of the program: all rows in one call (fast numerics), or in fixed
tiles (invariant numerics). Knows no requests. `graph_runner` has a third runner, for GPUs.

Legend: N rows, H hidden size, S rows after which a token is sampled.
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
"""Outputs with sampled tokens, by `id` of the extent after which they were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Hidden states of all rows of a step. `first` maps the `id` of an extent to its first row."""

    forwarded: Forwarded
    first: dict[int, int]

    def last_rows(self, extents: Sequence[Extent]) -> Tensor:
        """Return the hidden states from which the extents' next tokens are sampled: per extent, at
        its last position that is not a draft token and at each draft token.
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
        """Return the hidden states of each extent that enter the tapped layer, by `id` of the
        extent; empty if the program taps no layer.
        """
        return self._divided(self.forwarded.tapped_NH)

    def features(self) -> dict[int, Tensor]:
        """Return the hidden states of each extent for a draft head, by `id` of the extent; empty if
        there is no draft head.
        """
        return self._divided(self.forwarded.features_NT)

    def last(self) -> dict[int, Tensor]:
        """Return the final hidden states of each extent, by `id` of the extent."""
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
    """Results of a step, each by `id` of the extent: hidden states that enter the tapped layer,
    outputs with sampled tokens, hidden states for a draft head, and final hidden states.
    """

    tapped: dict[int, Tensor]
    drawn: Drawn
    features: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    last: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def tapped_rows(self, extent: Extent, start: int, stop: int) -> Tensor | None:
        """Return the extent's hidden states that enter the tapped layer, at positions [start,
        stop); None if no layer is tapped.
        """
        tapped_NH = self.tapped.get(id(extent))
        return None if tapped_NH is None else tapped_NH[start - extent.start : stop - extent.start]

    def num_rejected(self, extent: Extent) -> int:
        """Return the number of the extent's draft tokens that the model did not sample."""
        num_drawn = len(self.drawn.get(id(extent), ()))
        return max(0, len(extent.drafts) - max(0, num_drawn - 1))


def is_due(task: ProgramTask, extent: Extent) -> bool:
    """Return True if the extent reaches the task's last known position and the task wants a token
    sampled there.
    """
    return extent.stop - len(extent.drafts) == task.num_rows and task.wants_draw


def rows_of(program: Program[TaskT], task: TaskT, extent: Extent) -> Tensor:
    """Return the input embeddings of an extent, draft tokens included: [rows, H]."""
    if not extent.drafts:
        return task.rows(extent.start, extent.stop)
    drafted = cast("DraftedProgram[DraftedTask]", program).draft_rows(extent.drafts)
    return torch.cat([task.rows(extent.start, extent.stop - len(extent.drafts)), drafted])


def draw_drafted(
    program: Program[TaskT], due: Sequence[tuple[TaskT, Extent]], last_RH: Tensor, *, tiled: bool
) -> Sequence[Sequence[EngineOutput]]:
    """Sample a token after the last known row of each extent and after each of its draft tokens.
    `last_RH`: the hidden states from `PassRows.last_rows`; `tiled`: compute logits in fixed tiles.
    """
    drafted = cast("DraftedProgram[DraftedTask]", program)
    logits_RV = in_tiles(drafted.logits, last_RH) if tiled else drafted.logits(last_RH)
    tasks = cast("Sequence[DraftedTask]", [task for task, _ in due])
    return drafted.draw_drafted(tasks, [extent.drafts for _, extent in due], logits_RV)


SomeTask = TypeVar("SomeTask", bound=ProgramTask, contravariant=True)


class PassRunner(Protocol[SomeTask]):
    """Runner of a step: computes the rows of every entry, then samples the tokens that are due."""

    def forward(self, entries: Sequence[tuple[SomeTask, Extent]]) -> PassDone: ...


class FastRunner(Generic[TaskT]):
    """Pass runner that computes all rows of a step in one call. Results of a row vary in the last
    bits with the other rows of the batch.
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
        return PassRows(forwarded=forwarded, first=first_rows(extents))

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
    """Pass runner that computes rows in tiles of exactly `TILE_ROWS`, padded, so that no shape
    depends on other rows of the step.
    """

    def __init__(self, program: Program[TaskT], pool: KVPool) -> None:
        self._program, self._pool = program, pool

    def forward(self, entries: Sequence[tuple[TaskT, Extent]]) -> PassDone:
        rows_NH = joined([rows_of(self._program, task, extent) for task, extent in entries])
        done = [
            self._tile(rows, tile)
            for rows, tile in zip(rows_NH.split(TILE_ROWS), tiles(entries), strict=True)
        ]
        rows = PassRows(
            forwarded=concatenated(done), first=first_rows([extent for _, extent in entries])
        )
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


def concatenated(done: Sequence[Forwarded]) -> Forwarded:
    """Return the hidden states of a step that was computed in pieces."""
    return Forwarded(
        last_NH=torch.cat([forwarded.last_NH for forwarded in done]),
        tapped_NH=_all_joined([forwarded.tapped_NH for forwarded in done]),
        features_NT=_all_joined([forwarded.features_NT for forwarded in done]),
    )


def _all_joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the parts; return None if any part is None."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if len(found) == len(parts) else None


AnyTask = TypeVar("AnyTask")


def tiles(
    entries: Sequence[tuple[AnyTask, Extent]], num_rows: int = TILE_ROWS
) -> list[list[tuple[AnyTask, Extent]]]:
    """Cut extents, in order, into groups of `num_rows` rows; the last group may have fewer."""
    groups: list[list[tuple[AnyTask, Extent]]] = [[]]
    room = num_rows
    for task, extent in entries:
        start = extent.start
        while start < extent.stop:
            if room == 0:
                groups.append([])
                room = num_rows
            stop = min(extent.stop, start + room)
            groups[-1].append((task, replace(extent, start=start, stop=stop, drafts=())))
            room -= stop - start
            start = stop
    return groups


def first_rows(extents: Sequence[Extent]) -> dict[int, int]:
    """Return the number of the first row of each extent in a step, by `id` of the extent."""
    first, row = {}, 0
    for extent in extents:
        first[id(extent)] = row
        row += extent.num_rows
    return first
