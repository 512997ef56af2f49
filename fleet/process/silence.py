"""Silence of a loop: the time in which it has made no progress, according to an observer that looks
at regular intervals. The observer is the process's keeper, or a thread of the same process.

Silence is added up from the observer's own intervals. An interval that lasted far too long means
that the observer was suspended, perhaps together with the loop (a closed lid, a paused host); it
proves nothing, and the count begins again. Knows no limit.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

LATE_S = 1.0
"""Lower bound of the interval, in seconds, after which an observer takes itself to have been
suspended. The bound is five usual intervals if that is longer.
"""
CLOCK_HZ = 100
"""Ticks per second of the CPU times in `/proc` on every Linux."""
STOPPED, TRACED, WORKING = "T", "t", "RD"
"""States of threads: stopped by a signal; stopped by a debugger; running, or waiting for a disk."""
_LETTERS = {
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_DISK_SLEEP: "D",
}


@dataclass(frozen=True, slots=True)
class ThreadState:
    """State of a thread, as a letter of `/proc/PID/stat`, and its CPU time in seconds."""

    letter: str
    cpu_s: float


def thread_state(pid: int, thread: int = 0) -> ThreadState | None:
    """Return the state of a thread, the main one by default; None if it has ended. Elsewhere than
    on Linux, return the state of the whole process.
    """
    if sys.platform != "linux":
        return _process_state(pid)
    try:
        stat = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(") ")[2].split()
    if fields[0] in "ZX":
        return None
    return ThreadState(fields[0], (int(fields[11]) + int(fields[12])) / CLOCK_HZ)


def _process_state(pid: int) -> ThreadState | None:
    try:
        process = psutil.Process(pid)
        times, status = process.cpu_times(), process.status()
    except psutil.NoSuchProcess:
        return None
    return ThreadState(_LETTERS.get(status, "S"), times.user + times.system)


class Silence:
    """The silence of one loop. `interval_s`: usual interval between two observations.

    Units: seconds since the last beat that the observer saw. `total_s`: whole silence. `waiting_s`:
    the part of `total_s` in which the loop's thread neither ran nor waited for a disk. `stopped_s`:
    how long the thread has been stopped by a signal without a break.
    """

    def __init__(self, interval_s: float) -> None:
        self._most_s, self._late_s = 2 * interval_s, max(5 * interval_s, LATE_S)
        self._observed_s: float | None = None
        self._count = -1
        self._cpu_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self.total_s = 0.0
        self.waiting_s = 0.0
        self.stopped_s = 0.0

    def observe(self, now_s: float, count: int, look: Callable[[], ThreadState | None]) -> None:
        """Add the interval since the last observation. Begin again at 0 if the loop has beaten, its
        thread has ended or is in a debugger, or the observer was suspended. `now_s`: the observer's
        monotonic time; `count`: number of the loop's beats so far; `look`: returns the state of the
        loop's thread, None if the thread has ended.
        """
        before_s, self._observed_s = self._observed_s, now_s
        elapsed_s = 0.0 if before_s is None else now_s - before_s
        state = look()
        cpu_s, self._cpu_s = self._cpu_s, state.cpu_s if state is not None else 0.0
        has_beaten, self._count = count != self._count, count
        was_suspended = elapsed_s > self._late_s
        if has_beaten or was_suspended or state is None or state.letter == TRACED:
            self._begin()
            return
        elapsed_s = min(elapsed_s, self._most_s)
        self.total_s += elapsed_s
        self.stopped_s = self.stopped_s + elapsed_s if state.letter == STOPPED else 0.0
        if state.letter not in WORKING and state.cpu_s <= cpu_s:
            self.waiting_s += elapsed_s
