"""Samples of what a fleet occupies: Redis's memory and keys; memory, open files and threads of each
process. Judges nothing.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from fleet.control.connect import connect
from fleet.control.keys import PREFIX
from fleet.lab.faults.patience import patiently
from fleet.lab.faults.processes import KEEP, fleet_arguments

KEEPER = "keeper"
HISTORY = (f"{PREFIX}series:*", f"{PREFIX}gone:*")


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of a process. `kind`: command of the process, with the role of a worker.
    `pss_bytes`: memory with the process's share of shared pages.
    """

    kind: str
    pid: int
    rss_bytes: int
    pss_bytes: int
    files: int
    threads: int


class SoakSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet occupies at one moment. `sent`: number of requests sent until then.
    `history_keys`: number of those `keys` that store time series and records of ended processes,
    whose number grows for hours and days. Units: `at_s` in seconds since the first request.
    """

    at_s: float
    sent: int
    redis_bytes: int
    keys: int
    history_keys: int
    processes: tuple[ProcessSample, ...]


class FleetSampler:
    """Takes samples of this process's descendants and the fleet's Redis every `interval_s`, on its
    own thread, from `start` to `stop`.
    """

    def __init__(
        self, redis_url: str, interval_s: float, progress: Callable[[], tuple[float, int]]
    ) -> None:
        """Connect to Redis; `start` begins to sample. `progress`: returns the time since the first
        request and the number of requests sent.
        """
        self._redis = connect(redis_url)
        self._interval_s, self._progress = interval_s, progress
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[SoakSample] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop."""
        self._stopped.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        while True:
            last = self._stopped.is_set()
            self.samples.append(self._sample())
            if last:
                return
            self._stopped.wait(self._interval_s)

    @patiently
    def _sample(self) -> SoakSample:
        at_s, sent = self._progress()
        return SoakSample(
            at_s=at_s,
            sent=sent,
            redis_bytes=int(self._redis.info("memory")["used_memory"]),
            keys=int(self._redis.dbsize()),
            history_keys=sum(
                1 for pattern in HISTORY for _ in self._redis.scan_iter(match=pattern, count=2000)
            ),
            processes=tuple(sample_processes()),
        )


def sample_processes() -> list[ProcessSample]:
    """Return a sample of each descendant of this process; processes that end meanwhile are left
    out.
    """
    found: list[ProcessSample] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            kind = process_kind(process.cmdline())
            if kind:
                found.append(
                    ProcessSample(
                        kind=kind,
                        pid=process.pid,
                        rss_bytes=memory.rss,
                        pss_bytes=getattr(memory, "pss", memory.rss),
                        files=process.num_fds(),
                        threads=process.num_threads(),
                    )
                )
    return found


def process_kind(command: list[str]) -> str:
    """Return the kind of a process from its command line: `worker` with its role, another `fleet`
    command, `keeper`, or a program's name; "" if it has ended.
    """
    if not command:
        return ""
    if KEEP in command:
        return KEEPER
    arguments = fleet_arguments(command)
    if not arguments:
        return Path(command[0].split(" ")[0]).name
    return " ".join(arguments[: 2 if arguments[:1] == ["worker"] else 1])
