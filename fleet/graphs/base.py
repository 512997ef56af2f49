"""Declaration of a graph: stages, walks, edges, chunk policies. Pure data; knows no process and no
tensor library.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.core.errors import ConfigError
from fleet.core.ids import CLIENT, EdgeName, StageName, Walk
from fleet.core.request import RequestSpec

PolicyKind = Literal["each", "ramp", "all"]
RequestInput = Literal["audio", "speech_text"]
"""Input that a request may have besides the text of its prompt: audio clips in the prompt, or a
text to speak that replaces the answer.
"""
FP8 = "fp8"
"""Precision of a stage whose model has experts: their weights are in 8-bit floating point, all else
is in bfloat16.
"""
INVARIANT_DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}
"""Precisions of invariant numerics by kind of device; the first is that of `auto`."""
SPOKEN_PROMPT: frozenset[RequestInput] = frozenset({"audio"})


def inputs_of(spec: RequestSpec) -> frozenset[RequestInput]:
    """Return the inputs of a request besides the text of its prompt."""
    given: dict[RequestInput, object] = {"audio": spec.audio, "speech_text": spec.speech_text}
    return frozenset(name for name, value in given.items() if value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    """Rule by which the producer of an edge groups items into chunks.

    `kind`: `each` (one item per chunk), `ramp` (chunk sizes from `ramp`, whose last number
    repeats), or `all` (one chunk at the end). `low_buffer_s`: seconds of audio. A ramp's chunk is
    released early, with fewer items, if waiting for the next item would leave the client less than
    this to play; 0 disables it. `busy_first_chunk_factor`: the first chunk of a ramp is multiplied
    by the number of answers in progress in the producer, up to this factor, because concurrent
    answers slow each other and playback then needs a larger start. `max_chunks_per_s`: chunks of
    this edge that a worker releases per second over all answers in progress; items in excess are
    held and share a chunk. A single answer is never limited; 0 disables the limit.
    """

    kind: PolicyKind = "each"
    ramp: tuple[int, ...] = ()
    low_buffer_s: float = 0.0
    busy_first_chunk_factor: int = 1
    max_chunks_per_s: int = 0

    def size(self, chunk_index: int, num_answers: int = 1) -> int | None:
        """Return how many items chunk `chunk_index` of an answer has while `num_answers` answers
        are in progress; None if the only chunk holds the whole output.
        """
        if self.kind == "all":
            return None
        if self.kind == "each":
            return 1
        times = max(1, min(num_answers, self.busy_first_chunk_factor)) if chunk_index == 0 else 1
        return self.ramp[min(chunk_index, len(self.ramp) - 1)] * times

    def interval_s(self, num_answers: int) -> float:
        """Return the seconds between two chunks of one answer while `num_answers` answers are in
        progress; 0 if items are released immediately.
        """
        return (num_answers - 1) / self.max_chunks_per_s if self.max_chunks_per_s else 0.0


EACH = ChunkPolicy(kind="each")
ALL = ChunkPolicy(kind="all")
ANSWER_TENSORS = {"ids": "int32", LOGPROBS: "float32", TOP_IDS: "int32"}
"""Tensors of an edge that carries answer tokens to the client."""
TOKENS = ChunkPolicy(kind="each", max_chunks_per_s=1000)
"""Policy for answer tokens sent to a client: one token per chunk at low rates; above 1000 chunks/s
per worker, tokens that arrive together share a chunk.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Rule that changes the consumer's walk: from item `nth` (counted from 0) of `producer_walk`
    on, the consumer is in walk `to`.
    """

    producer_walk: Walk
    nth: int
    to: Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A named one-way stream of chunks from the stage `source` to the stage `target`, or to the
    client.

    `tensors`: dtype of each tensor by its name. `remote`: names of the tensors that the consumer
    pulls by NIXL; all other tensors are sent inline through Redis. `never_inline`: if the arena has
    no room for a remote tensor, the request fails instead of sending the tensor inline. `credits`:
    chunks that the producer may append before the consumer acknowledges; an edge to the client is
    bounded in bytes instead (`limits.max_unread_bytes`). `item_ms`: duration of an
    item in milliseconds, for edges that carry audio. `only_with`: the edge is used only by requests
    that have this input. `replaced_by`: the edge is not used by requests that have this input.
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
    only_with: RequestInput | None = None
    replaced_by: RequestInput | None = None

    def is_used_with(self, inputs: Collection[RequestInput]) -> bool:
        """Return True if a request with these inputs may use the edge."""
        is_needed = self.only_with is None or self.only_with in inputs
        return is_needed and self.replaced_by not in inputs

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


def packaged_folder(reference: str) -> Path:
    """Return the folder that "package:folder" names, without importing the package."""
    package, _, folder = reference.partition(":")
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, (
        f"{package} is not a package"
    )
    return Path(spec.submodule_search_locations[0]) / folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Declaration of one stage of a model.

    `builder`: "module:function" that builds the stage, imported only inside its workers. `walks`:
    phases of a task. `span_builder`: "module:function" that loads some of the layers, for a stage
    whose layers can be divided among workers; `layer_counter`: "module:function" that reads the
    number of layers of a checkpoint without its weights. `span_head`: True if a span worker may
    have the output head; False if only the anchor may.

    `engines`: names of the engines that can run the stage. `default_sampling`: `Sampling` fields
    that a request may override. `main`: the stage uses the request's own temperature, stop and
    max_tokens. `settings`: keys of a deployment's `stages.NAME.extra` that the builder reads.
    `reads_prompt_audio`: workers receive the samples of the prompt with each task.
    `verifies_drafts`: the stage can verify draft tokens of its answers (engine torch only).
    `has_experts`: the model has experts whose weights the precision `FP8` rounds (engine torch
    only). `invariant_on`: kinds of devices on which numerics can be invariant. `gives_way`: kernels
    of other stages run before those of this one on a GPU that several processes share.
    `checkpoint_folder`: sub-folder of the deployment's checkpoint that has the stage's weights; ""
    if the graph's stages share one folder. `checkpoint_files`: patterns of files that a folder with
    the stage's weights must have. `checkpoint_extras`: patterns of the weight files that are not
    safetensors, relative to the folder. `shipped`: "package:folder" of checkpoints in Fleet's
    package, by the name that `stages.NAME.checkpoint` gives them.
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
    has_experts: bool = False
    invariant_on: tuple[str, ...] = ("cpu",)
    gives_way: bool = False
    engines: tuple[str, ...] = ("torch",)
    settings: tuple[str, ...] = ()
    default_sampling: dict[str, float | int] = field(default_factory=dict[str, float | int])
    checkpoint_folder: str = ""
    checkpoint_files: tuple[str, ...] = ("config.json", "*.safetensors")
    checkpoint_extras: tuple[str, ...] = ()
    shipped: Mapping[str, str] = field(default_factory=dict[str, str])

    def shipped_folder(self, name: str) -> Path | None:
        """Return the folder of a shipped checkpoint; None if none has this name."""
        found = self.shipped.get(name)
        return packaged_folder(found) if found is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Declaration of a composite model: stages connected by edges.

    `frontend`: "module:class" of the gateway's prompt processing (without torch). `tiny`:
    "module:function" that writes a small random checkpoint; `baseline`: module whose `run` measures
    the reference implementation; `full_size`: "module:function" that builds the stages at their
    published size with random weights. `shipped`: "package:folder" of a trained checkpoint in
    Fleet's package. `media`: content ("text", "audio", or "transcript" of the
    prompt's audio) of each client edge of an answer.
    `optional_stages`: stages that no answer needs, so that a deployment is ready without their
    workers.
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
        """Edges that an answer in all media uses, in declaration order. The edges of training
        requests are not among them.
        """
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
        """Return the folder of the shipped checkpoint without importing its package; None if the
        graph ships no checkpoint.
        """
        if self.shipped is None:
            return None
        return packaged_folder(self.shipped)

    def edges_from(self, stage: StageName) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == stage)

    def edges_to(self, stage: StageName) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == stage)

    @property
    def has_stage_checkpoints(self) -> bool:
        """True if at least one stage has a checkpoint folder of its own."""
        return any(stage.checkpoint_folder for stage in self.all_stages)

    def edges_for(
        self, outputs: tuple[EdgeName, ...], inputs: Collection[RequestInput] = SPOKEN_PROMPT
    ) -> tuple[Edge, ...]:
        """Return all edges that a request with `inputs` for the client edges `outputs` uses, in
        declaration order.
        """
        usable = [edge for edge in self.edges if edge.is_used_with(inputs)]
        needed: set[EdgeName] = set(outputs)
        grew = True
        while grew:
            sources = {edge.source for edge in usable if edge.name in needed}
            more = {edge.name for edge in usable if edge.target in sources}
            grew = not more <= needed
            needed |= more
        return tuple(edge for edge in usable if edge.name in needed)

    def stages_for(
        self, outputs: tuple[EdgeName, ...], inputs: Collection[RequestInput] = SPOKEN_PROMPT
    ) -> tuple[StageName, ...]:
        """Return all stages that a request with `inputs` for the client edges `outputs` uses, in
        declaration order. Called once, when a request is submitted; later, `stages_of` returns the
        stages that the request then got.
        """
        active = {edge.source for edge in self.edges_for(outputs, inputs)}
        return tuple(stage.name for stage in self.all_stages if stage.name in active)

    def stages_of(self, spec: RequestSpec) -> tuple[StageName, ...]:
        """Return the stages that a request runs, in declaration order."""
        return spec.stages or self.stages_for(spec.outputs, inputs_of(spec))

    def edges_of(self, spec: RequestSpec) -> tuple[Edge, ...]:
        """Return the edges that a request uses, in declaration order: the edges between its stages,
        and its client edges.
        """
        stages = self.stages_of(spec)
        return tuple(
            edge
            for edge in self.edges
            if edge.source in stages and (edge.target in stages or edge.name in spec.outputs)
        )
