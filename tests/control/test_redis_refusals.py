"""A Redis that refuses writes, or is a replica for a while, is treated as unreachable: workers and
conductor wait, and every answer is complete.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis
from redis.exceptions import RedisError

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.control.outage import is_away, refuses_writes
from tests.disturbances import check_answers, config_in_step, on_chunk
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec_of,
    open_processes,
)
from tests.support import RedisProcess, await_until, wait_until

pytestmark = pytest.mark.one_file_in(3, "control with many processes")


class RedisFault(ABC):
    """A fault of a running Redis that makes it refuse writes: `begin` causes it, `end` repairs it.
    `folder`: data folder of the server.
    """

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        self.client, self.folder = client, folder

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...


class FullMemory(RedisFault):
    def begin(self) -> None:
        self.client.config_set("maxmemory", 1)

    def end(self) -> None:
        self.client.config_set("maxmemory", 0)


class MissingReplicas(RedisFault):
    def begin(self) -> None:
        self.client.config_set("min-replicas-to-write", 1)

    def end(self) -> None:
        self.client.config_set("min-replicas-to-write", 0)


class FailedSave(RedisFault):
    """Fault: saving fails, as on a full disk, because a directory is in the place of the
    snapshot.
    """

    def begin(self) -> None:
        self.client.config_set("save", "3600 1000000")
        place = self.folder / "dump.rdb"
        place.mkdir()
        (place / "file").touch()
        self.client.bgsave()
        wait_until(
            lambda: self.client.info("persistence")["rdb_last_bgsave_status"] == "err",
            "the save to fail",
        )

    def end(self) -> None:
        self.client.config_set("save", "")


class Demoted(RedisFault):
    """Fault: the server becomes a replica of a primary that does not answer."""

    def begin(self) -> None:
        self.client.execute_command("REPLICAOF", "127.0.0.1", "1")

    def end(self) -> None:
        self.client.execute_command("REPLICAOF", "NO", "ONE")


REFUSALS = (FullMemory, MissingReplicas, FailedSave)


@pytest.fixture
def admin(server: RedisProcess) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client


@pytest.mark.parametrize("kind", [*REFUSALS, Demoted])
def test_refused_write_is_an_outage_inside_and_outside_of_scripts(
    admin: redis.Redis, tmp_path: Path, kind: type[RedisFault]
) -> None:
    refusal = kind(admin, tmp_path)
    refusal.begin()
    for write in (
        lambda: admin.set("fleet:any", 1),
        lambda: admin.eval("return redis.call('SET', 'fleet:any', 1)", 0),
    ):
        with pytest.raises(RedisError) as refused:
            write()
        assert is_away(refused.value), refused.value
        assert refuses_writes(refused.value) == (kind is not Demoted)
    refusal.end()


@pytest.mark.parametrize("kind", REFUSALS)
async def test_workers_keep_their_incarnation_while_redis_refuses_writes(
    server: RedisProcess, admin: redis.Redis, tmp_path: Path, kind: type[RedisFault]
) -> None:
    """Workers keep their incarnation while Redis refuses writes. The refusals begin in mid-answer
    and leases lapse meanwhile; the answer equals an undisturbed one.
    """
    config, refusal = config_in_step(), kind(admin, tmp_path)
    async with open_processes(server.url, config) as (workers, client):
        expected = await answer(client, fake_spec_of(config))
        before = [worker.last_id for worker in workers]
        begun = asyncio.Event()

        def refuse() -> None:
            refusal.begin()
            loop.call_soon_threadsafe(begun.set)

        async def is_refused() -> bool:
            return any(worker.outage.cause for worker in workers)

        async def has_renewed_or_lapsed() -> bool:
            return (
                lease_deadline(admin) > deadline
                if kind is FullMemory
                else lease_deadline(admin) < time_us(admin)
            )

        loop = asyncio.get_running_loop()
        received = asyncio.create_task(
            answer_disturbed(client, fake_spec_of(config), None, on_chunk("text", 8, refuse))
        )
        await begun.wait()
        await await_until(is_refused, "a worker to be refused")
        deadline = lease_deadline(admin)
        await await_until(
            has_renewed_or_lapsed, "the leases to be renewed with a full memory, else to lapse"
        )
        refusal.end()
        assert_same(await asyncio.wait_for(received, 60), expected)
        assert [worker.last_id for worker in workers] == before, "no worker joined again"


async def test_each_worker_joins_again_once_after_its_redis_was_a_replica(
    server: RedisProcess, admin: redis.Redis, tmp_path: Path
) -> None:
    """Every worker joins again, once, after its Redis was a replica for a while: like a restarted
    primary, it may lack the last writes.
    """
    config, demotion = config_in_step(), Demoted(admin, tmp_path)
    async with open_processes(server.url, config) as (workers, client):
        before = [worker.last_id for worker in workers]

        def is_demoted_everywhere() -> bool:
            return all(worker.outage.cause for worker in workers)

        def demote() -> None:
            demotion.begin()
            wait_until(is_demoted_everywhere, "every worker to notice")
            wait_until(lambda: lease_deadline(admin) < time_us(admin), "the leases to lapse")
            demotion.end()

        await check_answers(client, config, demote, at=8, num=1)
        ended = {text(name) for name in cast("list[bytes]", admin.zrange(keys.GONE, 0, -1))}
        assert ended.issuperset(name for name in before if name), "the former incarnations are over"
        assert len([name for name in ended if not name.startswith("gateway")]) == len(workers), (
            "and no other one began"
        )


def time_us(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return seconds * 1_000_000 + micros


def lease_deadline(client: redis.Redis) -> float:
    """Return the earliest deadline of all leases, in us of Redis's clock."""
    first = cast("list[tuple[bytes, float]]", client.zrange(keys.WORKERS, 0, 0, withscores=True))
    return first[0][1]
