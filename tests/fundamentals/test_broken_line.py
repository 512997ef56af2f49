"""A line to Redis that breaks amid one request's work is no failure of the request: the worker joins anew, and it goes on."""

from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.config import load_config
from fleet.control import keys
from fleet.control.connect import connect
from fleet.core.ids import EdgeName, WorkerId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.worker.redis_link import RedisLink
from tests.harness import answer, assert_same, fake_spec_of, gateway_at, processes, ready
from tests.support import REPO

NIXL = ("engine=fake", "device=cpu", "lease.worker_ttl_s=60", "transfer.kind=nixl")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[WorkerId]:
    """The first look of all at where a peer's memory lies finds the connection broken; whose memory it was."""
    struck, look = list[WorkerId](), RedisLink.read_peer_metadata

    def breaks(self: RedisLink, worker: WorkerId) -> bytes | None:
        if not struck:
            struck.append(worker)
            raise RedisConnectionError("the connection broke")
        return look(self, worker)

    monkeypatch.setattr(RedisLink, "read_peer_metadata", breaks)
    return struck


async def goes_on_in_another_incarnation(url: str, file: Path | None, role: str, broken: list[WorkerId]) -> None:
    config = load_config(file, NIXL)
    with processes(url, config) as workers, connect(url) as client:
        async with gateway_at(url, config) as asking:
            await ready(asking)
            before = [worker.last_id for worker in workers]
            spec = fake_spec_of(config)
            heard = await answer(asking, spec)
            joined = [worker.role for worker, last in zip(workers, before, strict=True) if worker.last_id != last]
            assert broken and joined == [role], "it joined anew, and nobody else"
            stages = config.graph_declaration().stages
            assert not any(client.hget(keys.task(spec.id, stage.name), "deaths") for stage in stages), "nobody died over it"
            assert_same(await answer(asking, fake_spec_of(config)), heard)


async def test_while_its_input_is_read(redis_url: str, pulled: EdgeName, broken: list[WorkerId]) -> None:
    await goes_on_in_another_incarnation(redis_url, None, GRAPHS[DEFAULT_GRAPH].edge(pulled).target, broken)


async def test_while_it_is_taken_over(redis_url: str, monkeypatch: pytest.MonkeyPatch, broken: list[WorkerId]) -> None:
    monkeypatch.setattr(
        "fleet.worker.hand_off_coordinator.HandOffCoordinator.connect_to_sources", lambda *_: None
    )  # it would be the first to look
    await goes_on_in_another_incarnation(redis_url, REPO / "configs" / "thinker_pd.yaml", "thinker.decode", broken)
