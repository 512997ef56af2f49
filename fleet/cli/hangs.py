"""Detection of hung processes by their keepers: a process that is stopped, or whose loop stands
still.

A keeper looks at its process several times per lease: at the beats that the process's loop writes
(`fleet.process.beat`), and at the state of the loop's thread. Redis cannot beat; its keeper asks it
instead, and each answer counts as a beat.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet.config.schema import RENEWALS, LeaseConfig
from fleet.process import background
from fleet.process.beat import STACKS_SIGNAL, UNBOUNDED_S, Beat, BeatRecord
from fleet.process.silence import STOPPED, Silence, thread_state

MIN_INTERVAL_S = 0.05
MIN_SILENCE_S = 1.0
"""Shortest silence after which a process may count as hung, however short the worker lease is."""
STACKS_S = 0.5
"""Seconds that a hung process gets to write the stacks of its threads."""
ANSWERING_S = 10.0
"""Longest time without a reply from Redis while it does not compute; after it Redis counts as hung.
A slow disk may delay replies for seconds.
"""
COMPUTING_S = 60.0
"""Longest time without a reply from Redis while it computes, for example a client's long script."""
NO_BEAT = Beat(count=0, waiting_s=UNBOUNDED_S, computing_s=UNBOUNDED_S, thread=0)
Answers = Callable[[float], Awaitable[bool]]
"""Async function that asks a process, within the given seconds, and returns True if it answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangWatch:
    """The limits by which a keeper decides that its process hangs. `lease_s`: duration of a worker
    lease; silence counts from two leases on. `starting_s`: longest silence before the first beat.
    `answers`: asks a process that writes no beats itself (Redis); None for other processes.
    """

    lease_s: float
    starting_s: float = UNBOUNDED_S
    answers: Answers | None = None

    @property
    def interval_s(self) -> float:
        return max(self.lease_s / RENEWALS, MIN_INTERVAL_S)

    def complaint(self, silence: Silence, beat: Beat) -> str:
        """Return why the process counts as hung, as a clause about it; "" if it does not."""
        least_s = max(2 * self.lease_s, MIN_SILENCE_S)
        if silence.stopped_s >= least_s:
            return f"it has been stopped for {silence.stopped_s:.1f} s"
        if silence.waiting_s >= max(least_s, beat.waiting_s):
            return f"its loop has stood still for {silence.total_s:.1f} s"
        if silence.total_s >= max(least_s, beat.waiting_s, beat.computing_s):
            return f"its loop has computed for {silence.total_s:.1f} s without a turn"
        return ""

    async def until_hung(self, pid: int, record: BeatRecord | None) -> str:
        """Watch process `pid` until it counts as hung; return why. `record`: beats of the process;
        None if it has no beats, and so counts as hung only when it is stopped.
        """
        if record is None or self.answers is None:
            return await self._watch(pid, record)
        asking = background.start(self._ask(record, self.answers), "the question to a process")
        try:
            return await self._watch(pid, record)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _watch(self, pid: int, record: BeatRecord | None) -> str:
        loop, silence = asyncio.get_running_loop(), Silence(self.interval_s)
        while True:
            beat = record.read() if record is not None else NO_BEAT
            silence.observe(loop.time(), beat.count, lambda at=beat.thread: thread_state(pid, at))
            if complaint := self.complaint(silence, beat):
                return complaint
            await asyncio.sleep(self.interval_s)

    async def _ask(self, record: BeatRecord, answers: Answers) -> None:
        while True:
            if await answers(self.lease_s):
                record.write(waiting_s=ANSWERING_S, computing_s=COMPUTING_S)
            await asyncio.sleep(self.lease_s)


def hang_watch(lease: LeaseConfig, *, starting_s: float) -> HangWatch | None:
    """Return the watch that a deployment configures for a process; None if it is switched off."""
    if not lease.end_hung_processes:
        return None
    return HangWatch(lease_s=lease.worker_ttl_s, starting_s=starting_s)


async def write_stacks(pid: int, beat: Beat) -> str:
    """Let a hung process write the stacks of its threads to its output, unless it is stopped or
    writes no beats. Return the kernel's state of its threads, one line for each different state.
    """
    state = thread_state(pid)
    if beat.thread and state is not None and state.letter != STOPPED:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            await asyncio.sleep(STACKS_S)
    states = Counter(_kernel_states(Path(f"/proc/{pid}/task")))
    return "\n".join(f"  {number} x {state}" for state, number in states.items())


def _kernel_states(tasks: Path) -> Iterator[str]:
    """Yield for each thread in a folder of `/proc` its name, its state, and where it waits in the
    kernel, as far as this user may read that.
    """
    for task in sorted(tasks.glob("*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            place = _read(task / "stack") or _read(task / "wchan") or "unknown place"
            yield f"{name}, state {rest[:1]}, in {place}"


def _read(path: Path) -> str:
    """Return the content of a file in one line; "" if this user may not read it."""
    try:
        return " < ".join(line.split()[-1] for line in path.read_text().splitlines() if line)
    except OSError:
        return ""
