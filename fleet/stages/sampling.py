"""A stage's sampling as the request has it, else as the graph's defaults have it."""

import msgspec

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import Graph


def sampling_of(spec: RequestSpec, graph: Graph, stage: StageName) -> Sampling:
    given = spec.sampling.get(stage)
    return given if given is not None else msgspec.convert(graph.stage(stage).default_sampling, Sampling)
