"""Choice of a span for each span worker of one anchor. Knows no Redis.

Two ways: spans that the configuration names, or spans computed from the number of workers and their
memory. A division is chosen for a new route, and reconsidered while a route computes, when workers
come or are about to leave.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fleet.config.stage_schema import SpansConfig
from fleet.core.byte_sizes import format_byte_size
from fleet.core.ids import StageName, WorkerId
from fleet.spans.net.addresses import SpanAddress
from fleet.spans.protocol.layers import LayerSpan, Topology, plan_route, topology_of
from fleet.spans.protocol.plan import ModelSizes, plan_workers

LOSS_GRACE_S = 3.0
"""Time to wait for lost workers before fewer workers divide the layers: a killed worker restarts.
"""
JOIN_GRACE_S = 1.0
"""Time without a further new worker before more workers divide the layers: several may start
together.
"""

Placed = tuple[tuple[WorkerId, LayerSpan], ...]
"""A division: span workers with their spans, in the order of the layers."""


class RouteFailure(Exception):
    """An attempt to set up or change a route failed; the message says why. The anchor retries."""


class RouteGap(RouteFailure):
    """A route cannot be set up because span workers, or memory for some layers, are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWorker:
    """A span worker as an anchor sees it: where it listens, and what it has loaded.

    `key`: key that authenticates connections to the worker. `span`: span that the worker has loaded
    or is to load, such as `0:13`; "" for none. `anchor`: anchor of the worker's route, "" without
    one. `stands_by`: True for a standby worker, which replaces lost workers only. `memory`: bytes
    that the worker may occupy.
    """

    worker: WorkerId
    address: SpanAddress
    key: bytes
    span: str = ""
    anchor: str = ""
    stands_by: bool = False
    memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Span workers that an anchor may use for its route.

    `free`: workers that no other anchor uses: workers of this anchor's last route, then further
    workers, then standby workers. `limit`: most workers that this anchor may use, so that other
    anchors get their share.
    """

    free: Sequence[RouteWorker]
    limit: int

    def with_spans(self, placed: Sequence[tuple[WorkerId, LayerSpan | str]]) -> list[RouteWorker]:
        """Return the workers in `placed`, with `span` set to the span that each is to have."""
        by_name = {each.worker: each for each in self.free}
        return [replace(by_name[worker], span=str(span)) for worker, span in placed]


class RouteDivision(Protocol):
    """Strategy that decides which span worker gets which span of an anchor's route. Not
    thread-safe.
    """

    def place(self, candidates: Candidates) -> Placed:
        """Return the division for a new route. Raises: RouteGap naming the missing layers or
        memory.
        """
        ...

    def better(self, candidates: Candidates, *, is_leaving: bool) -> Placed:
        """Return the division to which the present, complete route should change; empty if the
        route should stay as it is.

        `is_leaving`: True if a worker of the route is about to leave; this worker is not among the
        candidates. Raises: RouteGap if no other worker can take the layers of the leaving worker.
        """
        ...

    def losses(self, candidates: Candidates) -> Mapping[WorkerId, str] | None:
        """Return the workers of the present route whose layers no other worker can take, each with
        the reason; empty if any one may leave. A fixed division returns None: a worker can leave
        only when an unused worker takes its place.
        """
        ...

    def accept(self, placed: Placed) -> None:
        """Record that the route has, or is about to have, this division."""
        ...


def assign_spans(wanted: Sequence[str], hosted: Mapping[WorkerId, str]) -> list[WorkerId | None]:
    """Return a worker for each wanted span, in the same order; None where workers are too few.

    `hosted`: the span that each free worker has loaded, "" for none. Workers that have a wanted
    span keep it; then workers without a span are chosen, and last workers with an unwanted span.
    Among equals the first is chosen.
    """
    chosen: list[WorkerId | None] = [None] * len(wanted)
    free = dict(hosted)

    def choose(accepts: "dict[WorkerId, str]", number: int) -> None:
        worker = next(iter(accepts), None)
        if worker is not None:
            chosen[number] = worker
            del free[worker]

    for number, span in enumerate(wanted):
        choose({worker: its for worker, its in free.items() if its == span}, number)
    for number in [number for number, worker in enumerate(chosen) if worker is None]:
        choose({worker: its for worker, its in free.items() if not its} or free, number)
    return chosen


class GivenDivision(RouteDivision):
    """Division by the spans in the configuration. A worker that has a span loaded already is
    preferred.
    """

    def __init__(self, stage: StageName, spans: SpansConfig, num_layers: int) -> None:
        self._stage = stage
        self._spans = spans
        self._num_layers = num_layers

    def place(self, candidates: Candidates) -> Placed:
        wanted = self._spans.worker_spans
        workers = assign_spans(
            [str(span) for span in wanted], {each.worker: each.span for each in candidates.free}
        )
        have = {
            worker: span for span, worker in zip(wanted, workers, strict=True) if worker is not None
        }
        if len(have) < len(wanted):
            spans = self._spans
            plan = plan_route(
                spans.anchor_span, have, self._num_layers, head_on_anchor=spans.has_head_on_anchor
            )
            raise RouteGap(f"no span worker has {plan.describe_gap()} of {self._stage}")
        return tuple(have.items())

    def better(self, candidates: Candidates, *, is_leaving: bool) -> Placed:
        return self.place(candidates) if is_leaving else ()

    def losses(self, candidates: Candidates) -> Mapping[WorkerId, str] | None:
        return None

    def accept(self, placed: Placed) -> None:
        pass


class AutomaticDivision(RouteDivision):
    """Division into about equal numbers of layers for all workers, as far as their memory allows.

    An unused worker takes over a lost worker's span; without one, the remaining workers divide the
    layers after `LOSS_GRACE_S`. A new worker gets a part of the layers `JOIN_GRACE_S` after it
    comes.
    """

    def __init__(
        self,
        stage: StageName,
        spans: SpansConfig,
        sizes: ModelSizes,
        *,
        head_on_anchor: bool,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a division without workers.

        `spans`: the stage's configuration, including the anchor's span. `sizes`: memory that the
        layers need. `head_on_anchor`: True if the workers have no output head.
        """
        self._stage = stage
        self._sizes = sizes
        self._head_on_anchor = head_on_anchor
        self._now_s = now_s
        self._num_expected = spans.replicas
        num_layers = len(sizes.layers)
        anchor = spans.anchor_span.of_model(num_layers, "anchor")
        is_first = topology_of(spans.anchor_span, "anchor") is Topology.FORWARD
        self._layers = range(anchor.final + 1, num_layers) if is_first else range(anchor.first)
        self._placed: Placed = ()
        self._lacking_since_s: float | None = None
        self._losses_of: object = None
        self._losses: Mapping[WorkerId, str] = {}
        self._joining: tuple[frozenset[WorkerId], float] = frozenset(), 0.0

    def accept(self, placed: Placed) -> None:
        self._placed, self._lacking_since_s = placed, None

    def place(self, candidates: Candidates) -> Placed:
        kept = self._replaced(candidates)
        if kept is not None:
            return kept
        most = min(candidates.limit, len(self._layers))
        num_wanted = min(len(self._placed) or self._num_expected, len(self._layers))
        able = [each for each in self._in_order(candidates) if not each.stands_by or self._placed]
        if len(able) < num_wanted:
            now_s = self._now_s()
            self._lacking_since_s = (
                now_s if self._lacking_since_s is None else self._lacking_since_s
            )
            if able and now_s - self._lacking_since_s < LOSS_GRACE_S:
                raise RouteGap(
                    f"only {len(able)} of {num_wanted} span workers are here for "
                    f"{self._described_layers()} of {self._stage}"
                )
        return self._divided(able[:most])

    def better(self, candidates: Candidates, *, is_leaving: bool) -> Placed:
        """Return a division with more workers, or with fewer if a worker leaves or another anchor
        needs some; empty if the present division stays.
        """
        kept = self._replaced(candidates)
        most = min(candidates.limit, len(self._layers))
        if kept is None:
            return self._divided(self._in_order(candidates)[:most])
        if kept != self._placed:
            return kept
        able = [
            each
            for each in self._in_order(candidates)
            if not each.stands_by or each.worker in dict(self._placed)
        ][:most]
        workers = frozenset(each.worker for each in able)
        if len(able) == len(self._placed):
            self._joining = frozenset(), 0.0
            return ()
        if self._joining[0] != workers:
            self._joining = workers, self._now_s()
        if self._now_s() - self._joining[1] < (
            JOIN_GRACE_S if len(able) > len(self._placed) else LOSS_GRACE_S
        ):
            return ()
        return self._divided(able)

    def losses(self, candidates: Candidates) -> Mapping[WorkerId, str] | None:
        key = (
            self._placed,
            tuple((each.worker, each.memory) for each in candidates.free),
            candidates.limit,
        )
        if self._losses_of != key:
            self._losses_of, self._losses = key, dict(self._find_losses(candidates))
        return self._losses

    def _find_losses(self, candidates: Candidates) -> Iterator[tuple[WorkerId, str]]:
        for worker, _ in self._placed:
            free = [each for each in candidates.free if each.worker != worker]
            try:
                self.better(replace(candidates, free=free), is_leaving=True)
            except RouteGap as gap:
                yield worker, f"without it {gap}"

    def _in_order(self, candidates: Candidates) -> list[RouteWorker]:
        """Return the free workers: members of the present division first, in its order; then by the
        layers that they have loaded, so that a successor of this anchor finds the same division.
        """
        place = {worker: number for number, (worker, _) in enumerate(self._placed)}

        def rank(each: RouteWorker) -> tuple[int, int]:
            loaded = (
                LayerSpan.parse(each.span, "span").first if each.span else len(self._sizes.layers)
            )
            return place.get(each.worker, len(place)), loaded

        return sorted(candidates.free, key=rank)

    def _replaced(self, candidates: Candidates) -> Placed | None:
        """Return the present division with an unused worker in place of each lost worker; None if
        unused workers are too few or too small.
        """
        if not self._placed:
            return None
        free = {each.worker: each for each in candidates.free}
        unused = [worker for worker in free if worker not in dict(self._placed)]
        placed: list[tuple[WorkerId, LayerSpan]] = []
        for worker, span in self._placed:
            if worker not in free:
                able = [other for other in unused if self._bytes_of(span) <= free[other].memory]
                if not able:
                    return None
                worker = next((other for other in able if free[other].span == str(span)), able[0])
                unused.remove(worker)
            placed.append((worker, span))
        return tuple(placed)

    def _bytes_of(self, span: LayerSpan) -> int:
        return self._sizes.bytes_of(span, is_anchor=False)

    def _divided(self, workers: Sequence[RouteWorker]) -> Placed:
        """Divide the layers among workers by their memory. Raises: RouteGap with the sizes if they
        do not fit.
        """
        if not workers:
            raise RouteGap(f"no span worker has {self._described_layers()} of {self._stage}")
        plan = plan_workers(
            self._sizes,
            self._layers,
            [each.memory for each in workers],
            head_on_anchor=self._head_on_anchor,
        )
        if plan.lacking_bytes:
            needed, budget = (
                sum(each.num_bytes for each in plan.spans),
                sum(each.memory for each in workers),
            )
            raise RouteGap(
                f"{self._described_layers()} of {self._stage} need {format_byte_size(needed)} "
                f"on {len(workers)} span workers, "
                f"which may occupy {format_byte_size(budget)}: "
                f"{format_byte_size(plan.lacking_bytes)} are missing"
            )
        return tuple(
            (each.worker, planned.span) for each, planned in zip(workers, plan.spans, strict=True)
        )

    def _described_layers(self) -> str:
        first, last = self._layers.start, self._layers.stop - 1
        return f"layer {first}" if first == last else f"layers {first} to {last}"


def fits_beside(sizes: ModelSizes, memory: int, span: LayerSpan, computed: LayerSpan) -> bool:
    """Return True if a worker with `memory` bytes can hold the weights of `span` in addition to
    everything it needs to compute its present span, `computed`.
    """
    num_layers = len(sizes.layers)
    span, computed = span.of_model(num_layers, "span"), computed.of_model(num_layers, "span")
    weights = sizes.bytes_of(span, is_anchor=False) - sizes.cached_bytes(span) - sizes.buffer_bytes
    return sizes.bytes_of(computed, is_anchor=False) + weights <= memory
