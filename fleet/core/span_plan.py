"""Division of a model's layers into spans by the memory of the processes that hold them. Pure: counts bytes, reads nothing.

The anchor holds the embedding, and, if it is last, the output head; otherwise the last worker holds the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleet.core.layer_spans import LayerSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Bytes of a model's weights: of each layer, of the embedding, of what runs `before` the first layer (learned positions),
    of what runs `after` the last (the final norm), and of the output head. `tied`: the head is the embedding. `anchor`: of what
    only the anchor has.

    `kv_bytes`: keys and values of one layer, for all positions that a process is to hold. `buffer_bytes`: rows of passes and
    other memory of a process that does not depend on its layers.
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

    def bytes_of(self, span: LayerSpan, *, is_anchor: bool) -> int:
        """Return what a process with this span occupies."""
        weights = sum(self.layers[span.first : span.final + 1])
        weights += self.before * (span.first == 0) + (self.after + self.head * (not self.tied)) * span.has_output
        has_embedding = is_anchor or (self.tied and span.has_output)
        cached = self.kv_bytes * (span.final - span.first + 1)
        return weights + self.embedding * has_embedding + self.anchor * is_anchor + cached + self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpan:
    """The span of one process, with what it occupies and what it may occupy, in bytes."""

    span: LayerSpan
    is_anchor: bool
    num_bytes: int
    budget: int

    @property
    def fill(self) -> float:
        return self.num_bytes / self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlan:
    """The spans in the order of the layers."""

    spans: tuple[PlannedSpan, ...]

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which spans exceed their budgets, together; 0 if all fit."""
        return sum(max(0, each.num_bytes - each.budget) for each in self.spans)


def plan_spans(sizes: ModelSizes, anchor_budget: int, worker_budgets: Sequence[int], *, anchor_is_last: bool) -> SpanPlan:
    """Divide the layers so that the fullest process is as empty as possible; budgets in bytes, workers in the order of layers.

    A plan that does not fit is the one that lacks least. Every process has a layer at least, so `sizes` must have as many layers
    as there are processes.
    """
    budgets = [*worker_budgets, anchor_budget] if anchor_is_last else [anchor_budget, *worker_budgets]
    anchor, num_layers = len(budgets) - 1 if anchor_is_last else 0, len(sizes.layers)
    assert num_layers >= len(budgets), f"{len(budgets)} processes for {num_layers} layers"

    def planned(process: int, first: int, stop: int) -> PlannedSpan:
        is_last = process == len(budgets) - 1
        span = LayerSpan(first, stop - 1, has_output=is_last)
        num_bytes = sizes.bytes_of(span, is_anchor=process == anchor)
        return PlannedSpan(span=span, is_anchor=process == anchor, num_bytes=num_bytes, budget=budgets[process])

    cuts = _best_cuts(len(budgets), num_layers, lambda process, first, stop: planned(process, first, stop).fill)
    return SpanPlan(spans=tuple(planned(process, first, stop) for process, (first, stop) in enumerate(pairwise(cuts))))


def _best_cuts(num_processes: int, num_layers: int, fill: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Return the layers at which processes begin, and the number of layers, so that the largest `fill(process, first, stop)` is
    as small as possible.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    """For each number of layers of the processes so far: the fullest one, and the cuts."""
    for process in range(num_processes):
        num_left = num_processes - 1 - process
        stops = range(process + 1, num_layers - num_left + 1) if num_left else (num_layers,)
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in stops:
            begun = [(fullest, cuts) for fullest, cuts in best.values() if cuts[-1] < stop]
            extended[stop] = min((max(fullest, fill(process, cuts[-1], stop)), (*cuts, stop)) for fullest, cuts in begun)
        best = extended
    return best[num_layers][1]
