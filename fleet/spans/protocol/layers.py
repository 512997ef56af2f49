"""Ranges of a language model's layers (spans): their notation, the direction of steps that the
anchor's span implies, and routes through span workers. Pure.

The anchor owns ids, embedding, sampling and sessions, and computes the first or the last span
itself. Span workers compute the other layers, in the order of the layers. A span includes both of
its ends.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId

OUTPUT, LAST = "output", "last"
_NOTATION = re.compile(rf"(0|[1-9][0-9]*):(0|[1-9][0-9]*|{OUTPUT}|{LAST})")
_FORMS = (
    "0:13 (layers 0 to 13), 14:output (layer 14 to the last, and the output head) or "
    "14:last (without the head)"
)


class Topology(StrEnum):
    """Direction in which steps pass through the processes of a divided model.

    `forward`: the anchor first, then the span workers. `reverse`: the span workers first, then the
    anchor. `single`: the anchor has all layers.
    """

    SINGLE = "single"
    FORWARD = "forward"
    REVERSE = "reverse"


@dataclass(frozen=True, slots=True, order=True)
class LayerSpan:
    """A range of layers, `first` to `last` inclusive, with the output head if `has_output`.

    `last` is None if the range ends with the last layer of a model whose size is not known yet.
    """

    first: int
    last: int | None = None
    has_output: bool = False

    @classmethod
    def parse(cls, notation: str, param: str) -> Self:
        """Parse notation such as `0:13`, `14:output` or `14:last`.

        `param`: configuration field to name in errors. Raises: ConfigError naming `param` and the
        accepted forms.
        """
        found = _NOTATION.fullmatch(notation)
        if found is None:
            raise ConfigError(
                f"{param}: {notation!r} is no span of layers; write {_FORMS}", param=param
            )
        first, end = int(found[1]), found[2]
        last = None if end in (OUTPUT, LAST) else int(end)
        if last is not None and last < first:
            raise ConfigError(
                f"{param}: {notation} ends before it begins; write {last}:{first}", param=param
            )
        return cls(first, last, end == OUTPUT)

    def __str__(self) -> str:
        if self.has_output:
            return f"{self.first}:{OUTPUT}"
        return f"{self.first}:{LAST if self.last is None else self.last}"

    @property
    def final(self) -> int:
        """The last layer, for a span whose `last` is known."""
        assert self.last is not None, f"{self}: of which model?"
        return self.last

    def of_model(self, num_layers: int, param: str) -> Self:
        """Return the span with `last` set, for a model of `num_layers` layers.

        `param`: configuration field to name in errors. Raises: ConfigError if the span exceeds the
        model's last layer.
        """
        final = num_layers - 1
        beyond = max(self.first, self.last or 0)
        if beyond > final:
            raise ConfigError(
                f"{param}: {self} names layer {beyond}, but the model's last layer is {final}",
                param=param,
            )
        return type(self)(self.first, final if self.last is None else self.last, self.has_output)


def topology_of(anchor: LayerSpan, param: str) -> Topology:
    """Return the direction of steps that an anchor's span implies.

    `param`: configuration field to name in errors. Raises: ConfigError for a span that neither
    begins with the embedding nor ends with the output head, naming the valid forms.
    """
    if anchor.first == 0:
        return Topology.SINGLE if anchor.has_output else Topology.FORWARD
    if anchor.has_output:
        return Topology.REVERSE
    first, last = anchor.first, anchor.last
    forward = f" or begin with the embedding (0:{last})" if last is not None else ""
    raise ConfigError(
        f"{param}: {anchor} has neither the embedding nor the output head; an anchor's span "
        "must end with the output head "
        f"({first}:{OUTPUT}){forward}",
        param=param,
    )


@dataclass(frozen=True, slots=True)
class Hop:
    """A span worker at its place in a route, with its span."""

    worker: WorkerId
    span: LayerSpan


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A choice of span workers that covers as many of the layers missing from the anchor as
    possible.

    `hops`: chosen workers in the order of the layers. `missing`: layer ranges (first, last) that no
    chosen worker has. `needs_output`: True if neither a chosen worker nor the anchor has the output
    head. `unused`: the other workers, each with the reason.
    """

    hops: tuple[Hop, ...]
    missing: tuple[tuple[int, int], ...]
    needs_output: bool
    unused: Mapping[WorkerId, str]

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.needs_output

    def describe_gap(self) -> str:
        """Return the missing layers and head as text, such as "layers 4 to 7 and the output head";
        "" if the route is complete.
        """
        ranges = [
            f"{first}" if first == last else f"{first} to {last}" for first, last in self.missing
        ]
        single = len(self.missing) == 1 and self.missing[0][0] == self.missing[0][1]
        layers = f"layer{'' if single else 's'} {', '.join(ranges)}" if ranges else ""
        return " and ".join(
            part for part in (layers, "the output head" if self.needs_output else "") if part
        )


@dataclass(frozen=True, slots=True)
class _Chain:
    """A candidate route during the search: workers without common layers, from some layer to the
    end.
    """

    num_covered: int = 0
    ends_as_wanted: bool = False
    hops: tuple[Hop, ...] = ()

    def rank(self) -> tuple[int, bool, int, list[WorkerId]]:
        """Return a sort key; the smallest is best: more layers, then the wanted end, then fewer
        workers, then names.
        """
        return (
            -self.num_covered,
            not self.ends_as_wanted,
            len(self.hops),
            [hop.worker for hop in self.hops],
        )


def plan_route(
    anchor: LayerSpan,
    workers: Mapping[WorkerId, LayerSpan],
    num_layers: int,
    *,
    head_on_anchor: bool = False,
) -> RoutePlan:
    """Choose span workers that together cover the layers that the anchor lacks, without overlap.

    `workers`: span of each available worker. `head_on_anchor`: the anchor has the output head of a
    forward route, and the last worker returns hidden states. A reverse route never uses a worker
    with the head. Raises: ConfigError if the anchor's span does not fit this model.
    """
    whole = anchor.of_model(num_layers, "anchor")
    topology = topology_of(anchor, "anchor")
    low, high = (
        (whole.final + 1, num_layers - 1) if topology is Topology.FORWARD else (0, whole.first - 1)
    )
    wants_head = topology is Topology.FORWARD and not head_on_anchor
    usable, unused = _usable(workers, low, high, num_layers, forbids_head=not wants_head)
    chain = _best_chain(usable, low, high, wants_head=wants_head)
    chosen = {hop.worker for hop in chain.hops}
    unused |= {hop.worker: _overlap(hop, chain.hops) for hop in usable if hop.worker not in chosen}
    has_head = bool(chain.hops) and chain.hops[-1].span.has_output
    return RoutePlan(
        chain.hops, _missing(chain.hops, low, high), wants_head and not has_head, unused
    )


def _usable(
    workers: Mapping[WorkerId, LayerSpan],
    low: int,
    high: int,
    num_layers: int,
    *,
    forbids_head: bool,
) -> tuple[list[Hop], dict[WorkerId, str]]:
    """Return the workers whose layers all lie within `low` to `high`, and for each other worker the
    reason why it is unusable.
    """
    usable: list[Hop] = []
    unused: dict[WorkerId, str] = {}
    for worker, span in sorted(workers.items()):
        final = num_layers - 1 if span.last is None else span.last
        if final >= num_layers or span.first >= num_layers:
            unused[worker] = f"{span} exceeds the model's last layer, {num_layers - 1}"
        elif span.has_output and forbids_head:
            unused[worker] = f"{span} has the output head, which is the anchor's"
        elif span.first < low or final > high:
            unused[worker] = f"{span} overlaps the anchor's layers"
        else:
            usable.append(Hop(worker, LayerSpan(span.first, final, span.has_output)))
    return usable, unused


def _best_chain(usable: Sequence[Hop], low: int, high: int, *, wants_head: bool) -> _Chain:
    """Return the best candidate route for layers `low` to `high`, searched from the last layer
    backwards.
    """
    best = _Chain(ends_as_wanted=not wants_head)
    best_from = {high + 1: best}
    for layer in range(high, low - 1, -1):
        best = best_from[layer + 1]
        for hop in usable:
            if hop.span.first == layer:
                best = min(
                    best, _before(hop, best_from, high, wants_head=wants_head), key=_Chain.rank
                )
        best_from[layer] = best
    return best


def _before(hop: Hop, best_from: Mapping[int, _Chain], high: int, *, wants_head: bool) -> _Chain:
    """Return the best candidate route that begins with this worker."""
    rest = best_from[hop.span.final + 1]
    is_end = hop.span.final == high
    ends_as_wanted = (hop.span.has_output == wants_head) if is_end else rest.ends_as_wanted
    return _Chain(
        rest.num_covered + hop.span.final - hop.span.first + 1, ends_as_wanted, (hop, *rest.hops)
    )


def _missing(hops: Sequence[Hop], low: int, high: int) -> tuple[tuple[int, int], ...]:
    missing: list[tuple[int, int]] = []
    following = low
    for hop in hops:
        if hop.span.first > following:
            missing.append((following, hop.span.first - 1))
        following = hop.span.final + 1
    return (*missing, (following, high)) if following <= high else tuple(missing)


def _overlap(unused: Hop, hops: Sequence[Hop]) -> str:
    """Describe which chosen worker has layers of an unused worker. Such a worker exists, or the
    unused worker would have extended the route.
    """
    hop = next(
        hop
        for hop in hops
        if hop.span.first <= unused.span.final and unused.span.first <= hop.span.final
    )
    return (
        f"{unused.span} {'repeats' if hop.span == unused.span else 'overlaps'} {hop.span} of "
        f"{hop.worker}"
    )
