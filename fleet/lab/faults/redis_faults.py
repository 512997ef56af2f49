"""Faults in Redis, or in connections to it, and their repair.

* oom: `maxmemory` is below what is used
* readonly: the server follows a primary that does not answer
* noreplicas: the server waits for replicas that do not exist
* misconf: the log of the server may not grow, as on a full disk
* tail: the server is killed, and restarted without the end of its log: at most what
  `appendfsync everysec` may lose
* partition: a single gateway reaches the server no longer
* clock: the clock of the server is set forward, and later back
* failover: the server is killed, a sentinel promotes its replica, and it returns as the replica
"""

import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.redis_servers import RedisServer, RedisServers, find_clock_library, wait_for
from fleet.lab.faults.relay import Relay
from fleet.lab.faults.schedule import Fault, FaultKind

HOLD_S = 3.0
"""Time for which a fault lasts: longer than every lease with default settings."""
FSYNC_S = 1.0
"""Interval of `appendfsync everysec`, and so the age of the writes that a failure may lose."""
USED_SHARE = (0.5, 0.95)
"""Range of the memory limit in an oom fault, as a share of used memory; the fault's severity
selects the value.
"""
CLOCK_STEP_S = (2.0, 8.0)
PARTITION_S = 5.0
"""Additional duration of a partition, in which the clients of the silent gateway resume at another
gateway.
"""
CLOSED_PORT = 1
"""Loopback port at which no server listens."""
TOO_MANY_REPLICAS = 9


def check_available(kinds: tuple[FaultKind, ...]) -> None:
    """Check that this machine has what each kind of fault needs. Raises: ChaosError naming what is
    missing.
    """
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


@dataclass(frozen=True, slots=True)
class HeldFault:
    """A fault that stays in effect for `more_s` longer than the `hold_s` of `RedisFaults`. `begin`:
    starts the fault; its last argument is the severity. `end`: repairs the fault.
    """

    begin: Callable[["RedisFaults", RedisServer, float], object]
    end: Callable[["RedisFaults", RedisServer], object]
    more_s: float = 0.0


class RedisFaults:
    """Injects faults into one run's Redis servers and repairs them. `relay`: relay between a
    gateway and Redis, None without partitions. `hold_s`: duration of a fault in seconds. `pause`:
    function that sleeps for a number of seconds.
    """

    def __init__(
        self,
        servers: RedisServers,
        relay: Relay | None,
        hold_s: float = HOLD_S,
        pause: Callable[[float], object] = lambda duration_s: threading.Event().wait(duration_s),
    ) -> None:
        self.servers = servers
        self._relay = relay
        self._hold_s = hold_s
        self._pause = pause

    @property
    def relay(self) -> Relay:
        assert self._relay is not None, "started for partitions"
        return self._relay

    @property
    def relayed_url(self) -> str | None:
        """Redis address for the gateway that partitions cut off, through the relay; None without
        partitions.
        """
        return self.servers.url_at(self._relay.port) if self._relay else None

    def inject(self, fault: Fault) -> None:
        """Inject a fault, wait, and repair it. Raises: ChaosError, redis's errors."""
        server = self.servers.primary
        if (held := HELD_FAULTS.get(fault.kind)) is not None:
            held.begin(self, server, fault.severity)
            self._pause(held.more_s + self._hold_s)
            held.end(self, server)
        elif fault.kind is FaultKind.TAIL:
            self._lose_tail(server, fault.severity)
        elif fault.kind is FaultKind.CLOCK:
            self._set_clock(server, fault.severity)
        else:
            self.servers.fail_over()

    def _lose_tail(self, server: RedisServer, severity: float) -> None:
        former, before = server.log_file()
        self._pause(FSYNC_S)
        server.kill()
        log, size = server.log_file()
        written = size - before if log == former else size
        with log.open("r+b") as file:
            file.truncate(max(0, size - max(1, round(severity * written))))
        server.start()

    def _set_clock(self, server: RedisServer, severity: float) -> None:
        for ahead_s in (_between(CLOCK_STEP_S, severity), 0.0):
            server.set_clock(ahead_s)
            wait_for(
                lambda ahead_s=ahead_s: abs(server.clock_ahead_s() - ahead_s) < 0.5,
                "the clock to be set",
            )
            self._pause(self._hold_s)


def _limit_memory(server: RedisServer, severity: float) -> None:
    used = int(server.admin.info("memory")["used_memory"])
    server.admin.config_set("maxmemory", int(used * _between(USED_SHARE, 1 - severity)))


def _limit_file_size(server: RedisServer, limit: int) -> None:
    server.process.rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


HELD_FAULTS = {
    FaultKind.OOM: HeldFault(
        lambda _, server, severity: _limit_memory(server, severity),
        lambda _, server: server.admin.config_set("maxmemory", 0),
    ),
    FaultKind.READONLY: HeldFault(
        lambda _, server, __: server.admin.replicaof("127.0.0.1", str(CLOSED_PORT)),
        lambda _, server: server.admin.replicaof("NO", "ONE"),
    ),
    FaultKind.NOREPLICAS: HeldFault(
        lambda _, server, __: server.admin.config_set("min-replicas-to-write", TOO_MANY_REPLICAS),
        lambda _, server: server.admin.config_set("min-replicas-to-write", 0),
    ),
    FaultKind.MISCONF: HeldFault(
        lambda _, server, __: _limit_file_size(server, server.log_file()[1]),
        lambda _, server: _limit_file_size(server, resource.RLIM_INFINITY),
    ),
    FaultKind.PARTITION: HeldFault(
        lambda faults, _, __: faults.relay.hold(),
        lambda faults, _: faults.relay.release(),
        PARTITION_S,
    ),
}
"""Faults that begin with one call, last for a time, and are repaired with another call."""
