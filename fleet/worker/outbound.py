"""One output edge of one task: groups items into chunks by policy, cuts at transitions, counts credits. Pure."""

from dataclasses import dataclass

import numpy as np

from fleet.core.ids import Walk
from fleet.engine.base import Arrays
from fleet.graphs import ChunkPolicy, Edge
from fleet.stages.base import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A chunk to be: its index, its joined arrays, and what its header will say. `ordinal` counts items of `producer_walk`."""

    index: int
    arrays: Arrays
    producer_walk: Walk
    ordinal: int
    boundary: bool
    walk: Walk | None
    final: bool
    num_items: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Items of one consumer walk, waiting for the policy to release them."""

    producer_walk: Walk
    ordinal: int
    consumer_walk: Walk | None
    boundary: bool


class OutboundEdge:
    """Invariants: chunk indices are consecutive; a chunk holds items of one consumer walk; nothing follows the final chunk.

    `marks` is whether this side writes the transition markers (`transition_source: producer`).
    """

    def __init__(self, edge: Edge, policy: ChunkPolicy, credits: int, *, marks: bool) -> None:
        self.edge, self._policy, self._credits, self._marks = edge, policy, credits, marks
        self.produced = 0
        self.acked = 0
        self.ended = False
        self._policy_index = 0
        self._ordinals: dict[Walk, int] = {}
        self._last_walk: Walk | None = None
        self._group: _Group | None = None
        self._items: list[Arrays] = []

    def offer(self, item: Item) -> list[Draft]:
        """Take one item; returns the chunks it releases, in order."""
        assert not self.ended, f"an item after the end of edge {self.edge.name}"
        drafts: list[Draft] = []
        if item.arrays:
            drafts += self._enter_group(item)
            self._items.append(item.arrays)
            size = self._policy.size(self._policy_index)
            if size is not None and len(self._items) >= size:
                drafts.append(self._release(final=item.final))
        if item.final and not (drafts and drafts[-1].final):
            drafts.append(self._release(final=True, walk=item.walk))
        self.ended = item.final
        return drafts

    def _enter_group(self, item: Item) -> list[Draft]:
        """Start a new group where the consumer's walk changes, releasing what the old one held."""
        ordinal = self._ordinals.get(item.walk, 0)
        self._ordinals[item.walk] = ordinal + 1
        target = self.edge.consumer_walk(item.walk, ordinal)
        boundary = target is not None and target != self._last_walk
        drafts = [self._release(final=False)] if boundary and self._items else []
        if boundary:
            self._last_walk = target
        if boundary or not self._items:
            self._group = _Group(item.walk, ordinal, target, boundary)
        return drafts

    def _release(self, *, final: bool, walk: Walk | None = None) -> Draft:
        group = self._group if self._items else None
        draft = Draft(
            index=self.produced,
            arrays=_join(self._items),
            producer_walk=group.producer_walk if group else walk or Walk(""),
            ordinal=group.ordinal if group else 0,
            boundary=group.boundary if group else False,
            walk=group.consumer_walk if group and group.boundary and self._marks else None,
            final=final,
            num_items=len(self._items),
        )
        self._items = []
        self.produced += 1
        self._policy_index += 1
        return draft

    def credit(self, consumed: int) -> None:
        self.acked = max(self.acked, consumed)

    def has_credit(self) -> bool:
        return self.produced - self.acked < self._credits


def _join(items: list[Arrays]) -> Arrays:
    if len(items) == 1:
        return items[0]
    names = {name for arrays in items for name in arrays}
    return {name: np.concatenate([arrays[name] for arrays in items if name in arrays]) for name in sorted(names)}
