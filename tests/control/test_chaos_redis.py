"""The faults that `fleet chaos` injects into its own Redis: each fault takes effect, is repaired,
and loses only the data that it may lose.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from fleet.control.connect import connect
from fleet.control.outage import code_of
from fleet.lab.faults.patience import patiently
from fleet.lab.faults.redis_faults import RedisFaults
from fleet.lab.faults.redis_servers import RedisServers, find_clock_library, redis_servers
from fleet.lab.faults.relay import Relay
from fleet.lab.faults.schedule import REDIS, Fault, FaultKind
from tests.support import wait_until

REFUSALS = {
    FaultKind.OOM: "OOM",
    FaultKind.READONLY: "READONLY",
    FaultKind.NOREPLICAS: "NOREPLICAS",
    FaultKind.MISCONF: "MISCONF",
}


def fault(kind: FaultKind, severity: float = 0.5) -> Fault:
    return Fault(role=REDIS, kind=kind, pause_s=0.0, severity=severity)


def refusal(client: redis.Redis) -> str:
    """Return the error code with which Redis refuses a write, "" if the write succeeds."""
    try:
        client.set("written", "again")
        return ""
    except redis.RedisError as error:
        return code_of(error) or type(error).__name__


@contextmanager
def injected(
    servers: RedisServers, kind: FaultKind, relay: Relay | None = None
) -> Iterator[threading.Event]:
    """Inject a fault on a thread. The fault is repaired when the test sets the yielded event, or at
    the end of the block.
    """
    release = threading.Event()
    faults = RedisFaults(servers, relay, pause=lambda _: release.wait())
    thread = threading.Thread(target=faults.inject, args=(fault(kind),))
    thread.start()
    try:
        yield release
    finally:
        release.set()
        thread.join()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[RedisServers]:
    with redis_servers(tmp_path, clock=None, with_replica=False) as servers:
        yield servers


@pytest.mark.parametrize("kind", REFUSALS)
def test_redis_refuses_writes_during_the_fault_and_accepts_them_after(
    servers: RedisServers, kind: FaultKind
) -> None:
    client = servers.primary.admin
    client.set("kept", "value")
    with injected(servers, kind):
        wait_until(
            lambda: refusal(client) == REFUSALS[kind], f"writes to be refused with {REFUSALS[kind]}"
        )
    wait_until(lambda: not refusal(client), "writes to be done again")
    assert client.get("kept") == b"value"


@pytest.mark.parametrize("severity", [0.0, 0.3, 1.0])
def test_killed_redis_loses_only_writes_since_the_fault_began(
    servers: RedisServers, severity: float
) -> None:
    client = servers.primary.admin
    client.set("kept", "value")

    def write(_: float) -> None:
        """Write during the second that may be lost, and wait until the log contains these
        writes.
        """
        size = servers.primary.log_file()[1]
        client.rpush("lost", *range(1000))
        wait_until(lambda: servers.primary.log_file()[1] > size, "the log to be written")

    RedisFaults(servers, None, pause=write).inject(fault(FaultKind.TAIL, severity))
    assert client.get("kept") == b"value" and client.llen("lost") == 0, (
        "half of a command is not read"
    )


def test_killed_redis_may_have_begun_another_part_of_its_log(servers: RedisServers) -> None:
    client = servers.primary.admin
    client.set("kept", "value")

    def write(_: float) -> None:
        former, _ = servers.primary.log_file()
        client.bgrewriteaof()
        wait_until(lambda: not former.exists(), "the log to be rewritten")
        client.rpush("lost", *range(1000))
        wait_until(lambda: servers.primary.log_file()[1], "the log to be written")

    RedisFaults(servers, None, pause=write).inject(fault(FaultKind.TAIL, 1.0))
    assert client.get("kept") == b"value" and client.llen("lost") == 0


def test_clock_of_redis_alone_is_set_and_set_back(tmp_path: Path) -> None:
    library = find_clock_library()
    assert library is not None, "tests/setup.sh installs libfaketime"
    with redis_servers(tmp_path, clock=library, with_replica=False) as servers:
        steps: list[float] = []
        RedisFaults(
            servers, None, pause=lambda _: steps.append(servers.primary.clock_ahead_s())
        ).inject(fault(FaultKind.CLOCK))
    assert steps == [pytest.approx(5.0, abs=0.5), pytest.approx(0.0, abs=0.5)]


def test_partition_holds_one_connection_without_breaking_it(servers: RedisServers) -> None:
    with (
        Relay.to(lambda: servers.primary.port) as relay,
        connect(servers.url_at(relay.port)) as behind,
    ):
        behind.set("before", "1")
        with injected(servers, FaultKind.PARTITION, relay) as release:
            relay_is_held(relay)
            reply: list[object] = []
            waiting = threading.Thread(target=lambda: reply.append(behind.set("behind", "2")))
            waiting.start()
            assert (
                servers.primary.admin.set("beside", "3")
                and not servers.primary.admin.exists("behind")
                and not reply
            )
            release.set()
            waiting.join()
        assert reply == [True] and servers.primary.admin.get("behind") == b"2"


def relay_is_held(relay: Relay) -> None:
    wait_until(lambda: relay.is_held, "the relay to hold its connections")


@pytest.mark.thorough
def test_failover_promotes_the_replica_and_the_former_primary_follows(tmp_path: Path) -> None:
    with (
        redis_servers(tmp_path, clock=None, with_replica=True) as servers,
        connect(servers.url) as client,
    ):
        former, promoted = servers.primary, servers.replica
        client.set("kept", "value")
        assert client.wait(1, 10_000) == 1
        RedisFaults(servers, None).inject(fault(FaultKind.FAILOVER))
        assert (servers.primary, servers.replica) == (promoted, former)
        assert former.follows() and former.role() == "slave"
        wait_until(
            lambda: read(client) == b"value", "the fleet's address to lead to the promoted replica"
        )


def read(client: redis.Redis) -> object:
    try:
        return client.get("kept")
    except redis.ConnectionError:
        return None


class RedisReader:
    """A reader of a Redis that cannot be reached during the first calls."""

    def __init__(self, *errors: redis.RedisError) -> None:
        self.errors = list(errors)

    @patiently
    def read(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "read"


def test_reader_of_chaos_waits_while_redis_is_away() -> None:
    reader = RedisReader(
        redis.TimeoutError("Timeout reading from socket"), redis.ConnectionError("refused")
    )
    assert reader.read() == "read" and not reader.errors
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        RedisReader(redis.ResponseError("WRONGTYPE Operation against a key")).read()
