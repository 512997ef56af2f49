"""Watch over the NIXL agents of a process: an agent whose progress thread spins without progress,
or that cannot be closed, is noticed.

Such an agent is beyond repair (see `closing`): it costs a core and its memory until its process
ends. A healthy progress thread sleeps at least once in `PROGRESS_DELAY_US` unless messages arrive.
So the measure is the CPU time that a thread has used since it last slept, or since a read of its
agent last ended; on a busy machine it grows more slowly, and in a frozen process not at all. Knows
no peers.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from fleet.core.errors import TransferStopped
from fleet.transfer import closing
from fleet.transfer.closing import AgentClosing

log = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
STALLED_CPU_S, STUCK_CPU_S = 2.0, 10.0
"""CPU time of a progress thread without a sleep or an ended read, after which its agent is
reported, and after which it counts as stuck.
"""
STUCK_S = 60.0
"""Time without a sleep or an ended read after which a reported agent counts as stuck, on a machine
where its thread gets less CPU time. An agent whose close takes this long counts as stuck too.
"""
_numbers = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadUse:
    """Use of the CPU by a thread. `num_sleeps`: number of times that the thread has given up the
    CPU by itself.
    """

    cpu_s: float
    num_sleeps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """Names of the agents of this process that make no progress. `stuck`: agents among `stalled`
    without progress for so long that the process must start again.
    """

    stalled: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rest:
    """Observation of a thread when its number of sleeps, or its agent's number of ended reads, was
    last seen to change. `cpu_s`: CPU time of the thread. `at_s`: time of `time.monotonic`.
    """

    num_sleeps: int
    num_ended: int
    cpu_s: float
    at_s: float


@dataclass(eq=False, slots=True, kw_only=True)
class WatchedAgent:
    """An agent that is not closed. `threads`: kernel ids of its threads. `num_ended`: number of its
    reads that have ended. `closing`: close of the agent, once that has begun.
    """

    name: str
    threads: tuple[int, ...] = ()
    num_ended: int = 0
    closing: AgentClosing | None = None
    _is_logged: bool = False
    _at_rest: dict[int, _Rest] = field(default_factory=dict[int, _Rest])

    def spun_s(self) -> tuple[float, float]:
        """Return the longest time for which a thread of the agent has been seen without a sleep or
        an ended read: first as CPU time of the thread, then as elapsed time.
        """
        longest_s = (0.0, 0.0)
        for thread in self.threads:
            use, now_s = read_use(thread), time.monotonic()
            if use is None:
                continue
            rest = self._at_rest.get(thread)
            if rest is None or (rest.num_sleeps, rest.num_ended) != (
                use.num_sleeps,
                self.num_ended,
            ):
                self._at_rest[thread] = _Rest(use.num_sleeps, self.num_ended, use.cpu_s, now_s)
            else:
                longest_s = max(longest_s, (use.cpu_s - rest.cpu_s, now_s - rest.at_s))
        return longest_s

    def log_once(self, spun_s: float, closing_s: float) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        log.warning(
            "the NIXL agent %s makes no progress: its thread has used %.1f s of CPU time without a "
            "pause%s; a peer was probably killed while it wrote a message",
            self.name,
            spun_s,
            f", and it has not closed for {closing_s:.1f} s" if self.closing else "",
        )

    def closing_s(self) -> float:
        """Return the time since the close of the agent began; 0 before that."""
        return time.monotonic() - self.closing.began_s if self.closing is not None else 0.0


class AgentWatch:
    """The agents of this process that are not closed. Any thread may call its methods; `observe` is
    called regularly.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: set[WatchedAgent] = set()

    def add(self, agent: WatchedAgent) -> WatchedAgent:
        with self._lock:
            self._agents.add(agent)
        return agent

    def remove(self, agent: WatchedAgent) -> None:
        with self._lock:
            self._agents.discard(agent)

    def observe(self) -> AgentReport:
        """Return the agents that make no progress, after logging each of them once."""
        with self._lock:
            agents = list(self._agents)
        stalled: list[str] = []
        stuck: list[str] = []
        for agent in agents:
            (spun_s, since_s), closing_s = agent.spun_s(), agent.closing_s()
            if spun_s < STALLED_CPU_S and closing_s < closing.CLOSE_S:
                continue
            stalled.append(agent.name)
            agent.log_once(spun_s, closing_s)
            if spun_s >= STUCK_CPU_S or max(since_s, closing_s) >= STUCK_S:
                stuck.append(agent.name)
        return AgentReport(stalled=tuple(stalled), stuck=tuple(stuck))


WATCH = AgentWatch()


def check_agents(report: AgentReport) -> None:
    """Raise TransferStopped if agents of this process are stuck."""
    if report.stuck:
        raise TransferStopped(
            "NIXL agents of this process neither progress nor can be closed: "
            f"{', '.join(report.stuck)}; the process must start again"
        )


@contextmanager
def found_threads() -> Iterator[list[int]]:
    """Yield a list that contains, after the `with` block, the kernel ids of the threads that this
    thread has started within it, found by their name, which a thread inherits.
    """
    found: list[int] = []
    own = threading.get_native_id()
    name_file = TASKS / str(own) / "comm"
    former, name = _read(own, "comm"), f"nixl-{next(_numbers)}"
    try:
        name_file.write_text(name)
    except OSError:  # another system than Linux, or a process that may not write to its own /proc
        yield found
        return
    try:
        yield found
    finally:
        name_file.write_text(former.rstrip("\n"))
        found += [
            int(task)
            for task in os.listdir(TASKS)
            if int(task) != own and _read(int(task), "comm").strip() == name
        ]


def read_use(thread: int) -> ThreadUse | None:
    """Return a thread's use of the CPU; None if the thread has ended."""
    stat, status = _read(thread, "stat"), _read(thread, "status")
    _, found, sleeps = status.partition("\nvoluntary_ctxt_switches:")
    if not stat or not found:
        return None
    # After the name in parentheses, which may contain spaces: state, then ten fields, user and
    # system time.
    user, system = stat.rpartition(")")[2].split()[11:13]
    return ThreadUse(
        cpu_s=(int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
        num_sleeps=int(sleeps.split(maxsplit=1)[0]),
    )


def _read(thread: int, name: str) -> str:
    """Return the content of a thread's file in `/proc`; "" if the thread has ended, or the system
    has no such files.
    """
    try:
        return (TASKS / str(thread) / name).read_text(errors="replace")
    except OSError:
        return ""
