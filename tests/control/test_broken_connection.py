"""A Redis connection that breaks during a task fails no request: the worker rejoins, and the task
is granted again.
"""

from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.config import load_config
from fleet.core.ids import EdgeName, WorkerId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.worker.process.redis_link import RedisLink
from tests.harness import answer, assert_same, fake_spec_of, open_processes
from tests.support import REPO

NIXL = ("engine=fake", "device=cpu", "lease.worker_ttl_s=60", "transfer.kind=nixl")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[WorkerId]:
    """Break the Redis connection at the first read of a peer's metadata; return a list that
    receives the id of that peer.
    """
    broken_reads, read_metadata = list[WorkerId](), RedisLink.read_peer_metadata

    def read_or_break(self: RedisLink, worker: WorkerId) -> bytes | None:
        if not broken_reads:
            broken_reads.append(worker)
            raise RedisConnectionError("the connection broke")
        return read_metadata(self, worker)

    monkeypatch.setattr(RedisLink, "read_peer_metadata", read_or_break)
    return broken_reads


async def check_worker_rejoins(
    url: str, file: Path | None, role: str, broken: list[WorkerId]
) -> None:
    config = load_config(file, NIXL)
    async with open_processes(url, config) as (workers, client):
        before = [worker.last_id for worker in workers]
        spec = fake_spec_of(config)
        expected = await answer(client, spec)
        rejoined = [
            worker.role
            for worker, last in zip(workers, before, strict=True)
            if worker.last_id != last
        ]
        assert broken and rejoined == [role], "only the worker with the broken connection rejoined"
        trace = await client.telemetry.trace(spec.id)
        assert trace is not None and not any(task.deaths for task in trace.tasks), (
            "no death is counted for the task"
        )
        assert_same(await answer(client, fake_spec_of(config)), expected)


async def test_worker_rejoins_after_its_connection_broke_while_reading_input(
    redis_url: str, pulled: EdgeName, broken: list[WorkerId]
) -> None:
    await check_worker_rejoins(redis_url, None, GRAPHS[DEFAULT_GRAPH].edge(pulled).target, broken)


async def test_worker_rejoins_after_its_connection_broke_while_importing_a_hand_off(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, broken: list[WorkerId]
) -> None:
    monkeypatch.setattr(
        "fleet.worker.loop.hand_off_coordinator.HandOffCoordinator.connect_to_sources",
        lambda *_: None,
    )  # it would read the metadata first
    await check_worker_rejoins(
        redis_url, REPO / "configs" / "thinker_pd.yaml", "thinker.decode", broken
    )
