"""The fleet's processes on this machine: found below this one, started beside `fleet up`, signalled. Knows no Redis."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from fleet.chaos.errors import ChaosError
from fleet.core.parent_death import signalled_with_parent

STOP_S = 20.0
MODULE = "fleet.cli"
KEEP = "--keep"


def find(*words: str) -> dict[int, psutil.Process]:
    """Processes below this one that run `fleet WORDS`, by pid; who only keeps such a command running is none."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            if MODULE not in line:
                continue
            command = line[line.index(MODULE) + 1 :]
            if tuple(command[: len(words)]) == words and KEEP not in command:
                found[process.pid] = process
    return found


def is_connected(process: psutil.Process) -> bool:
    """Return True if a process holds a Unix socket, as a conductor does to Redis alone; not so while it still starts."""
    with contextlib.suppress(psutil.Error):
        return bool(process.net_connections("unix"))
    return False


def listening_port(process: psutil.Process) -> int:
    """Where it takes connections. Raises: ChaosError if it takes none."""
    ports = [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    if not ports:
        raise ChaosError(f"process {process.pid} listens on no port, although it is a gateway at work")
    return ports[0]


def free_port() -> int:
    """One that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Extras:
    """Commands started beside `fleet up`, each kept running by `--keep`; all are stopped by `stop`."""

    def __init__(self, config_file: Path, log: Path) -> None:
        self.log = log
        gone = ("REDIS_URL", "FLEET_PORT")
        env = {key: value for key, value in os.environ.items() if key not in gone}
        self._env = {**env, "FLEET_CONFIG": str(config_file), "PYTHONUNBUFFERED": "1"}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str]) -> None:
        with self.log.open("a") as lines:
            self._started.append(
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, *words, KEEP],
                    env=self._env, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True,
                    preexec_fn=signalled_with_parent(signal.SIGTERM),
                )
            )  # fmt: skip

    def stop(self) -> None:
        """All are told first, so that they leave together; what does not end in time is killed, and what it keeps with it."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
