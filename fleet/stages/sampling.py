"""A stage's sampling as the request has it, else as the graph's defaults have it."""

import msgspec

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import Graph

GREEDY_BELOW = 1e-4
"""A temperature this small picks the highest logit anyway, and dividing float32 logits by much less overflows."""


def sampling_of(spec: RequestSpec, graph: Graph, stage: StageName) -> Sampling:
    given = spec.sampling.get(stage)
    if given is None:
        given = msgspec.convert(graph.stage(stage).default_sampling, Sampling)
    return given if given.temperature >= GREEDY_BELOW else msgspec.structs.replace(given, temperature=0.0)
