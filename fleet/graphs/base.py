"""The words a graph is declared in: stages, walks, edges, chunk policies. Pure data; knows no process and no tensor library."""

from dataclasses import dataclass, field
from typing import Literal

from fleet.core.errors import ConfigError
from fleet.core.ids import CLIENT, EdgeName, StageName, Walk

PolicyKind = Literal["each", "ramp", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    """When an edge releases a chunk: `each` item at once, a `ramp` of item counts (the last repeats), or `all` at the end.

    Units: `low_buffer_s` seconds. A chunk of a ramp is released early, with the items it has, where waiting for another one would
    leave a client that plays since the first chunk less than this; chunks grow as the producer gets ahead. 0: never early.
    `busy_first_chunk_factor`: a ramp's first chunk is multiplied by the number of answers in progress in the producer, at most by
    this: with others in progress the next items come later and less evenly, so that playback must start with more.
    """

    kind: PolicyKind = "each"
    ramp: tuple[int, ...] = ()
    low_buffer_s: float = 0.0
    busy_first_chunk_factor: int = 1

    def size(self, chunk_index: int, num_answers: int = 1) -> int | None:
        """Items in chunk `chunk_index`, with so many answers under way; None means all that is left at the end."""
        if self.kind == "all":
            return None
        if self.kind == "each":
            return 1
        times = max(1, min(num_answers, self.busy_first_chunk_factor)) if chunk_index == 0 else 1
        return self.ramp[min(chunk_index, len(self.ramp) - 1)] * times


EACH = ChunkPolicy(kind="each")
ALL = ChunkPolicy(kind="all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """From the `nth` item (counted from 0) that the producer makes in `producer_walk`, the consumer is in walk `to`."""

    producer_walk: Walk
    nth: int
    to: Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A named one-way stream of chunks. `tensors` names each tensor's dtype; `remote` are pulled by NIXL, the rest ride inline.

    Units: `credits` counts unconsumed chunks; `item_ms` is the play time of an item, for edges that carry sound.
    """

    name: EdgeName
    source: StageName
    target: StageName
    tensors: dict[str, str] = field(default_factory=dict[str, str])
    remote: tuple[str, ...] = ()
    policy: ChunkPolicy = EACH
    credits: int = 64
    item_ms: float = 0.0
    transitions: tuple[Transition, ...] = ()

    def consumer_walk(self, producer_walk: Walk, ordinal: int) -> Walk | None:
        """The consumer's walk from item `ordinal` of `producer_walk` on; None where no transition says.

        The one home of this rule: the producer asks it when it drives the walk, the conductor when it does.
        """
        last: Transition | None = None
        for one in self.transitions:
            if one.producer_walk == producer_walk and (last.nth if last else -1) < one.nth <= ordinal:
                last = one
        return last.to if last else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the model. `builder` is "module:function", imported only inside a worker of this stage.

    `default_sampling` holds `Sampling` fields a request may override. `sampled` stages take a request's seed and temperature.
    `main` marks the stage whose temperature, stop and max_tokens are the request's own.
    `settings` are the keys of a deployment's `stages.NAME.extra` that its builder reads.
    """

    name: StageName
    builder: str
    walks: tuple[Walk, ...]
    main: bool = False
    settings: tuple[str, ...] = ()
    default_sampling: dict[str, float | int] = field(default_factory=dict[str, float | int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One composite model. `frontend` is "module:function" giving the gateway its prompt processing (no torch there).

    `tiny` is "module:function" writing a small random checkpoint; `baseline` a module that, as a script, measures the reference.
    `shipped` is "package:folder", a trained checkpoint that comes with Fleet; None where there is none.
    `media` maps each client edge to what it carries ("text", "audio").
    """

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    frontend: str
    media: dict[EdgeName, str]
    tiny: str | None = None
    shipped: str | None = None
    baseline: str | None = None

    def __post_init__(self) -> None:
        names = {stage.name for stage in self.stages} | {CLIENT}
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in names:
                    raise ConfigError(f"graph {self.name}: edge {edge.name} ends at unknown stage {end}", param="edges")

    def stage(self, name: StageName) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(s.name for s in self.stages)
        raise ConfigError(f"graph {self.name} has no stage {name}; it has {known}", param="stage")

    def edge(self, name: EdgeName) -> Edge:
        return next(edge for edge in self.edges if edge.name == name)

    def edges_from(self, stage: StageName) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == stage)

    def edges_to(self, stage: StageName) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == stage)

    def edges_for(self, outputs: tuple[EdgeName, ...]) -> tuple[Edge, ...]:
        """The edges a request that wants these client edges runs, in declaration order."""
        needed: set[EdgeName] = set(outputs)
        grew = True
        while grew:
            sources = {edge.source for edge in self.edges if edge.name in needed}
            more = {edge.name for edge in self.edges if edge.target in sources}
            grew = not more <= needed
            needed |= more
        return tuple(edge for edge in self.edges if edge.name in needed)

    def stages_for(self, outputs: tuple[EdgeName, ...]) -> tuple[StageName, ...]:
        """The stages such a request runs, in declaration order."""
        active = {edge.source for edge in self.edges_for(outputs)}
        return tuple(stage.name for stage in self.stages if stage.name in active)
