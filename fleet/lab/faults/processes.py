"""The fleet's processes on this machine: found among this process's descendants, or started beside
`fleet up`. Uses no Redis.
"""

import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from fleet.lab.faults.errors import ChaosError
from fleet.lab.measure import processes

STOP_S = 20.0
MODULE = "fleet.cli"
KEEP = "--keep"


def fleet_arguments(command: Sequence[str]) -> list[str]:
    """Return the `fleet` arguments of a command line; [] if it runs another program."""
    return list(command[command.index(MODULE) + 1 :]) if MODULE in command else []


def find_processes(*arguments: str) -> dict[int, psutil.Process]:
    """Return this process's descendants that run `fleet ARGUMENTS`, by pid. Keepers of such a
    command are left out.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = fleet_arguments(process.cmdline())
            if tuple(command[: len(arguments)]) == arguments and KEEP not in command:
                found[process.pid] = process
    return found


def is_connected(process: psutil.Process) -> bool:
    """Return True if a process has a connected Unix or TCP socket. Used for conductors, whose only
    connection is to Redis.
    """
    with contextlib.suppress(psutil.Error):
        tcp = process.net_connections("tcp")
        return bool(process.net_connections("unix")) or any(
            one.status == psutil.CONN_ESTABLISHED for one in tcp
        )
    return False


def listening_port(process: psutil.Process) -> int:
    """Return the TCP port on which a process listens. Raises: ChaosError if it listens on none."""
    ports = [
        one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN
    ]
    if not ports:
        raise ChaosError(f"process {process.pid}, a gateway, listens on no port")
    return ports[0]


class ExtraProcesses:
    """Commands started beside `fleet up`, each restarted by its keeper (`--keep`); `stop` stops all
    of them.
    """

    def __init__(self, config_file: Path, log: Path, redis_url: str | None = None) -> None:
        self._log = log
        self._env = {
            **processes.own_environment(redis_url),
            "FLEET_CONFIG": str(config_file),
            "PYTHONUNBUFFERED": "1",
        }
        self._redis_urls: dict[tuple[str, ...], str] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str], redis_url: str | None = None) -> None:
        """Start `fleet ARGUMENTS`. `redis_url`: Redis address of this command, remembered for later
        starts with equal arguments; None for the remembered address, if any, else the
        constructor's.
        """
        url = self._redis_urls.get(tuple(arguments), redis_url)
        if url is not None:
            self._redis_urls[tuple(arguments)] = url
        env = self._env if url is None else {**self._env, "REDIS_URL": url}
        self._started.append(
            processes.start([*processes.FLEET, *arguments, KEEP], env, self._log, signal.SIGTERM)
        )

    def stop(self) -> None:
        """Stop all started processes and their children."""
        processes.stop(self._started, STOP_S)
