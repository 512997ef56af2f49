"""Which fleet is measured: one that runs already, or one started for the measuring and stopped after it. Knows no stage."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.bench.errors import BenchError
from fleet.config import FleetConfig, load_config
from fleet.config.settings import read_settings
from fleet.core.parent_death import signalled_with_parent
from fleet.core.private import make_private_folder
from fleet.graphs import DEFAULT_GRAPH

RESOLVED_NAME = "resolved.yaml"
"""Where `fleet up` keeps what it runs, in its data folder."""
LOG_NAME = "up.log"
CHECKPOINTS = "checkpoints"
"""Where `checkpoint: auto` makes its own, in the data folder."""
READY = re.compile(r"fleet: ready at (http://\S+)")
START_S = 600.0
STOP_S = 20.0
TAIL_LINES = 15
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFleet:
    """A fleet to measure, and its configuration as resolved. Its checkpoint may still be "auto" where the fleet is not ours.

    `pid`: the process that started all others, where we started that.
    """

    url: str
    config: FleetConfig
    pid: int | None = None


def resolve_config(config_file: Path | None, overrides: Sequence[str]) -> FleetConfig:
    """The deployment the options name, found as `fleet up` finds it. Raises: ConfigError naming the field and the fix."""
    return load_config(config_file or read_settings().config_path or _default_file(overrides), tuple(overrides))


def _default_file(overrides: Sequence[str]) -> Path | None:
    named = [text.removeprefix("graph=").strip() for text in overrides if text.startswith("graph=")]
    path = Path("configs") / f"{named[-1] if named else DEFAULT_GRAPH}.yaml"
    return path if path.is_file() else None


def running_fleet(url: str, port: int, config: FleetConfig) -> TargetFleet:
    """A fleet that runs already. What `fleet up` resolved for it is taken, where that lies here and names its port."""
    resolved = config.data_dir / RESOLVED_NAME
    if resolved.is_file():
        theirs = load_config(resolved)
        if theirs.web.port == port and theirs.graph == config.graph:
            return TargetFleet(url=url, config=theirs)
    return TargetFleet(url=url, config=config)


@contextmanager
def own_fleet(config_file: Path | None, overrides: Sequence[str]) -> Iterator[TargetFleet]:
    """`fleet up` on free ports and a Redis of its own, from ready to stopped. This machine alone reaches it, and without TLS.

    Raises: BenchError with the end of what it printed if it does not become ready.
    """
    folder = _own_folder(resolve_config(config_file, overrides).data_dir.absolute())
    words = ["--config", str(config_file)] if config_file else []
    for text in (*overrides, *own_overrides(folder)):
        words += ["--set", text]
    env = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "FLEET_PORT")}
    log = folder / LOG_NAME
    # A file and not a pipe: should this process be killed, the fleet can still say what it does while it stops.
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet.cli", "up", *words],
            env=env, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=signalled_with_parent(signal.SIGTERM),
        )  # fmt: skip
    try:
        url = _await_ready(process, log)
        config = load_config(folder / RESOLVED_NAME)
        # The checkpoint outlives the folder through which the fleet saw it.
        checkpoint = str(Path(config.checkpoint).resolve())
        yield TargetFleet(url=url, config=config.model_copy(update={"checkpoint": checkpoint}), pid=process.pid)
    finally:
        _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def own_overrides(folder: Path) -> tuple[str, ...]:
    """What a fleet of our own has other than its configuration says: its places, and no certificate; its client is here."""
    own = {
        "web.host": "127.0.0.1", "web.port": 0, "web.tls": "null", "web.tls_cert": "null", "web.tls_key": "null",
        "redis.port": "null", "data_dir": folder, "redis.data_dir": folder / "redis",
    }  # fmt: skip
    return tuple(f"{key}={value}" for key, value in own.items())


def _own_folder(data_dir: Path) -> Path:
    """A data folder for one run, which shares with all others only the checkpoints that were made once."""
    checkpoints = data_dir / CHECKPOINTS
    make_private_folder(data_dir)
    make_private_folder(checkpoints)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=data_dir))
    (folder / CHECKPOINTS).symlink_to(checkpoints)
    return folder


def _await_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address it says it is ready at. Raises: BenchError with the end of its log."""
    deadline = time.monotonic() + START_S
    while (ready := READY.search(log.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise BenchError(f"`fleet up` did not become ready; the end of {log}:\n{tail}")
        time.sleep(POLL_S)
    return ready[1]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
