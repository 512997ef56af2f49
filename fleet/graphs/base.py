"""Declaration of a graph: stages, walks, edges, chunk policies. Pure data; knows no process and no
tensor library.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fleet.core.errors import ConfigError
from fleet.core.ids import CLIENT, EdgeName, StageName, Walk

PolicyKind = Literal["each", "ramp", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    """Rule by which an edge releases chunks: `each` item by itself, a `ramp` of item counts (the
    last repeats), or `all` at the end.

    Units: `low_buffer_s` seconds. A chunk of a ramp is released early, with the items it has, where
    waiting for the next item would leave less than this to a client that plays since the first
    chunk; chunks grow as the producer gets ahead. 0: never early. `busy_first_chunk_factor`: a
    ramp's first chunk is multiplied by the number of answers in progress in the producer, at most
    by this: with others in progress the next items come later and less evenly, so that playback
    must start with more. `max_chunks_per_s`: chunks of the edge that a worker releases per second,
    over all answers in progress; items that come sooner are held, and share a chunk. A single
    answer has no limit; 0: no limit at all.
    """

    kind: PolicyKind = "each"
    ramp: tuple[int, ...] = ()
    low_buffer_s: float = 0.0
    busy_first_chunk_factor: int = 1
    max_chunks_per_s: int = 0

    def size(self, chunk_index: int, num_answers: int = 1) -> int | None:
        """Return the items of a chunk, with `num_answers` in progress; None: all that is left at
        the end.
        """
        if self.kind == "all":
            return None
        if self.kind == "each":
            return 1
        times = max(1, min(num_answers, self.busy_first_chunk_factor)) if chunk_index == 0 else 1
        return self.ramp[min(chunk_index, len(self.ramp) - 1)] * times

    def interval_s(self, num_answers: int) -> float:
        """Return the interval at which one of `num_answers` in progress releases its items; 0: each
        item alone.
        """
        return (num_answers - 1) / self.max_chunks_per_s if self.max_chunks_per_s else 0.0


EACH = ChunkPolicy(kind="each")
ALL = ChunkPolicy(kind="all")
TOKENS = ChunkPolicy(kind="each", max_chunks_per_s=1000)
"""Answer tokens on their way to a client: alone while few are drawn, else as many as come between
two writes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """From the `nth` item (counted from 0) of `producer_walk` on, the consumer is in walk `to`."""

    producer_walk: Walk
    nth: int
    to: Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A named one-way stream of chunks. `tensors` names each tensor's dtype; `remote` ones are
    pulled by NIXL, the rest are sent inline.

    Units: `credits` counts unconsumed chunks; `item_ms` is the duration of an item, for edges that
    carry audio. `never_inline`: remote tensors that find no room to be pulled from fail their
    request, instead of being sent inline.
    """

    name: EdgeName
    source: StageName
    target: StageName
    tensors: dict[str, str] = field(default_factory=dict[str, str])
    remote: tuple[str, ...] = ()
    never_inline: bool = False
    policy: ChunkPolicy = EACH
    credits: int = 64
    item_ms: float = 0.0
    transitions: tuple[Transition, ...] = ()

    def consumer_walk(self, producer_walk: Walk, ordinal: int) -> Walk | None:
        """Return the consumer's walk from item `ordinal` of `producer_walk` on; None if no
        transition applies.

        Used by the producer or the conductor, depending on which of them drives the walk.
        """
        last: Transition | None = None
        for one in self.transitions:
            if (
                one.producer_walk == producer_walk
                and (last.nth if last else -1) < one.nth <= ordinal
            ):
                last = one
        return last.to if last else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage of a model. `builder` is "module:function", imported only inside a worker of this
    stage. `span_builder` likewise loads a part of its layers, for a stage whose layers can be
    divided among workers; `layer_counter` returns how many layers a checkpoint has, without reading
    weights. `span_head`: a span worker may have the output head; False: only the anchor has it.

    `engines`: engines that can run it. `default_sampling`: `Sampling` fields that a request may
    override. `main`: the stage that uses the request's own temperature, stop and max_tokens.
    `settings`: the keys of a deployment's `stages.NAME.extra` that its builder reads.
    `reads_prompt_audio`: workers of the stage receive the samples of the prompt with each task.
    `verifies_drafts`: the stage can verify guessed tokens of its answers (engine torch only).
    """

    name: StageName
    builder: str
    walks: tuple[Walk, ...]
    span_builder: str = ""
    layer_counter: str = ""
    span_head: bool = True
    main: bool = False
    reads_prompt_audio: bool = False
    verifies_drafts: bool = False
    engines: tuple[str, ...] = ("torch",)
    settings: tuple[str, ...] = ()
    default_sampling: dict[str, float | int] = field(default_factory=dict[str, float | int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A composite model. `frontend`: "module:class" of the gateway's prompt processing (without
    torch).

    `tiny`: "module:function" that writes a small random checkpoint; `baseline`: the module whose
    `run` measures the reference; `full_size`: "module:function" that builds the stages at their
    published size with random weights. `shipped`: "package:folder" of a trained checkpoint in
    Fleet's package, or None. `media`: the content of each client edge ("text", "audio") of an
    answer.

    `optional_stages`: stages that no answer needs: a deployment is ready without their workers.
    """

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    frontend: str
    media: dict[EdgeName, str]
    tiny: str | None = None
    shipped: str | None = None
    baseline: str | None = None
    full_size: str | None = None
    optional_stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        names = {stage.name for stage in self.all_stages} | {CLIENT}
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in names:
                    raise ConfigError(
                        f"graph {self.name}: edge {edge.name} ends at unknown stage {end}",
                        param="edges",
                    )

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        return self.stages + self.optional_stages

    @property
    def answer_edges(self) -> tuple[Edge, ...]:
        """Edges of an answer in all media, in declaration order, without the edges of captures."""
        return self.edges_for(tuple(self.media))

    @property
    def main_stage(self) -> Stage:
        return next(stage for stage in self.stages if stage.main)

    def is_optional(self, name: StageName) -> bool:
        return any(stage.name == name for stage in self.optional_stages)

    def stage(self, name: StageName) -> Stage:
        for stage in self.all_stages:
            if stage.name == name:
                return stage
        known = ", ".join(s.name for s in self.all_stages)
        raise ConfigError(f"graph {self.name} has no stage {name}; it has {known}", param="stage")

    def edge(self, name: EdgeName) -> Edge:
        return next(edge for edge in self.edges if edge.name == name)

    def shipped_folder(self) -> Path | None:
        """Return the folder of the shipped checkpoint, if there is one. Does not import its
        package.
        """
        if self.shipped is None:
            return None
        package, _, folder = self.shipped.partition(":")
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None, (
            f"{package} is not a package"
        )
        return Path(spec.submodule_search_locations[0]) / folder

    def edges_from(self, stage: StageName) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == stage)

    def edges_to(self, stage: StageName) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == stage)

    def edges_for(self, outputs: tuple[EdgeName, ...]) -> tuple[Edge, ...]:
        """Return the edges of a request for these client edges, in declaration order."""
        needed: set[EdgeName] = set(outputs)
        grew = True
        while grew:
            sources = {edge.source for edge in self.edges if edge.name in needed}
            more = {edge.name for edge in self.edges if edge.target in sources}
            grew = not more <= needed
            needed |= more
        return tuple(edge for edge in self.edges if edge.name in needed)

    def stages_for(self, outputs: tuple[EdgeName, ...]) -> tuple[StageName, ...]:
        """Return the stages of a request for these client edges, in declaration order."""
        active = {edge.source for edge in self.edges_for(outputs)}
        return tuple(stage.name for stage in self.all_stages if stage.name in active)
