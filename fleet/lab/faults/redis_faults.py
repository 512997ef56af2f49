"""Faults that happen to Redis, or to the connections to it, and their repair.

| oom | `maxmemory` below what is used | | readonly | the server follows a primary that does not
answer | | noreplicas | it waits for replicas that do not exist | | misconf | its log may not grow,
as on a full disk | | tail | it is killed, and restarted without the end of its log: at most what
`appendfsync everysec` may lose | | partition | one gateway alone reaches it no longer | | clock |
its clock is set forward, and later back | | failover | it is killed, a sentinel promotes its
replica, and it returns as the replica |
"""

import resource
import threading
from collections.abc import Callable

import psutil

from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.redis_servers import RedisServer, RedisServers, find_clock_library, wait_for
from fleet.lab.faults.relay import Relay
from fleet.lab.faults.schedule import Fault, FaultKind

HOLD_S = 3.0
"""Time for which a fault is in effect: longer than every lease, if they are not set to be
longer.
"""
FSYNC_S = 1.0
"""Interval of `appendfsync everysec`, and so the age of the writes that a failure may lose."""
USED_SHARE = (0.5, 0.95)
"""Memory limit during OOM, as a share of what is used; by severity."""
CLOCK_STEP_S = (2.0, 8.0)
PARTITION_S = 5.0
"""Time besides `HOLD_S` in which the clients of a gateway that sends nothing continue at
another.
"""
CLOSED_PORT = 1
"""No server listens at this port of loopback."""
TOO_MANY_REPLICAS = 9


def check_available(kinds: tuple[FaultKind, ...]) -> None:
    """Raises: ChaosError if this machine lacks what a kind of fault needs."""
    if FaultKind.CLOCK in kinds and find_clock_library() is None:
        raise ChaosError(
            "--how clock needs libfaketime, to set the clock of Redis alone: `apt-get install "
            "faketime`",
            param="--how",
        )
    if FaultKind.MISCONF in kinds and not hasattr(psutil, "RLIMIT_FSIZE"):
        raise ChaosError(
            "--how misconf limits the size of a process's files, which only Linux can do",
            param="--how",
        )


class RedisFaults:
    """Injects and repairs faults of one run's servers. `relay`: the connection of one gateway, None
    without partitions.

    Each fault is a call that returns once the fault is repaired. `pause` waits for so many seconds.
    """

    def __init__(
        self,
        servers: RedisServers,
        relay: Relay | None,
        hold_s: float = HOLD_S,
        pause: Callable[[float], object] = lambda duration_s: threading.Event().wait(duration_s),
    ) -> None:
        self.servers, self._relay, self._hold_s, self._pause = servers, relay, hold_s, pause

    @property
    def relayed_url(self) -> str | None:
        """The address of Redis for the gateway that partitions cut off."""
        return self.servers.url_at(self._relay.port) if self._relay else None

    def inject(self, fault: Fault) -> None:
        """Inject a fault, and repair it. Raises: ChaosError, redis's errors."""
        faults: dict[FaultKind, Callable[[RedisServer, float], None]] = {
            FaultKind.OOM: self._fill_memory,
            FaultKind.READONLY: self._make_replica,
            FaultKind.NOREPLICAS: self._require_replicas,
            FaultKind.MISCONF: self._fill_disk,
            FaultKind.TAIL: self._lose_tail,
            FaultKind.PARTITION: self._cut_off_gateway,
            FaultKind.CLOCK: self._set_clock,
            FaultKind.FAILOVER: self._fail_over,
        }
        faults[fault.kind](self.servers.primary, fault.severity)

    def _hold(self) -> None:
        self._pause(self._hold_s)

    def _fill_memory(self, server: RedisServer, severity: float) -> None:
        used = int(server.admin.info("memory")["used_memory"])
        server.admin.config_set("maxmemory", int(used * _between(USED_SHARE, 1 - severity)))
        self._hold()
        server.admin.config_set("maxmemory", 0)

    def _make_replica(self, server: RedisServer, severity: float) -> None:
        server.admin.replicaof("127.0.0.1", str(CLOSED_PORT))
        self._hold()
        server.admin.replicaof("NO", "ONE")

    def _require_replicas(self, server: RedisServer, severity: float) -> None:
        server.admin.config_set("min-replicas-to-write", TOO_MANY_REPLICAS)
        self._hold()
        server.admin.config_set("min-replicas-to-write", 0)

    def _fill_disk(self, server: RedisServer, severity: float) -> None:
        _, limit = server.log_file()
        unlimited = resource.RLIM_INFINITY
        server.process.rlimit(psutil.RLIMIT_FSIZE, (limit, unlimited))
        self._hold()
        server.process.rlimit(psutil.RLIMIT_FSIZE, (unlimited, unlimited))

    def _lose_tail(self, server: RedisServer, severity: float) -> None:
        former, before = server.log_file()
        self._pause(FSYNC_S)
        server.kill()
        log, size = server.log_file()
        written = size - before if log == former else size
        with log.open("r+b") as file:
            file.truncate(max(0, size - max(1, round(severity * written))))
        server.start()

    def _cut_off_gateway(self, server: RedisServer, severity: float) -> None:
        assert self._relay is not None, "started for partitions"
        self._relay.hold()
        self._pause(PARTITION_S + self._hold_s)
        self._relay.release()

    def _set_clock(self, server: RedisServer, severity: float) -> None:
        step_s = _between(CLOCK_STEP_S, severity)
        for ahead_s in (step_s, 0.0):
            server.set_clock(ahead_s)
            wait_for(
                lambda ahead_s=ahead_s: abs(server.clock_ahead_s() - ahead_s) < 0.5,
                "the clock to be set",
            )
            self._hold()

    def _fail_over(self, server: RedisServer, severity: float) -> None:
        self.servers.fail_over()


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share
