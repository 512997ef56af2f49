"""The slow twin of the fleet: the same stages in one process, without Redis or transfers.

The fleet's answers are compared with the twin's answers. The twin only moves items from stage to
stage along the graph's edges.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.core.errors import FleetError
from fleet.core.ids import NO_WALK, EdgeName, RequestId, StageName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import Arrays, EngineOutput, await_ready
from fleet.graphs import ChunkPolicy, Edge, Graph
from fleet.stages.base import BuiltStage, EdgeItem, TaskAdapter

Policy = Callable[[Edge], ChunkPolicy]
AWAIT_S = 0.01
Answers = dict[RequestId, dict[EdgeName, list[Arrays]]]


def declared_policy(edge: Edge) -> ChunkPolicy:
    return edge.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinChunk:
    """A chunk that a stage of the twin released. `walk`: walk that the consumer enters with it.
    Units: `at_s` since the run began.
    """

    at_s: float
    request: RequestId
    edge: EdgeName
    walk: Walk
    arrays: Arrays
    final: bool


@dataclass(slots=True, kw_only=True)
class _Chunker:
    """Groups the items of one request on one edge into chunks by the edge's policy. A change of the
    consumer's walk ends a chunk.
    """

    edge: Edge
    policy: ChunkPolicy
    walk: Walk
    items: list[Arrays] = field(default_factory=list[Arrays])
    ordinals: dict[Walk, int] = field(default_factory=dict[Walk, int])
    num_chunks: int = 0

    def offer(self, item: EdgeItem) -> Iterator[tuple[Walk, Arrays, bool]]:
        """Add an item, and yield the chunks that it completes: (consumer's walk, arrays, whether it
        is the final chunk).
        """
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
        joined = {
            name: np.concatenate([arrays[name] for arrays in self.items if name in arrays])
            for name in names
        }
        self.items = []
        self.num_chunks += 1
        return self.walk, joined, final


@dataclass(slots=True, kw_only=True)
class _TwinRun:
    """State of one run: its open requests."""

    adapters: dict[tuple[StageName, RequestId], TaskAdapter]
    chunkers: dict[tuple[EdgeName, RequestId], _Chunker]
    open_edges: set[tuple[EdgeName, RequestId]]
    began_s: float


class SlowTwin:
    """Runs requests through all stages of a graph in this process, as the simple version with which
    the fleet's answers are compared.

    `built`: the stages. The last stages of the graph may be missing; a run then ends at their input
    edges. `errors`: errors by request, kept over all runs; a failed request does not end the
    others.
    """

    def __init__(
        self, graph: Graph, built: Mapping[StageName, BuiltStage], policy: Policy = declared_policy
    ) -> None:
        self._graph = graph
        self._built = built
        self._policy = policy
        self._run: _TwinRun | None = None
        self.errors: dict[RequestId, FleetError] = {}

    def run(
        self, specs: Sequence[RequestSpec], blobs: Mapping[RequestId, bytes] | None = None
    ) -> Answers:
        """Run every request to its end; return the chunks of each edge, without chunks that have no
        arrays. `blobs`: binary inputs such as audio, by request.
        """
        answers: Answers = {
            spec.id: {edge.name: [] for edge in self._edges(spec)} for spec in specs
        }
        for chunk in self.stream(specs, blobs):
            if chunk.arrays:
                answers[chunk.request][chunk.edge].append(chunk.arrays)
        return answers

    def stream(
        self, specs: Sequence[RequestSpec], blobs: Mapping[RequestId, bytes] | None = None
    ) -> Iterator[TwinChunk]:
        """Run every request, and yield the chunks as they are released. `blobs`: binary inputs such
        as audio, by request.
        """
        run = self._run = _TwinRun(
            adapters={}, chunkers={}, open_edges=set(), began_s=time.perf_counter()
        )
        for spec in specs:
            self._open(run, spec, (blobs or {}).get(spec.id))
        while run.open_edges:
            self.before_turn()
            for name in self._ready_stages(run):
                for output in self._built[name].engine.step():
                    yield from self._deliver(run, name, output)

    def before_turn(self) -> None:
        """Do nothing. Subclasses override this hook, which is called before the stages take each
        step.
        """

    def abort(self, request: RequestId) -> None:
        """Abort a request of the running `stream` call in every stage, and close its edges."""
        assert self._run is not None, "no stream is open"
        for stage in self._built.values():
            stage.engine.abort(request)
        self._run.open_edges = {
            (edge, other) for edge, other in self._run.open_edges if other != request
        }

    def _ready_stages(self, run: _TwinRun) -> list[StageName]:
        """Return the stages that can compute now. If no stage can, wait at most `AWAIT_S` for each
        stage whose computation is under way.

        Raises: AssertionError if edges are open and no stage can ever compute again.
        """
        ready = [name for name, stage in self._built.items() if stage.engine.is_ready()]
        waiting = [
            stage.engine for stage in self._built.values() if stage.engine.due_in_s() < math.inf
        ]
        if not ready and not waiting:
            raise AssertionError(
                f"no stage is ready, and these edges have not ended: {sorted(run.open_edges)}"
            )
        if not ready:
            for engine in waiting:
                await_ready(engine, AWAIT_S)
        return ready

    def _edges(self, spec: RequestSpec) -> list[Edge]:
        return [edge for edge in self._graph.edges_of(spec) if edge.source in self._built]

    def _open(self, run: _TwinRun, spec: RequestSpec, blob: bytes | None) -> None:
        for edge in self._edges(spec):
            first_walk = (
                self._graph.stage(edge.target).walks[0] if edge.target in self._built else NO_WALK
            )
            run.chunkers[edge.name, spec.id] = _Chunker(
                edge=edge, policy=self._policy(edge), walk=first_walk
            )
            run.open_edges.add((edge.name, spec.id))
        for name in self._graph.stages_of(spec):
            if name in self._built and spec.id not in self.errors:
                self._submit(run, name, spec, blob)

    def _submit(
        self, run: _TwinRun, name: StageName, spec: RequestSpec, blob: bytes | None
    ) -> None:
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

    def _deliver(self, run: _TwinRun, name: StageName, output: EngineOutput) -> Iterator[TwinChunk]:
        request = output.request_id
        if not any(other == request for _, other in run.open_edges):
            return
        if output.error is not None:
            self._fail(request, output.error)
            return
        adapter = run.adapters[name, request]
        if adapter.is_stopped():
            return
        for item in adapter.produce(output):
            yield from self._forward(run, request, item)
        if adapter.is_stopped():
            self._built[name].engine.finish(request)

    def _forward(self, run: _TwinRun, request: RequestId, item: EdgeItem) -> Iterator[TwinChunk]:
        chunker = run.chunkers[item.edge, request]
        for walk, arrays, final in chunker.offer(item):
            at_s = time.perf_counter() - run.began_s
            yield TwinChunk(
                at_s=at_s, request=request, edge=item.edge, walk=walk, arrays=arrays, final=final
            )
            target = chunker.edge.target
            if target in self._built:
                for piece in run.adapters[target, request].consume(
                    item.edge, walk, arrays, final=final
                ):
                    self._built[target].engine.feed(request, piece)
        if item.final:
            run.open_edges.discard((item.edge, request))
