"""Which fleet is measured: one that runs already, or one started for the measuring and stopped after it. Knows no stage."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fleet.bench.errors import BenchError
from fleet.config import FleetConfig, load_config
from fleet.config.settings import read_settings
from fleet.graphs import DEFAULT_GRAPH

RESOLVED_NAME = "resolved.yaml"
"""Where `fleet up` keeps what it runs, in its data folder."""
FOLDER = "bench"
"""Below the data folder: a fleet of the benchmark's own shares no file with one that serves."""
READY = re.compile(r"fleet: ready at (http://\S+)")
START_S = 600.0
STOP_S = 20.0
TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A fleet to measure, and its configuration as resolved. Its checkpoint may still be "auto" where the fleet is not ours."""

    url: str
    config: FleetConfig


@dataclass(slots=True, kw_only=True)
class _Output:
    """The lines a starting fleet prints, read as they come."""

    lines: list[str] = field(default_factory=list[str])
    ready: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            match = READY.search(line)
            if match:
                self.url = match[1]
                self.ready.set()
        self.ready.set()

    def tail(self) -> str:
        return "".join(self.lines[-TAIL_LINES:]).rstrip()


def configured(config_file: Path | None, overrides: Sequence[str]) -> FleetConfig:
    """The deployment the options name, found as `fleet up` finds it. Raises: ConfigError naming the field and the fix."""
    return load_config(config_file or read_settings().config_path or _default_file(overrides), tuple(overrides))


def _default_file(overrides: Sequence[str]) -> Path | None:
    named = [text.removeprefix("graph=").strip() for text in overrides if text.startswith("graph=")]
    path = Path("configs") / f"{named[-1] if named else DEFAULT_GRAPH}.yaml"
    return path if path.is_file() else None


def running_fleet(url: str, port: int, config: FleetConfig) -> Target:
    """A fleet that runs already. What `fleet up` resolved for it is taken, where that lies here and names its port."""
    resolved = config.data_dir / RESOLVED_NAME
    if resolved.is_file():
        theirs = load_config(resolved)
        if theirs.web.port == port and theirs.graph == config.graph:
            return Target(url=url, config=theirs)
    return Target(url=url, config=config)


@contextmanager
def own_fleet(config_file: Path | None, overrides: Sequence[str]) -> Iterator[Target]:
    """`fleet up` on free ports and a Redis of its own, from ready to stopped.

    Raises: BenchError with the end of what it printed if it does not become ready.
    """
    folder = (configured(config_file, overrides).data_dir / FOLDER).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    redis_dir = Path(tempfile.mkdtemp(prefix="redis-", dir=folder))
    own = {"web.port": "0", "redis.port": "0", "data_dir": folder, "redis.data_dir": redis_dir}
    words = ["--config", str(config_file)] if config_file else []
    for text in (*overrides, *(f"{key}={value}" for key, value in own.items())):
        words += ["--set", text]
    env = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "FLEET_PORT")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fleet.cli", "up", *words],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    output = _Output()
    reader = threading.Thread(target=output.read, args=(process,), daemon=True)
    reader.start()
    try:
        if not output.ready.wait(START_S) or not output.url:
            raise BenchError(f"`fleet up` did not become ready; it printed:\n{output.tail()}")
        yield Target(url=output.url, config=load_config(folder / RESOLVED_NAME))
    finally:
        _stop(process)
        reader.join(timeout=STOP_S)
        shutil.rmtree(redis_dir, ignore_errors=True)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
