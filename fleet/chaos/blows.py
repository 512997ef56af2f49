"""Striking: one blow after another at the replica that hurts most, each when the fleet has recovered from the one before."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable

import msgspec
import psutil

from fleet.chaos.errors import ChaosError
from fleet.chaos.processes import Extras, find
from fleet.chaos.schedule import CONDUCTOR, SIGNALS, Blow, How
from fleet.chaos.watch import Member, Watch

PATIENCE_S = 300.0
"""A machine whose cores are all taken needs minutes to load a worker, and slow is not lost."""
TAKEN_OVER_S = 0.5
"""How long a frozen process stays frozen after it has lost its right, so that others work on what it held when it wakes."""
AT_WORK_S = 3.0
POLL_S, CHOOSE_POLL_S = 0.1, 0.01


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One blow that fell. `num_tasks` is what the victim owned at that moment; the victim among conductors is the leader.

    Units: seconds since the phase began; `until_s` is when a stopped process went on, else `at_s`. `whole_s` is how long the
    fleet then lacked somebody, None where it still did after `PATIENCE_S`.
    """

    role: str
    how: How
    victim: str
    num_tasks: int
    at_s: float
    until_s: float
    whole_s: float | None

    @property
    def signal(self) -> str:
        return SIGNALS[self.how]


class Striker:
    """Carries blows out. Whom SIGTERM made leave for good is replaced here; whom SIGKILL took, its keeper starts again."""

    def __init__(self, watch: Watch, extras: Extras, now_s: Callable[[], float]) -> None:
        self._watch, self._extras, self._now_s = watch, extras, now_s
        self._pause = threading.Event()

    def strike_all(self, blows: Iterable[Blow], tell: Callable[[Hit], None]) -> list[Hit]:
        """Ends early if the fleet does not become whole again: the next blow would tell nothing new."""
        hits: list[Hit] = []
        for blow in blows:
            self._pause.wait(blow.pause_s)
            hits.append(self._strike(blow))
            tell(hits[-1])
            if hits[-1].whole_s is None:
                break
        return hits

    def await_whole(self) -> bool:
        """Whether the fleet became whole in time."""
        return self._until(self._watch.is_whole)

    def _strike(self, blow: Blow) -> Hit:
        victim, process = self._choose(blow.role)
        at_s = until_s = self._now_s()
        match blow.how:
            case How.KILL:
                process.kill()
                in_time = self._until(lambda: _has_ended(process))
            case How.TERM:
                process.terminate()
                in_time = self._until(lambda: _has_ended(process))
                self._extras.start(_words(blow.role))
            case How.STOP:
                in_time = self._freeze(process, victim)
                until_s = self._now_s()
        whole = in_time and self._until(lambda: not self._watch.is_listed(victim)) and self.await_whole()
        return Hit(
            role=blow.role, how=blow.how, victim=victim.id, num_tasks=victim.num_tasks, at_s=at_s, until_s=until_s,
            whole_s=self._now_s() - at_s if whole else None,
        )  # fmt: skip

    def _choose(self, role: str) -> tuple[Member, psutil.Process]:
        """Who holds most tasks, at a moment when somebody holds one, if such a moment comes soon: short tasks are easily missed.

        Raises: ChaosError if nobody is there to be struck.
        """
        # By process and not by pid alone: psutil refuses a pid that was given to another one meanwhile.
        processes = find(*_words(role))
        deadline_s = self._now_s() + AT_WORK_S
        while True:
            there = [member for member in self._watch.members(role) if member.pid in processes]
            victim = max(there, key=lambda member: member.num_tasks, default=None)
            late = self._now_s() > deadline_s
            if victim is not None and (victim.num_tasks or role == CONDUCTOR or late):
                return victim, processes[victim.pid]
            if late:
                raise ChaosError(f"nobody serves {role}, although chaos had done nothing to it since the fleet was whole")
            self._pause.wait(CHOOSE_POLL_S)

    def _freeze(self, process: psutil.Process, victim: Member) -> bool:
        process.suspend()
        try:
            lapsed = self._until(lambda: not self._watch.is_listed(victim))
            self._pause.wait(TAKEN_OVER_S)
            return lapsed
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def _until(self, reached: Callable[[], bool]) -> bool:
        deadline_s = self._now_s() + PATIENCE_S
        while not reached():
            if self._now_s() > deadline_s:
                return False
            self._pause.wait(POLL_S)
        return True


def _words(role: str) -> list[str]:
    """The words of `fleet` that run such a process."""
    return [CONDUCTOR] if role == CONDUCTOR else ["worker", role]


def _has_ended(process: psutil.Process) -> bool:
    """One that was not collected yet has ended too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
