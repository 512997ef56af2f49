"""A fleet whose keys are in a Redis cluster: processes find the server of their keys, and follow
the keys when another server takes over.
"""

import socket
import subprocess
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import redis
from redis.crc import key_slot

from fleet.config import load_config
from fleet.control import keys
from fleet.control.connect import connect, connect_async
from fleet.control.job_client import JobClient
from fleet.control.server_checks import check_server
from fleet.core.errors import ConfigError, Conflict, RedisUnreachable
from tests.disturbances import check_admitted, check_answers, config_in_step
from tests.harness import (
    open_processes,
)
from tests.support import await_until, default_server, free_port, redis_answers, run_cli, wait_until

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

NUM_SLOTS = 16384
SLOT = key_slot(keys.NONE.encode())
BUS_OFFSET = 10_000
"""Difference between a cluster node's client port and its cluster bus port, on which it listens
too.
"""


def free_node_port() -> int:
    for port in filter(lambda port: port + BUS_OFFSET <= 0xFFFF, iter(free_port, 0)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port + BUS_OFFSET)):
            return port
    raise AssertionError("unreachable: the ports do not end")


class Node:
    """A Redis server with cluster mode enabled, on a free port."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port = free_node_port()
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": folder,
            "save": "",
            "appendonly": "yes",
            "cluster-enabled": "yes",
            "cluster-node-timeout": 1000,
            "repl-diskless-sync-delay": 0,
            "cluster-replica-validity-factor": 0,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [str(default_server()), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(
            lambda: redis_answers(f"redis://127.0.0.1:{self.port}"),
            f"a node on port {self.port}",
            timeout_s=20,
        )
        self.client = redis.Redis(port=self.port)
        self.id = str(self.call("MYID").decode())

    def call(self, *words: str | int) -> bytes:
        return cast(bytes, self.client.execute_command("CLUSTER", *words))

    def owns_the_slot(self) -> bool:
        """Return True if this node accepts writes of the fleet's keys."""
        try:
            return bool(self.client.set(keys.NONE, 1, nx=True)) and bool(
                self.client.delete(keys.NONE)
            )
        except redis.RedisError:
            return False

    def state(self) -> str:
        return dict(line.split(":") for line in self.call("INFO").decode().split())["cluster_state"]

    def kill(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait(timeout=20)


class Cluster:
    """A Redis cluster of three nodes with a third of the slots each, and a replica of the node that
    owns the fleet's keys.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes, primaries, self.replica = nodes, nodes[:3], nodes[3]
        bounds = [number * NUM_SLOTS // 3 for number in range(4)]
        for node, first, end in zip(primaries, bounds, bounds[1:], strict=False):
            node.call("ADDSLOTS", *range(first, end))
            if first <= SLOT < end:
                self.owner = node
        self.others = [node for node in primaries if node is not self.owner]
        for number, node in enumerate(self.nodes):
            node.call("SET-CONFIG-EPOCH", number + 1)
            node.call("MEET", "127.0.0.1", self.nodes[0].port)
        wait_until(self._is_complete, "the nodes to know each other", timeout_s=30)
        self.replica.call("REPLICATE", self.owner.id)
        wait_until(self._has_replica, "the replica to follow", timeout_s=60)
        # An address need not name the owner; the first node of this one does not exist.
        known = ",".join(f"127.0.0.1:{node.port}" for node in self.others)
        self.url = f"redis+cluster://127.0.0.1:{free_port()},{known}"

    def _is_complete(self) -> bool:
        return all(
            node.state() == "ok" and len(node.call("NODES").split(b"\n")) == 5
            for node in self.nodes
        )

    def _has_replica(self) -> bool:
        """Return True if the replica follows its primary and all nodes know it; otherwise they
        would refuse to vote for its promotion.
        """
        info = cast("dict[str, object]", self.replica.client.info("replication"))
        known = [node.call("NODES").decode().splitlines() for node in self.nodes]
        lines = [line for each in known for line in each if line.startswith(self.replica.id)]
        return (
            info["role"] == "slave"
            and info["master_link_status"] == "up"
            and all("slave" in line for line in lines)
        )

    def fail_over(self) -> None:
        """Kill the node that owns the fleet's keys, and wait until its replica owns them. The last
        writes may be lost.
        """
        self.owner.kill()
        wait_until(self.replica.owns_the_slot, "the promotion of the replica", timeout_s=60)

    def hand_over(self) -> None:
        """Let the replica take the slots from the owner, which stays alive as its replica. Nothing
        is lost.
        """
        self.replica.call("FAILOVER")
        wait_until(self.replica.owns_the_slot, "the promotion of the replica", timeout_s=60)


@contextmanager
def open_cluster(folder: Path) -> Generator[Cluster]:
    with ExitStack() as stack:
        nodes: list[Node] = []
        for number in range(4):
            nodes.append(Node(folder / str(number)))
            stack.callback(nodes[-1].kill)
        yield Cluster(nodes)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def steady_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Redis cluster for tests that only read."""
    with open_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.mark.parametrize("kind", ["killed", "demoted"])
async def test_answer_continues_on_the_server_that_takes_the_slot(
    cluster: Cluster, kind: str
) -> None:
    config, disturb = config_in_step(), cluster.fail_over if kind == "killed" else cluster.hand_over
    async with open_processes(cluster.url, config) as (_, client):
        expected = await check_answers(client, config, disturb, at=12, num=3)
        await check_admitted(client, config, expected)


async def test_connections_of_every_kind_follow_the_slot(cluster: Cluster) -> None:
    with connect(cluster.url) as client, connect(cluster.url, one_connection=True) as single:
        asynchronous = connect_async(cluster.url)

        async def answers_at(node: Node) -> bool:
            try:
                ports = [port_of(each.info("server")) for each in (client, single)]
                ports.append(port_of(await asynchronous.info("server")))
                for each in (client, single):
                    each.get(keys.NONE)
                await asynchronous.get(keys.NONE)
            except redis.ConnectionError:
                return False
            return set(ports) == {node.port}

        assert await answers_at(cluster.owner)
        cluster.hand_over()
        await await_until(
            partial(answers_at, cluster.replica), "every connection to reach the new server"
        )
        await asynchronous.aclose()


def port_of(info: object) -> int:
    return cast("dict[str, int]", info)["tcp_port"]


async def test_doctor_and_jobs_know_the_cluster(steady_cluster: Cluster, tmp_path: Path) -> None:
    """`fleet doctor` accepts the cluster's URL and refuses the URL of a single node. Jobs are
    refused with the remedy, and none is listed, since rq's keys have no common slot.
    """
    config = load_config(None, ())
    findings = list(check_server(steady_cluster.url, config))
    assert not [finding for finding in findings if finding.refused], findings
    (finding,) = check_server(f"redis://127.0.0.1:{steady_cluster.owner.port}", config)
    assert finding.refused and "write redis+cluster://" in finding.text
    jobs = JobClient(steady_cluster.url, tmp_path)
    assert await jobs.list_jobs() == ()
    with pytest.raises(Conflict, match="run `fleet bench` itself"):
        await jobs.submit("bench", {})
    done = run_cli("jobs", "list", cwd=tmp_path, env={"REDIS_URL": steady_cluster.url})
    assert (done.returncode, done.stderr.count("\n")) == (
        1,
        1,
    ) and "background jobs need a Redis without" in done.stderr


def test_node_named_as_a_single_server_is_refused_with_the_right_address(
    steady_cluster: Cluster,
) -> None:
    for node in (*steady_cluster.others, steady_cluster.replica):
        with pytest.raises(ConfigError, match=r"write redis\+cluster://HOST:PORT"):
            connect(f"redis://127.0.0.1:{node.port}", patience_s=0)


def test_server_without_cluster_mode_is_refused_with_the_right_address(redis_url: str) -> None:
    place = redis_url.partition("://")[2]
    with pytest.raises(
        ConfigError, match=rf"{place} is no node of a cluster .*; write redis://HOST:PORT"
    ):
        connect(f"redis+cluster://{place}", patience_s=0)


def test_unreachable_cluster_is_named() -> None:
    url = f"redis+cluster://127.0.0.1:{free_port()}"
    with pytest.raises(
        RedisUnreachable,
        match=r"no Redis answers at redis\+cluster://127\.0\.0\.1:\d+ \(no node of the cluster "
        r"knows",
    ):
        connect(url, patience_s=0)
