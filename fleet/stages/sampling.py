"""Sampling parameters of a stage: the request's, else the graph's defaults."""

import msgspec

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import Graph

GREEDY_BELOW = 1e-4
"""Temperature below which decoding is greedy. Lower temperatures pick the highest logit anyway, and
dividing float32 logits by a tiny number overflows.
"""


def sampling_of(spec: RequestSpec, graph: Graph, stage: StageName) -> Sampling:
    sampling = spec.sampling.get(stage)
    if sampling is None:
        sampling = msgspec.convert(graph.stage(stage).default_sampling, Sampling)
    return (
        sampling
        if sampling.temperature >= GREEDY_BELOW
        else msgspec.structs.replace(sampling, temperature=0.0)
    )
