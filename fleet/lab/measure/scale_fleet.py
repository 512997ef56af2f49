"""The fleet of the scale benchmark: Redis, a conductor and workers as child processes, and the CPU
time that each has used.

There are no keepers and no gateway, which are not measured here. Takes the stages from the graph.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from fleet.config import FleetConfig, load_config
from fleet.control.connect import connect
from fleet.control.embedded import embedded_url
from fleet.control.server import ServerOptions, find_server, server_command
from fleet.lab.measure import processes
from fleet.lab.measure.errors import BenchError

CONFIG_NAME, LOG_NAME = "resolved.yaml", "fleet.log"
STOP_S = 10.0
REDIS, CONDUCTOR = "redis", "conductor"


class ScaleFleet:
    """Handle of the running processes, by name; workers of one role share a name. `ready_s`: time
    from the start until all roles were served, 0 until `set_ready` is called.
    """

    def __init__(self, config: FleetConfig, folder: Path) -> None:
        options = ServerOptions(data_dir=folder)
        self.url = embedded_url(folder)
        file = folder / CONFIG_NAME
        file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        self.config = load_config(file)
        self._log = folder / LOG_NAME
        self._env = {
            **os.environ,
            "REDIS_URL": self.url,
            "FLEET_CONFIG": str(file),
            "PYTHONUNBUFFERED": "1",
        }
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._began_s, self.ready_s = time.monotonic(), 0.0
        self._start(REDIS, server_command(find_server(), options))

    def start_all(self) -> None:
        connect(self.url).close()
        self._start_command(CONDUCTOR, "conductor")
        for role in self.config.roles():
            for _ in range(role.replicas):
                self.start_worker(role.name)

    def set_ready(self) -> None:
        """Set `ready_s` to the time since the start, on the first call only."""
        self.ready_s = self.ready_s or time.monotonic() - self._began_s

    def start_worker(self, role: str) -> None:
        self._start_command(role, "worker", role)

    def _start_command(self, name: str, *arguments: str) -> None:
        self._start(name, [*processes.FLEET, *arguments])

    def _start(self, name: str, command: Sequence[str]) -> None:
        self._started.append((name, processes.start(command, self._env, self._log, signal.SIGKILL)))

    def check(self) -> None:
        """Check that all processes still run. Raises: BenchError with the end of the log of a
        process that has ended.
        """
        for name, process in self._started:
            if process.poll() is not None:
                tail = processes.end_of(self._log)
                raise BenchError(
                    f"scale: {name} ended with status {process.returncode}; the end of its "
                    f"log:\n{tail}"
                )

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds used so far, by process name; includes ended children, since Redis
        forks to rewrite its append-only file.
        """
        self.check()
        used: dict[str, float] = {}
        for name, process in self._started:
            times = psutil.Process(process.pid).cpu_times()
            seconds = times.user + times.system + times.children_user + times.children_system
            used[name] = used.get(name, 0.0) + seconds
        return used

    def stop(self) -> None:
        """Stop the clients of Redis together, then Redis; kill processes that do not end in
        time.
        """
        processes.stop([process for name, process in self._started if name != REDIS], STOP_S)
        processes.stop([process for name, process in self._started if name == REDIS], STOP_S)


@contextmanager
def scale_fleet(config: FleetConfig) -> Iterator[ScaleFleet]:
    """Run every process of `config` except the gateway until the end of the block. On entry the
    processes are started, but not yet ready.

    Raises: ConfigError if there is no Redis to start, or the configuration is invalid.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-scale-") as folder:
        fleet = ScaleFleet(config, Path(folder))
        try:
            fleet.start_all()
            yield fleet
        finally:
            fleet.stop()
