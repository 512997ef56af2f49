"""Redis failover by Sentinel: the fleet finds the promoted replica, and every answer is
complete.
"""

import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import redis

from fleet.control.connect import connect, connect_async
from fleet.core.errors import ConfigError, RedisUnreachable
from tests.disturbances import check_admitted, check_answers, config_in_step
from tests.harness import (
    open_processes,
)
from tests.support import (
    RedisProcess,
    await_until,
    default_server,
    free_port,
    redis_answers,
    wait_until,
)

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

SERVICE = "voices"


@contextmanager
def sentinel_of(folder: Path, port: int) -> Generator[str]:
    """Run a sentinel that watches the primary on `port`; return the URL of the Sentinel service."""
    own_port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {own_port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {SERVICE} 127.0.0.1 "
        f"{port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 1000\nsentinel failover-timeout {SERVICE} "
        "2000\n"
    )
    process = subprocess.Popen(
        [str(default_server()), str(config), "--sentinel"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: redis_answers(f"redis://127.0.0.1:{own_port}"),
            f"a sentinel on port {own_port}",
            timeout_s=20,
        )
        # The first address is of no sentinel: the next one is asked.
        yield f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{own_port}/{SERVICE}"
    finally:
        process.kill()
        process.wait(timeout=20)


@dataclass(frozen=True, slots=True)
class Servers:
    """A Redis primary, its replica, and a sentinel that knows both."""

    primary: RedisProcess
    replica: RedisProcess
    url: str

    def fail_over(self) -> None:
        """Kill the primary, and wait until the replica is the primary. The last writes may be
        lost.
        """
        self.primary.kill()
        wait_until(lambda: is_primary(self.replica), "the promotion of the replica", timeout_s=60)


def is_primary(server: RedisProcess) -> bool:
    """Return True if `server` has been promoted to primary. While Sentinel promotes a replica, it
    closes the replica's connections; then the answer is False.
    """
    with redis.Redis.from_url(server.url) as client:
        try:
            return cast("dict[str, object]", client.info("replication"))["role"] == "master"
        except redis.ConnectionError:
            return False


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    folders = [tmp_path / name for name in ("primary", "replica", "sentinel")]
    for folder in folders:
        folder.mkdir()
    primary, replica = RedisProcess(folders[0]), RedisProcess(folders[1])
    primary.start()
    replica.start()
    with redis.Redis.from_url(primary.url) as client:
        client.config_set("repl-diskless-sync-delay", 0)
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", str(primary.port))
        wait_until(
            lambda: client.info("replication")["master_link_status"] == "up",
            "the replica to follow",
            timeout_s=60,
        )
    with sentinel_of(folders[2], primary.port) as url:
        with redis.Redis(port=int(url.rpartition(":")[2].partition("/")[0])) as sentinel:
            wait_until(
                lambda: sentinel.sentinel_slaves(SERVICE),
                "the sentinel to know the replica",
                timeout_s=60,
            )
        yield Servers(primary, replica, url)
    # A replica that still writes its first append-only file ignores SIGTERM.
    primary.kill()
    replica.kill()


async def test_answer_continues_on_the_promoted_replica(servers: Servers) -> None:
    config = config_in_step()
    async with open_processes(servers.url, config) as (_, client):
        expected = await check_answers(client, config, servers.fail_over, at=12, num=3)
        await check_admitted(client, config, expected)


async def test_connections_of_both_kinds_reach_the_primary(servers: Servers) -> None:
    with connect(servers.url) as client, connect(servers.url, one_connection=True) as single:
        asynchronous = connect_async(servers.url)
        before = {
            port_of(client.info("server")),
            port_of(single.info("server")),
            port_of(await asynchronous.info("server")),
        }
        servers.fail_over()
        for each in (client, single):
            wait_until(
                partial(is_at, each, servers.replica),
                "the promoted replica to answer",
                timeout_s=20,
            )

        async def asynchronous_is_there() -> bool:
            try:
                return port_of(await asynchronous.info("server")) == servers.replica.port
            except redis.ConnectionError:
                return False

        await await_until(asynchronous_is_there, "the promoted replica to answer", timeout_s=20)
        assert before == {servers.primary.port}
        await asynchronous.aclose()


def port_of(info: object) -> int:
    return cast("dict[str, int]", info)["tcp_port"]


def is_at(client: redis.Redis, server: RedisProcess) -> bool:
    try:
        return port_of(client.info("server")) == server.port
    except redis.ConnectionError:
        return False


def test_service_that_no_sentinel_knows_is_named(servers: Servers) -> None:
    with pytest.raises(
        RedisUnreachable,
        match=r"no Redis answers at .*/other \(no sentinel .* primary of 'other'\)",
    ):
        connect(servers.url.replace(SERVICE, "other"), patience_s=0)


def test_sentinels_that_do_not_answer_are_named() -> None:
    with pytest.raises(
        RedisUnreachable, match=r"no Redis answers at redis\+sentinel://127\.0\.0\.1:1/voices"
    ):
        connect("redis+sentinel://127.0.0.1:1/voices", patience_s=0)


def test_unreadable_options_of_a_sentinel_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="REDIS_URL: its options cannot be read"):
        connect("redis+sentinel://127.0.0.1:1/voices?socket_timeout=abc", patience_s=0)
