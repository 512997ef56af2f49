"""Fixtures: a control plane on a real and on a fake Redis server, and an edge whose tensors are
read by NIXL.
"""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import fakeredis
import pytest
import redis

from fleet.config import load_config
from fleet.control import scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, load_scripts, run, text
from fleet.core.ids import EdgeName, WorkerId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.worker.task import sender
from tests.fundamentals.control_plane import GATEWAY, REQUEST, WORKER, Control
from tests.support import RedisProcess, server_binaries


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames and not metafunc.config.getoption("--redis-server"):
        metafunc.parametrize(
            "server", server_binaries(), indirect=True, ids=lambda binary: binary.name
        )


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisProcess]:
    """A server for this test alone: the newest and the oldest kind, or as `--redis-server` says.
    Its data is in `tmp_path`.
    """
    process = RedisProcess(tmp_path, getattr(request, "param", None))
    process.start()
    yield process
    process.stop()


@pytest.fixture
async def gateway_client(redis_url: str, tmp_path: Path) -> AsyncIterator[FleetClient]:
    """A client of Redis as a gateway has it; no gateway is registered."""
    client = await FleetClient.connect(
        redis_url, load_config(None, ("engine=fake", f"data_dir={tmp_path}"))
    )
    yield client
    await client.stop()


@pytest.fixture(params=["redis", "fakeredis"])
def control(request: pytest.FixtureRequest) -> Iterator[Control]:
    """A control plane on a real Redis server, and on the fake that unit tests use: both must give
    the same replies.
    """
    if request.param == "fakeredis":
        client: redis.Redis = fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(6, 2)))
        load_scripts(client)
    else:
        client = connect(request.getfixturevalue("redis_url"))
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    control = Control(client, leader)
    control.register(GATEWAY, "")
    control.register(WORKER)
    assert control.submit(REQUEST)[0] == "ok"
    yield control
    client.close()


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> EdgeName:
    """Name of an edge that sends all its tensors by NIXL; the fake engine produces only the first
    tensor.
    """
    monkeypatch.setattr(sender, "INLINE_BYTES", 0)
    graph = GRAPHS[DEFAULT_GRAPH]
    chosen = next(edge for edge in graph.edges if edge.remote)
    remote = dataclasses.replace(chosen, remote=tuple(chosen.tensors))
    edges = tuple(remote if edge is chosen else edge for edge in graph.edges)
    monkeypatch.setitem(GRAPHS, DEFAULT_GRAPH, dataclasses.replace(graph, edges=edges))
    return chosen.name
