"""With `redis.wait_replicas`, a request is admitted only once it is on a replica, so that a
failover does not lose it.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from fleet.config import load_config
from fleet.control import keys
from fleet.control.server_checks import check_server
from fleet.core.errors import NotReplicated
from tests.harness import answer, fake_spec, open_fleet
from tests.support import RedisProcess, freeze_process, wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

WAITING = ("redis.wait_replicas=1", "redis.wait_timeout_ms=300")


@pytest.fixture
def primary(server: RedisProcess) -> RedisProcess:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("repl-diskless-sync-delay", 0)
    return server


@pytest.fixture
def replica(primary: RedisProcess, tmp_path: Path) -> Iterator[RedisProcess]:
    folder = tmp_path / "replica"
    folder.mkdir()
    replica = RedisProcess(folder)
    replica.start()
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", str(primary.port))
        wait_until(
            lambda: client.info("replication")["master_link_status"] == "up",
            "the replica to follow",
            timeout_s=60,
        )
    with redis.Redis.from_url(primary.url) as client:
        client.set(keys.NONE, 1)
        # The primary counts a replica once it has acknowledged, which some versions do a second
        # after the link is up.
        wait_until(lambda: client.wait(1, 1000) == 1, "the replica to acknowledge", timeout_s=60)
        client.delete(keys.NONE)
    yield replica
    os.kill(replica.pid, signal.SIGCONT)
    replica.kill()


async def test_admitted_request_is_on_the_replica(
    primary: RedisProcess, replica: RedisProcess
) -> None:
    async with open_fleet(primary.url, *WAITING) as (fleet, client):
        spec = fake_spec(fleet)
        stream = await client.requests.submit(spec, None)
        with redis.Redis.from_url(replica.url) as follower:
            assert follower.hget(keys.request(spec.id), "spec") is not None
        await stream.discard_rest(None)
        assert set(await answer(client, fake_spec(fleet))) == set(spec.outputs)


async def test_request_that_a_paused_replica_does_not_have_is_aborted_and_refused(
    primary: RedisProcess, replica: RedisProcess
) -> None:
    async with open_fleet(primary.url, *WAITING) as (fleet, client):
        freeze_process(replica.pid)
        spec = fake_spec(fleet)
        with pytest.raises(
            NotReplicated, match=r"redis\.wait_timeout_ms \(300\).*redis\.wait_replicas is 1"
        ) as refused:
            await client.requests.submit(spec, None)
        assert refused.value.retryable and refused.value.retry_after_s > 0
        with redis.Redis.from_url(primary.url, decode_responses=True) as reader:
            assert reader.hget(keys.request(spec.id), "state") == "aborted"
            assert not reader.sismember(keys.LIVE, spec.id)
        assert client.requests.num_held == 0
        os.kill(replica.pid, signal.SIGCONT)
        with redis.Redis.from_url(replica.url) as follower:
            wait_until(
                lambda: follower.hget(keys.request(spec.id), "state") == b"aborted",
                "the replica to follow again",
            )
        assert set(await answer(client, fake_spec(fleet))) == set(spec.outputs)


async def test_request_waits_for_a_replica_also_after_redis_lost_its_scripts(
    primary: RedisProcess, replica: RedisProcess
) -> None:
    async with open_fleet(primary.url, *WAITING) as (fleet, client):
        with redis.Redis.from_url(primary.url) as admin:
            admin.script_flush()
        spec = fake_spec(fleet)
        await client.requests.submit(spec, None)
        with redis.Redis.from_url(replica.url) as follower:
            assert follower.hget(keys.request(spec.id), "spec") is not None


def test_doctor_refuses_fewer_replicas_than_requests_wait_for(primary: RedisProcess) -> None:
    found = {
        finding.subject: finding
        for finding in check_server(primary.url, load_config(None, WAITING))
    }
    assert (
        found["Redis replicas"].refused
        and "redis.wait_replicas is 1, and 0 replicas follow" in found["Redis replicas"].text
    )
