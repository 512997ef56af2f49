"""Fixtures: a control plane on a real and on a fake Redis server, and an edge whose tensors are read by NIXL."""

import dataclasses
from collections.abc import Iterator

import fakeredis
import pytest
import redis

from fleet.control import scripts
from fleet.control.connect import connect, load_scripts, run, text
from fleet.core.ids import EdgeName, WorkerId
from fleet.core.request import RequestSpec
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.worker import sender
from tests.fundamentals.control_plane import GATEWAY, REQUEST, STAGE, TEXT, WORKER, Control


@pytest.fixture(params=["redis", "fakeredis"])
def control(request: pytest.FixtureRequest) -> Iterator[Control]:
    """A control plane on a real Redis server, and on the fake that unit tests use: both must give the same replies."""
    if request.param == "fakeredis":
        client: redis.Redis = fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(6, 2)))
        load_scripts(client)
    else:
        client = connect(request.getfixturevalue("redis_url"))
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    for worker, role in ((GATEWAY, ""), (WORKER, "lm")):
        run(client, scripts.register(worker, role, 60_000_000, {"kind": "test"}))
    spec = RequestSpec(id=REQUEST, graph="text", prompt_ids=(1,), outputs=(TEXT,))
    submit = scripts.submit(spec, None, bound=8, stages=[STAGE], edges=[TEXT], gateway=GATEWAY)
    control = Control(client, leader)
    assert control.run(submit) == "ok"
    yield control
    client.close()


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> EdgeName:
    """Name of an edge that sends all its tensors by NIXL; the fake engine produces only the first tensor."""
    monkeypatch.setattr(sender, "INLINE_BYTES", 0)
    graph = GRAPHS[DEFAULT_GRAPH]
    chosen = next(edge for edge in graph.edges if edge.remote)
    remote = dataclasses.replace(chosen, remote=tuple(chosen.tensors))
    edges = tuple(remote if edge is chosen else edge for edge in graph.edges)
    monkeypatch.setitem(GRAPHS, DEFAULT_GRAPH, dataclasses.replace(graph, edges=edges))
    return chosen.name
