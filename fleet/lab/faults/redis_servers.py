"""Redis servers of a chaos run, in which faults are injected: a server on loopback, and for
failovers a replica and a sentinel.

Each server is a child process, so that it can be killed, restarted with another log, limited in its
file size, and given another clock than the machine's. Knows no fault.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
import redis

from fleet.control.outage import is_away
from fleet.control.server import ServerOptions, find_server, server_command
from fleet.lab.faults.errors import ChaosError
from fleet.process.free_ports import free_port
from fleet.process.parent_death import signalled_with_parent
from fleet.process.private import make_private_folder, write_private

HOST, SERVICE = "127.0.0.1", "fleet"
START_S = 60.0
POLL_S = 0.05
NEVER_MS, DOWN_AFTER_MS = 3_600_000, 1000
"""Silence after which the sentinel promotes the replica: the first value normally, so that no other
fault causes a failover; the second during a failover.
"""
CLOCK_LIBRARIES = ("usr/lib/*/faketime/libfaketimeMT.so.1", "usr/lib64/faketime/libfaketimeMT.so.1")
LOGS = ("appendonlydir", "*.incr.aof")


def find_clock_library() -> Path | None:
    """Return the path of libfaketime, which gives one process a different clock; None if it is not
    installed.
    """
    found = (path for pattern in CLOCK_LIBRARIES for path in Path("/").glob(pattern))
    return next(found, None)


def wait_for(reached: Callable[[], bool], description: str, timeout_s: float = START_S) -> None:
    """Wait until `reached()` returns True. Raises: ChaosError with `description` after
    `timeout_s`.
    """
    pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
    while not _holds(reached):
        if time.monotonic() > deadline_s:
            raise ChaosError(f"the Redis of this run: waited {timeout_s:g} s for {description}")
        pause.wait(POLL_S)


def _holds(reached: Callable[[], bool]) -> bool:
    try:
        return reached()
    except redis.RedisError as error:
        if is_away(error):
            return False
        raise


@dataclass(slots=True, kw_only=True)
class RedisServer:
    """A Redis server on its own port; its data remains after `kill`. `clock`: path of libfaketime,
    for a server whose clock can be set.
    """

    folder: Path
    password: str
    clock: Path | None = None
    port: int = field(default_factory=free_port)
    admin: redis.Redis = field(init=False)
    _process: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        make_private_folder(self.folder)
        self.set_clock(0.0)
        self.admin = redis.Redis(
            HOST, self.port, password=self.password, socket_timeout=10.0, protocol=2
        )

    def start(self) -> None:
        """Start the server on its existing data, and wait until it answers. Raises: ChaosError."""
        command = [
            *server_command(find_server(), ServerOptions(data_dir=self.folder, port=self.port)),
            "-",
        ]
        self._process = _start_process(command, self._environment())
        assert self._process.stdin is not None
        settings = (
            f"requirepass {self.password}\nmasterauth {self.password}\nrepl-diskless-sync-delay 0\n"
        )
        self._process.stdin.write(settings.encode())
        self._process.stdin.close()
        wait_for(self._answers, f"the server on port {self.port} to answer")

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise ChaosError(f"the Redis of this run ended while it started in {self.folder}")
        return bool(self.admin.ping())

    def _environment(self) -> Mapping[str, str]:
        if self.clock is None:
            return os.environ
        # The monotonic clock stays the machine's; the file is read again after a second.
        return {
            **os.environ,
            "LD_PRELOAD": str(self.clock),
            "FAKETIME_TIMESTAMP_FILE": str(self._clock_file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }

    @property
    def _clock_file(self) -> Path:
        return self.folder / "clock"

    def set_clock(self, ahead_s: float) -> None:
        """Set the server's clock `ahead_s` ahead of the machine's; takes effect within a second."""
        temporary = self._clock_file.with_suffix(".new")
        temporary.write_text(f"{ahead_s:+.3f}\n")
        temporary.replace(self._clock_file)

    def clock_ahead_s(self) -> float:
        seconds, micros = self.admin.time()
        return seconds + micros / 1e6 - time.time()

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None, "the server was never started"
        return psutil.Process(self._process.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.admin.close()

    def log_file(self) -> tuple[Path, int]:
        """Return the append-only file that is currently written, and its size in bytes."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # the server has just begun another part
                file = max(
                    (self.folder / LOGS[0]).glob(LOGS[1]), key=lambda file: file.stat().st_mtime_ns
                )
                return file, file.stat().st_size

    def role(self) -> str:
        return str(self.admin.info("replication")["role"])

    def follows(self) -> bool:
        """Return True if the server is a replica and its connection to the primary is up."""
        found = self.admin.info("replication")
        return found["role"] == "slave" and found["master_link_status"] == "up"


class RedisServers:
    """The servers of a run: `primary` and, where failovers are planned, its `replica` and a
    sentinel. A failover exchanges primary and replica.
    """

    def __init__(
        self, primary: RedisServer, replica: RedisServer | None, sentinel_port: int = 0
    ) -> None:
        self.primary, self.replica = primary, replica
        self._sentinel_port = sentinel_port

    @property
    def url(self) -> str:
        """Address by which the fleet's processes find the primary, with the password: the
        sentinel's address if there is a replica, else the primary's.
        """
        login = f":{self.primary.password}@{HOST}"
        if self.replica is not None:
            return f"redis+sentinel://{login}:{self._sentinel_port}/{SERVICE}"
        return self.url_at(self.primary.port)

    def url_at(self, port: int) -> str:
        """Return the address of a relay to the primary, which listens on `port`, with the primary's
        password.
        """
        return f"redis://:{self.primary.password}@{HOST}:{port}"

    def fail_over(self) -> None:
        """Kill the primary, wait until the replica is promoted, and restart the former primary as a
        replica.

        The last writes may be lost. Raises: ChaosError.
        """
        former, promoted = self.primary, self.replica
        assert promoted is not None, "started for failovers"
        with _sentinel_at(self._sentinel_port) as sentinel:
            sentinel.sentinel_set(SERVICE, "down-after-milliseconds", DOWN_AFTER_MS)
            former.kill()
            wait_for(lambda: promoted.role() == "master", "the promotion of the replica")
            self.primary, self.replica = promoted, former
            wait_for(
                lambda: self._known_primary(sentinel) == promoted.port,
                "the sentinel to name the promoted replica",
            )
            sentinel.sentinel_set(SERVICE, "down-after-milliseconds", NEVER_MS)
        former.start()
        wait_for(former.follows, "the former primary to follow the promoted replica")

    @staticmethod
    def _known_primary(sentinel: redis.Redis) -> int:
        address = cast(
            "tuple[bytes, bytes]",
            sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE),
        )
        return int(address[1])


def _sentinel_at(port: int) -> redis.Redis:
    return redis.Redis(HOST, port, socket_timeout=10.0, protocol=2)


@contextmanager
def redis_servers(
    folder: Path, *, clock: Path | None, with_replica: bool
) -> Iterator[RedisServers]:
    """Run the Redis servers of a chaos run until the end of the block. `folder`: folder of their
    data. `clock`: path of libfaketime, or None. Raises: ChaosError, ConfigError if no server is
    installed.
    """
    password = secrets.token_hex(16)
    servers = [
        RedisServer(folder=folder / f"redis-{number}", password=password, clock=clock)
        for number in (1, 2)[: 1 + with_replica]
    ]
    primary, replica = servers[0], servers[1] if with_replica else None
    sentinel: subprocess.Popen[bytes] | None = None
    try:
        primary.start()
        if replica is None:
            yield RedisServers(primary, None)
            return
        replica.start()
        replica.admin.replicaof(HOST, str(primary.port))
        wait_for(replica.follows, "the replica to follow")
        port = free_port()
        sentinel = _start_sentinel(folder, port, primary)
        with _sentinel_at(port) as client:
            wait_for(
                lambda: bool(client.sentinel_slaves(SERVICE)), "the sentinel to know the replica"
            )
        yield RedisServers(primary, replica, port)
    finally:
        if sentinel is not None:
            sentinel.kill()
            sentinel.wait()
        for server in servers:
            server.kill()


def _start_sentinel(folder: Path, port: int, primary: RedisServer) -> "subprocess.Popen[bytes]":
    config = folder / "sentinel.conf"
    lines = (
        f"port {port}",
        f"bind {HOST}",
        f"dir {folder}",
        f"sentinel monitor {SERVICE} {HOST} {primary.port} 1",
        f"sentinel auth-pass {SERVICE} {primary.password}",
        f"sentinel down-after-milliseconds {SERVICE} {NEVER_MS}",
        f"sentinel failover-timeout {SERVICE} 2000",
    )
    write_private(config, "\n".join(lines) + "\n")
    return _start_process([str(find_server()), str(config), "--sentinel"], os.environ)


def _start_process(command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        # SIGXFSZ stays ignored, so that a log that reached the limit of its size is an error of
        # the write.
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        restore_signals=False,
        preexec_fn=signalled_with_parent(signal.SIGKILL),
    )
