"""The fleet that a benchmark measures: a running fleet, or a fleet started for the run and stopped
after it. Takes the stages from the graph.
"""

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.config import FleetConfig, load_config
from fleet.config.deployment import open_config
from fleet.config.settings import read_settings
from fleet.lab.client.client import ApiClient
from fleet.lab.measure import processes
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context
from fleet.process.private import make_private_folder

RESOLVED_NAME = "resolved.yaml"
"""Name of the file, in the data folder of `fleet up`, with the resolved configuration."""
LOG_NAME = "up.log"
CHECKPOINTS = "checkpoints"
"""Name of the folder, in the data folder, with the checkpoints that `checkpoint: auto` writes."""
READY = re.compile(r"fleet: ready at (http://\S+)")
DEFAULT_PORT = 8000
START_S = 600.0
STOP_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFleet:
    """A fleet to measure and its resolved configuration. `config.checkpoint` may still be "auto" if
    this process did not start the fleet.

    `pid`: process that started all other processes of the fleet, None if this process did not start
    the fleet.
    """

    url: str
    config: FleetConfig
    pid: int | None = None

    @property
    def api(self) -> ApiClient:
        return ApiClient(self.url, read_settings().api_key)


def resolve_config(config_file: Path | None, overrides: Sequence[str]) -> FleetConfig:
    """Read the deployment from a configuration file and `--set` overrides, as `fleet up` does.
    Raises: ConfigError naming the field and the fix.
    """
    return open_config(config_file, overrides)[1]


def running_fleet(url: str, port: int, config: FleetConfig) -> TargetFleet:
    """Return the running fleet at `url`. Its configuration is the one that `fleet up` left in the
    data folder of `config`, if that has the same port and graph, else `config`.
    """
    file = config.data_dir / RESOLVED_NAME
    if file.is_file():
        resolved = load_config(file)
        if resolved.web.port == port and resolved.graph == config.graph:
            return TargetFleet(url=url, config=resolved)
    return TargetFleet(url=url, config=config)


@contextmanager
def target_fleet(context: Context, *own: str) -> Iterator[TargetFleet]:
    """Yield the fleet to measure: start it (`--up`), or use the running fleet of `--url`. `own`:
    further overrides for a started fleet. Raises: BenchError.
    """
    options = context.options
    if options.up:
        with started_fleet(context, "starting the fleet", *options.overrides, *own) as target:
            yield target
        return
    config = context.resolve(*own)
    url = options.url or f"{config.web.scheme}://127.0.0.1:{config.web.port or DEFAULT_PORT}"
    yield running_fleet(url, ApiClient(url).port, config)


@contextmanager
def started_fleet(context: Context, label: str, *overrides: str) -> Iterator[TargetFleet]:
    """Run a fleet with `overrides` for the duration of the block, and show its start as progress.
    Raises: BenchError.
    """
    done = context.steps(label)
    with own_fleet(context.options.config, overrides) as target:
        done()
        yield target


@contextmanager
def own_fleet(
    config_file: Path | None, overrides: Sequence[str], redis_url: str | None = None
) -> Iterator[TargetFleet]:
    """Run `fleet up` for the duration of the block, on free loopback ports, without TLS, with its
    own Redis or the Redis at `redis_url`.

    Raises: BenchError with the end of its output if it does not become ready.
    """
    folder = _own_folder(resolve_config(config_file, overrides).data_dir.absolute())
    arguments = ["--config", str(config_file)] if config_file else []
    for text in (*overrides, *own_overrides(folder)):
        arguments += ["--set", text]
    log = folder / LOG_NAME
    env = processes.own_environment(redis_url)
    process = processes.start([*processes.FLEET, "up", *arguments], env, log, signal.SIGTERM)
    try:
        url = _await_ready(process, log)
        config = load_config(folder / RESOLVED_NAME)
        # The folder is removed at the end; the checkpoint behind its link is not.
        checkpoint = str(Path(config.checkpoint).resolve())
        yield TargetFleet(
            url=url, config=config.model_copy(update={"checkpoint": checkpoint}), pid=process.pid
        )
    finally:
        processes.stop([process], STOP_S)
        shutil.rmtree(folder, ignore_errors=True)


def own_overrides(folder: Path) -> tuple[str, ...]:
    """Return the overrides for a fleet of one run: folders below `folder`, a free port on loopback,
    and no TLS.
    """
    own = {
        "web.host": "127.0.0.1",
        "web.port": 0,
        "web.tls": "null",
        "web.tls_cert": "null",
        "web.tls_key": "null",
        "redis.port": "null",
        "data_dir": folder,
        "redis.data_dir": folder / "redis",
    }
    return tuple(f"{key}={value}" for key, value in own.items())


def _own_folder(data_dir: Path) -> Path:
    """Make a data folder for one run. Only generated checkpoints are shared with other runs."""
    checkpoints = data_dir / CHECKPOINTS
    make_private_folder(data_dir)
    make_private_folder(checkpoints)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=data_dir))
    (folder / CHECKPOINTS).symlink_to(checkpoints)
    return folder


def _await_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait for the ready line of `fleet up` in its log and return the address in it. Raises:
    BenchError with the end of the log.
    """
    deadline = time.monotonic() + START_S
    while (ready := READY.search(log.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(
                f"`fleet up` did not become ready; the end of {log}:\n{processes.end_of(log)}"
            )
        time.sleep(POLL_S)
    return ready[1]
