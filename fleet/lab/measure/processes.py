"""Processes started by a measurement, each in its own process session with its output in a log.
Takes no stage names.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleet.process.parent_death import signalled_with_parent

FLEET = (sys.executable, "-m", "fleet.cli")
TAIL_LINES = 15


def own_environment(redis_url: str | None = None) -> dict[str, str]:
    """Return this process's environment without the variables that would name a port or Redis of
    another fleet. `redis_url`: Redis to use; None for an embedded one.
    """
    own = {
        key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "FLEET_PORT")
    }
    return own if redis_url is None else {**own, "REDIS_URL": redis_url}


def start(
    command: Sequence[str], env: Mapping[str, str], log: Path, with_parent: signal.Signals
) -> "subprocess.Popen[bytes]":
    """Start a command. `with_parent`: signal that the command receives when this process dies.

    Output is appended to the file `log` and not sent through a pipe: if this process is killed, the
    command can still log its stop.
    """
    with log.open("a") as lines:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=signalled_with_parent(with_parent),
        )


def stop(processes: Iterable["subprocess.Popen[bytes]"], timeout_s: float) -> None:
    """Terminate all processes at the same time; kill the process groups that do not end within
    `timeout_s`.
    """
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_of(log: Path) -> str:
    """Return the last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU seconds used by this process and, where the fleet was started here, by each of its
    processes.
    """

    at_s: float
    own_s: float
    cpu_s: dict[str, float]


def read_cpu(pid: int | None) -> CpuTimes:
    """Read the CPU times of this process and of the descendants of `pid`."""
    own = psutil.Process().cpu_times()
    cpu_s: dict[str, float] = {}
    for process in psutil.Process(pid).children(recursive=True) if pid is not None else []:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            times, name = process.cpu_times(), _process_name(process.cmdline())
            cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
    return CpuTimes(at_s=time.monotonic(), own_s=own.user + own.system, cpu_s=cpu_s)


def _process_name(command: Sequence[str]) -> str:
    """Return `worker ROLE` for `python -m fleet.cli worker ROLE --config ...`, and the name of the
    program for other commands.
    """
    if "fleet.cli" not in command:
        return Path(command[0]).name if command else "?"
    arguments = command[command.index("fleet.cli") + 1 :]
    return " ".join(argument for argument in arguments[:2] if not argument.startswith("-"))
