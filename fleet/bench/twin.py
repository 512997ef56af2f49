"""The slow twin of the fleet: the same stages driven directly in one process, interleaved by hand, without Redis or transfers.

What the fleet delivers is compared with this. It moves items from stage to stage as the graph says, and nothing else.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.core.errors import FleetError
from fleet.core.ids import EdgeName, RequestId, StageName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import Arrays, EngineOutput
from fleet.graphs import ChunkPolicy, Edge, Graph
from fleet.stages.base import BuiltStage, EdgeItem, TaskAdapter

Policy = Callable[[Edge], ChunkPolicy]
Answers = dict[RequestId, dict[EdgeName, list[Arrays]]]


def declared_policy(edge: Edge) -> ChunkPolicy:
    return edge.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A chunk as it was made. Units: `at_s` since the run began."""

    at_s: float
    request: RequestId
    edge: EdgeName
    arrays: Arrays
    final: bool


@dataclass(slots=True, kw_only=True)
class _Chunker:
    """One edge of one request: groups items by policy, never across a change of the consumer's walk."""

    edge: Edge
    policy: ChunkPolicy
    walk: Walk
    items: list[Arrays] = field(default_factory=list[Arrays])
    ordinals: dict[Walk, int] = field(default_factory=dict[Walk, int])
    num_chunks: int = 0

    def offer(self, item: EdgeItem) -> Iterator[tuple[Walk, Arrays, bool]]:
        """Chunks that the item releases: (consumer's walk, arrays, final)."""
        if item.arrays:
            ordinal = self.ordinals.get(item.walk, 0)
            self.ordinals[item.walk] = ordinal + 1
            walk = self.edge.consumer_walk(item.walk, ordinal) or self.walk
            if walk != self.walk and self.items:
                yield self._release(final=False)
            self.walk = walk
            self.items.append(item.arrays)
        size = self.policy.size(self.num_chunks)
        if item.final or (self.items and size is not None and len(self.items) >= size):
            yield self._release(final=item.final)

    def _release(self, *, final: bool) -> tuple[Walk, Arrays, bool]:
        names = sorted({name for arrays in self.items for name in arrays})
        joined = {name: np.concatenate([arrays[name] for arrays in self.items if name in arrays]) for name in names}
        self.items = []
        self.num_chunks += 1
        return self.walk, joined, final


@dataclass(slots=True, kw_only=True)
class _Run:
    """The requests under way."""

    adapters: dict[tuple[StageName, RequestId], TaskAdapter]
    chunkers: dict[tuple[EdgeName, RequestId], _Chunker]
    open_edges: set[tuple[EdgeName, RequestId]]
    began_s: float


class SlowTwin:
    """`built` may lack the last stages of the graph: their input edges then end here.

    `errors` holds what ended a request early; its other requests go on.
    """

    def __init__(self, graph: Graph, built: Mapping[StageName, BuiltStage], policy: Policy = declared_policy) -> None:
        self._graph, self._built, self._policy = graph, built, policy
        self._run: _Run | None = None
        self.errors: dict[RequestId, FleetError] = {}

    def run(self, specs: Sequence[RequestSpec], blobs: Mapping[RequestId, bytes] | None = None) -> Answers:
        """Every request to its end: what each edge carried, chunk by chunk (chunks without arrays left out)."""
        answers: Answers = {spec.id: {edge.name: [] for edge in self._edges(spec)} for spec in specs}
        for made in self.stream(specs, blobs):
            if made.arrays:
                answers[made.request][made.edge].append(made.arrays)
        return answers

    def stream(self, specs: Sequence[RequestSpec], blobs: Mapping[RequestId, bytes] | None = None) -> Iterator[Made]:
        """The same, chunk by chunk as they are made."""
        run = self._run = _Run(adapters={}, chunkers={}, open_edges=set(), began_s=time.perf_counter())
        for spec in specs:
            self._open(run, spec, (blobs or {}).get(spec.id))
        while run.open_edges:
            ready = [name for name, stage in self._built.items() if stage.engine.is_ready()]
            if not ready:
                raise AssertionError(f"no stage can step, and these edges have not ended: {sorted(run.open_edges)}")
            for name in ready:
                for output in self._built[name].engine.step():
                    yield from self._deliver(run, name, output)

    def abort(self, request: RequestId) -> None:
        """Drop a request of the stream under way everywhere."""
        assert self._run is not None, "nothing runs"
        for stage in self._built.values():
            stage.engine.abort(request)
        self._run.open_edges = {(edge, other) for edge, other in self._run.open_edges if other != request}

    def _edges(self, spec: RequestSpec) -> list[Edge]:
        return [edge for edge in self._graph.edges_for(spec.outputs) if edge.source in self._built]

    def _open(self, run: _Run, spec: RequestSpec, blob: bytes | None) -> None:
        for edge in self._edges(spec):
            first_walk = self._graph.stage(edge.target).walks[0] if edge.target in self._built else Walk("")
            run.chunkers[edge.name, spec.id] = _Chunker(edge=edge, policy=self._policy(edge), walk=first_walk)
            run.open_edges.add((edge.name, spec.id))
        for name in self._graph.stages_for(spec.outputs):
            if name in self._built and spec.id not in self.errors:
                self._submit(run, name, spec, blob)

    def _submit(self, run: _Run, name: StageName, spec: RequestSpec, blob: bytes | None) -> None:
        stage = self._built[name]
        try:
            adapter = run.adapters[name, spec.id] = stage.adapter(spec, blob)
            request, pieces = adapter.open()
            stage.engine.submit(request)
        except FleetError as error:
            self._fail(spec.id, error)
            return
        for piece in pieces:
            stage.engine.feed(spec.id, piece)

    def _fail(self, request: RequestId, error: FleetError) -> None:
        self.errors.setdefault(request, error)
        self.abort(request)

    def _deliver(self, run: _Run, name: StageName, output: EngineOutput) -> Iterator[Made]:
        request = output.request_id
        if not any(other == request for _, other in run.open_edges):
            return
        if output.error is not None:
            self._fail(request, output.error)
            return
        adapter = run.adapters[name, request]
        for item in adapter.produce(output):
            yield from self._pass_on(run, request, item)
        if adapter.is_stopped():
            self._built[name].engine.finish(request)

    def _pass_on(self, run: _Run, request: RequestId, item: EdgeItem) -> Iterator[Made]:
        chunker = run.chunkers[item.edge, request]
        for walk, arrays, final in chunker.offer(item):
            at_s = time.perf_counter() - run.began_s
            yield Made(at_s=at_s, request=request, edge=item.edge, arrays=arrays, final=final)
            target = chunker.edge.target
            if target in self._built:
                for piece in run.adapters[target, request].consume(item.edge, walk, arrays, final=final):
                    self._built[target].engine.feed(request, piece)
        if item.final:
            run.open_edges.discard((item.edge, request))
