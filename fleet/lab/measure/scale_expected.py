"""Expected content of the scale benchmark's streams, computed by the same stages in one process.
Uses no Redis.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from fleet.config import FleetConfig
from fleet.core.ids import EdgeName, RequestId
from fleet.core.request import RequestSpec
from fleet.lab.measure.twin import SlowTwin

Content = dict[EdgeName, bytes]


def expected_content(config: FleetConfig, specs: Iterable[RequestSpec]) -> dict[RequestId, Content]:
    """Return a digest of each client edge of each request. The engines of `config` must be set to
    take no time for a step.
    """
    from fleet.worker.main import build_stage

    graph = config.graph_declaration()
    built = {stage.name: build_stage(config, stage.name, Path()) for stage in graph.stages}
    twin = SlowTwin(graph, built, config.policy_of)
    return {spec.id: _digests(twin, spec) for spec in specs}


def _digests(twin: SlowTwin, spec: RequestSpec) -> Content:
    digests = {edge: hashlib.blake2b() for edge in spec.outputs}
    for chunk in twin.stream([spec]):
        if chunk.edge in digests:
            for array in chunk.arrays.values():
                digests[chunk.edge].update(array.tobytes())
    return {edge: digest.digest() for edge, digest in digests.items()}
