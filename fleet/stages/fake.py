"""Adapters for the fake engine on any graph: every edge carries numbers made from the numbers before. No weights.

No history either: equal inputs give equal rows, so what was made before is simply made again.
"""

from collections.abc import Sequence

import numpy as np

from fleet.core.ids import EdgeName, Walk
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import Arrays, EngineInput, EngineOutput, EngineRequest
from fleet.engine.fake import FakeEngine
from fleet.graphs import Edge, Graph
from fleet.stages.base import NOTHING_MADE, BuildOptions, BuiltStage, Item, Made

SAMPLES_PER_ROW = 1920


class FakeTask:
    """Source stages read the prompt; the others what their input edges bring. Every output row becomes an item on each edge."""

    def __init__(self, spec: RequestSpec, graph: Graph, options: BuildOptions) -> None:
        self._spec, self._stage = spec, options.stage
        self._outputs = [edge for edge in graph.edges_for(spec.outputs) if edge.source == options.stage]
        self._is_source = not graph.edges_to(options.stage)

    def open(self, made: Made = NOTHING_MADE) -> tuple[EngineRequest, Sequence[EngineInput]]:
        sampling = self._spec.sampling.get(self._stage, Sampling())
        request = EngineRequest(request_id=self._spec.id, sampling=sampling)
        if not self._is_source:
            return request, ()
        prompt = np.asarray(self._spec.prompt_ids, dtype=np.int32)
        return request, (EngineInput(walk=Walk("prefill"), arrays={"ids": prompt}, final=True),)

    def consume(self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool) -> Sequence[EngineInput]:
        return (EngineInput(walk=walk, arrays=arrays, final=final),)

    def produce(self, output: EngineOutput) -> Sequence[Item]:
        rows = output.arrays["out"]
        items: list[Item] = []
        for edge in self._outputs:
            pieces = [self._arrays(edge, rows[i : i + 1]) for i in range(len(rows))] or [{}]
            for position, arrays in enumerate(pieces):
                last = output.final and position == len(pieces) - 1
                if arrays or last:
                    items.append(Item(edge=edge.name, walk=output.walk, arrays=arrays, final=last))
        return items

    def _arrays(self, edge: Edge, row: np.ndarray) -> Arrays:
        name, dtype = next(iter(edge.tensors.items()))
        if name == "pcm":
            return {name: np.resize(row.astype(np.int16).ravel(), SAMPLES_PER_ROW)}
        return {name: row.astype(dtype) if row.shape[1] > 1 else row[:, 0].astype(dtype)}

    def stopped(self) -> bool:
        return False


def build(options: BuildOptions, graph: Graph) -> BuiltStage:
    """One stage of `graph` on the fake engine: autoregressive unless its first input edge has a ramp (a codec)."""
    inputs = graph.edges_to(options.stage)
    codec = any(edge.policy.kind == "ramp" for edge in inputs)
    width = 1 if not inputs or codec else 16
    engine = FakeEngine(max_batch=options.max_batch, width=width, autoregressive=not codec, source=not inputs)
    return BuiltStage(engine=engine, adapter=lambda spec, _blob: FakeTask(spec, graph, options))
