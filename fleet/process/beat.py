"""The beat of a kept process: a few bytes of memory that it shares with its keeper, in which its
loop writes at each turn.

A write costs no system call, cannot block, and needs no other process; the keeper compares the
beats that it reads by its own clock (`fleet.process.silence`). A process without a keeper has no
such memory, and its beats do nothing. Knows no limit and no signal but the one for stacks.
"""

import faulthandler
import math
import mmap
import os
import signal
import struct
import sys
import tempfile
import threading
from dataclasses import dataclass

START_S = 1800.0
"""Longest silence of a process that starts, or joins the fleet again: the time after which the
start of a worker counts as hung.
"""
LEAVING_S = 60.0
"""Longest silence of a process that has ended its loop and is about to end itself."""
UNBOUNDED_S = math.inf
STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a kept process writes the stacks of its threads to stderr."""
OPTION = "fleet_beat"
"""Name of Python's `-X` option by which a new process receives the descriptor of the memory."""
_LAYOUT = struct.Struct("=QddQ")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of a process. `count`: number of beats so far. `waiting_s`, `computing_s`:
    longest silence that the process announced for its loop, while the loop's thread waits and while
    it computes, 0 if none was announced. `thread`: native id of that thread, 0 if the process has
    not beaten itself.
    """

    count: int
    waiting_s: float
    computing_s: float
    thread: int


class BeatRecord:
    """The shared memory of one process's beats. `descriptor`: file descriptor of the memory."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _LAYOUT.size)
        self._count = 0

    @staticmethod
    def create(waiting_s: float = START_S) -> tuple["BeatRecord", int]:
        """Return a new record and the descriptor of its memory, which the caller closes.
        `waiting_s`: longest silence before the first beat.
        """
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, _LAYOUT.size)
        record = BeatRecord(descriptor)
        record._memory[:] = _LAYOUT.pack(0, waiting_s, UNBOUNDED_S, 0)
        return record, descriptor

    def write(self, *, waiting_s: float, computing_s: float, thread: int = 0) -> None:
        self._count += 1
        _LAYOUT.pack_into(self._memory, 0, self._count, waiting_s, computing_s, thread)

    def read(self) -> Beat:
        """Return the last beat. While the process writes, the result may mix two beats; the next
        one is whole.
        """
        return Beat(*_LAYOUT.unpack_from(self._memory, 0))

    def close(self) -> None:
        self._memory.close()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fleet-beat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_own: list[BeatRecord] = []
"""The record of this process; empty without a keeper."""
os.register_at_fork(after_in_child=_own.clear)  # a forked process does not beat for its parent


def adopt(descriptor: int) -> None:
    """Beat in the record at `descriptor`, which is closed, and write this process's stacks to
    stderr on `STACKS_SIGNAL` from now on.
    """
    _own[:] = [BeatRecord(descriptor)]
    os.close(descriptor)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def adopt_inherited() -> None:
    """Beat in the record whose descriptor this process was started with, as `adopt` does. Does
    nothing in a process that was started without one.
    """
    descriptor = sys._xoptions.get(OPTION)  # pyright: ignore[reportPrivateUsage]
    if isinstance(descriptor, str):
        adopt(int(descriptor))


def beat(waiting_s: float = 0.0, computing_s: float = 0.0) -> None:
    """Record a turn of this process's loop. `waiting_s`, `computing_s`: longest time until the next
    beat, while the calling thread waits and while it computes, if longer than the keeper's own
    limit. Does nothing in a process without a keeper.
    """
    if _own:
        thread = threading.get_native_id()
        _own[0].write(waiting_s=waiting_s, computing_s=computing_s, thread=thread)
