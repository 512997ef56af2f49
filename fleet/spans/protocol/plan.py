"""Division of a model's layers into spans by the memory of the processes. Pure arithmetic on sizes
in bytes.

The anchor holds the embedding, and, if it has the last layers, the output head; otherwise the last
worker holds the head, or the anchor if the model's span workers cannot. Every process holds the
keys and values of its own layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleet.spans.protocol.layers import LayerSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Memory that each part of a model needs, in bytes.

    `layers`: weights of each layer. `before`: weights applied before the first layer (learned
    positions). `after`: weights applied after the last layer (the final norm). `head`: weights of
    the output head. `tied`: True if the head is the embedding. `anchor`: weights that only the
    anchor has. `kv_bytes`: keys and values of one layer, for all positions of the pool.
    `buffer_bytes`: other memory of a process, independent of its layers; see `buffers`.
    """

    layers: tuple[int, ...]
    embedding: int
    before: int
    after: int
    head: int
    tied: bool
    kv_bytes: int
    buffer_bytes: int
    anchor: int = 0

    def bytes_of(self, span: LayerSpan, *, is_anchor: bool, with_head: bool = False) -> int:
        """Return the memory of a process with this span. `with_head`: the process has the output
        head even if the span does not include it.
        """
        has_head = span.has_output or with_head
        weights = sum(self.layers[span.first : span.final + 1])
        weights += (
            self.before * (span.first == 0) + (self.after + self.head * (not self.tied)) * has_head
        )
        has_embedding = is_anchor or (self.tied and has_head)
        cached = self.cached_bytes(span)
        return (
            weights
            + self.embedding * has_embedding
            + self.anchor * is_anchor
            + cached
            + self.buffer_bytes
        )

    def cached_bytes(self, span: LayerSpan) -> int:
        """Return the size of the keys and values of a span's layers."""
        return self.kv_bytes * (span.final - span.first + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpan:
    """A process's span in a plan. `num_bytes`: memory that it needs. `budget`: memory that it may
    occupy, in bytes. `has_head`: True if the process has the output head.
    """

    span: LayerSpan
    is_anchor: bool
    has_head: bool
    num_bytes: int
    budget: int

    @property
    def fill(self) -> float:
        return self.num_bytes / self.budget

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which the span exceeds its budget; 0 if it fits."""
        return max(0, self.num_bytes - self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlan:
    """A division of a model's layers: one span for each process, in the order of the layers."""

    spans: tuple[PlannedSpan, ...]

    @property
    def lacking_bytes(self) -> int:
        """Sum of the bytes by which spans exceed their budgets; 0 if all fit."""
        return sum(each.lacking_bytes for each in self.spans)


NO_PROCESS = -1
"""Index of the anchor in `_Processes` if the anchor is not among them."""


@dataclass(frozen=True, slots=True)
class _Processes:
    """Processes to divide layers among, in the order of the layers.

    `budgets`: memory that each may occupy, in bytes; None for no limit. `anchor`: index of the
    anchor, or `NO_PROCESS`. `head_on_anchor`: True if only the anchor can have the output head.
    """

    sizes: ModelSizes
    budgets: tuple[int | None, ...]
    anchor: int
    head_on_anchor: bool

    @property
    def num_layers(self) -> int:
        return len(self.sizes.layers)

    def planned(self, process: int, first: int, stop: int) -> PlannedSpan:
        """Return the plan of one process for layers `first` to `stop - 1`."""
        is_last, is_anchor = stop == self.num_layers, process == self.anchor
        span = LayerSpan(
            first, stop - 1, has_output=is_last and (is_anchor or not self.head_on_anchor)
        )
        has_head = span.has_output or (is_anchor and self.head_on_anchor)
        num_bytes = self.sizes.bytes_of(span, is_anchor=is_anchor, with_head=has_head)
        return PlannedSpan(
            span=span,
            is_anchor=is_anchor,
            has_head=has_head,
            num_bytes=num_bytes,
            budget=self.budgets[process] or num_bytes,
        )

    def fits(self, process: int, first: int, stop: int) -> bool:
        return not self.planned(process, first, stop).lacking_bytes

    def possible_stops(self, process: int, firsts: Iterable[int]) -> set[int]:
        """Return every layer before which the process can end if it begins at one of `firsts`.
        Shorter ends count too: a later process may be too small to begin where the longest span
        ends.
        """
        return {
            stop
            for first in firsts
            for stop in range(first + 1, self.num_layers + 1)
            if self.fits(process, first, stop)
        }


def plan_spans(
    sizes: ModelSizes,
    anchor_budget: int,
    worker_budgets: Sequence[int],
    *,
    anchor_is_last: bool,
    head_on_anchor: bool = False,
) -> SpanPlan:
    """Divide all layers among the anchor and its span workers, so that the highest fill (memory
    over budget) is as low as possible.

    `anchor_budget`, `worker_budgets`: bytes, workers in the order of the layers. `anchor_is_last`:
    the anchor has the last layers, else the first. `head_on_anchor`: workers cannot have the output
    head. If no division fits, the result is the one that lacks the fewest bytes. Every process gets
    a layer, so the model must have at least as many layers as there are processes.
    """
    budgets = (
        (*worker_budgets, anchor_budget) if anchor_is_last else (anchor_budget, *worker_budgets)
    )
    processes = _Processes(
        sizes, budgets, len(budgets) - 1 if anchor_is_last else 0, head_on_anchor
    )
    assert processes.num_layers >= len(budgets), (
        f"{len(budgets)} processes for {processes.num_layers} layers"
    )
    cuts = _best_cuts(len(budgets), range(processes.num_layers), processes.planned)
    return SpanPlan(
        spans=tuple(
            processes.planned(process, first, stop)
            for process, (first, stop) in enumerate(pairwise(cuts))
        )
    )


def plan_workers(
    sizes: ModelSizes, layers: range, budgets: Sequence[int], *, head_on_anchor: bool = False
) -> SpanPlan:
    """Divide the layers that the anchor lacks among span workers, in order: the largest number of
    layers per worker is as low as possible, then the highest fill (memory over budget).

    `layers`: layers to divide, at least as many as workers. `budgets`: memory of each worker, in
    bytes. If no division fits, the result is the one that lacks the fewest bytes. The worker with
    the model's last layer has the output head unless `head_on_anchor`.
    """
    assert len(layers) >= len(budgets) > 0, f"{len(budgets)} workers for {len(layers)} layers"
    processes = _Processes(sizes, tuple(budgets), NO_PROCESS, head_on_anchor)
    cuts = _best_cuts(len(budgets), layers, processes.planned, most_layers_first=True)
    return SpanPlan(
        spans=tuple(
            processes.planned(process, first, stop)
            for process, (first, stop) in enumerate(pairwise(cuts))
        )
    )


def further_worker_bytes(
    sizes: ModelSizes,
    anchor_budget: int,
    worker_budgets: Sequence[int],
    *,
    anchor_is_last: bool,
    head_on_anchor: bool = False,
) -> int | None:
    """Return the smallest memory of one additional span worker, placed after the others, with which
    a model fits that does not fit without it; None if no memory is enough, or layers are too few.

    Parameters: see `plan_spans`.
    """
    before: tuple[int | None, ...] = (
        tuple(worker_budgets) if anchor_is_last else (anchor_budget, *worker_budgets)
    )
    after = (anchor_budget,) if anchor_is_last else ()
    processes = _Processes(
        sizes, (*before, None, *after), len(before) + 1 if anchor_is_last else 0, head_on_anchor
    )
    if processes.num_layers < len(processes.budgets):
        return None
    further, end = len(before), processes.num_layers
    firsts = {0}
    for process in range(further):
        firsts = processes.possible_stops(process, firsts)
    stops = (
        [stop for stop in range(end) if processes.fits(further + 1, stop, end)] if after else [end]
    )
    spans = [
        processes.planned(further, first, stop)
        for first in firsts
        for stop in stops
        if first < stop
    ]
    return min((span.num_bytes for span in spans), default=None)


@dataclass(frozen=True, slots=True, order=True)
class _Division:
    """A division of the first layers among the first processes. The smallest is the best: fewest
    lacking bytes, then fewest layers of the largest process (if counted), then the lowest fill of
    the fullest process.
    """

    num_lacking: int
    most_layers: int
    fullest: float
    cuts: tuple[int, ...]


def _best_cuts(
    num_processes: int,
    layers: range,
    planned: Callable[[int, int, int], PlannedSpan],
    *,
    most_layers_first: bool = False,
) -> tuple[int, ...]:
    """Return the first layer of each process in the best division, followed by the end of the
    layers.

    `planned(process, first, stop)` returns the plan of a process. `most_layers_first`: see
    `_Division`.
    """
    best = {layers.start: _Division(0, 0, 0.0, (layers.start,))}
    """The best division among the processes so far, by the layer at which they end."""
    for process in range(num_processes):
        num_left = num_processes - 1 - process
        stops = (
            range(layers.start + process + 1, layers.stop - num_left + 1)
            if num_left
            else (layers.stop,)
        )
        best = {
            stop: _extended(
                best,
                stop,
                lambda first, stop, process=process: planned(process, first, stop),
                most_layers_first,
            )
            for stop in stops
        }
    return best[layers.stop].cuts


def _extended(
    best: Mapping[int, _Division],
    stop: int,
    planned: Callable[[int, int], PlannedSpan],
    most_layers_first: bool,
) -> _Division:
    """Return the best division of the layers before `stop` that adds one process to a division in
    `best`.
    """
    found: list[_Division] = []
    for division in best.values():
        first = division.cuts[-1]
        if first < stop:
            own = planned(first, stop)
            most_layers = max(division.most_layers, stop - first) if most_layers_first else 0
            num_lacking, fullest = (
                division.num_lacking + own.lacking_bytes,
                max(division.fullest, own.fill),
            )
            found.append(_Division(num_lacking, most_layers, fullest, (*division.cuts, stop)))
    return min(found)
