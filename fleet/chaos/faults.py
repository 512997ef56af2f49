"""Striking: one blow after another at the replica that hurts most, each when the fleet has recovered from the one before."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import psutil

from fleet.chaos.errors import ChaosError
from fleet.chaos.event_log import EventLog, HandOff
from fleet.chaos.processes import Extras, find, listening_port
from fleet.chaos.recovery import Recovery
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, SIGNALS, Fault, How
from fleet.chaos.watch import Member, Watch
from fleet.core.ids import StageName

PATIENCE_S = 300.0
"""A machine whose cores are all taken needs minutes to load a worker, and slow is not lost."""
TAKEN_OVER_S = 0.5
"""How long a frozen process stays frozen after it has lost its right, so that others work on what it held when it wakes."""
HEARD_AGAIN_S = 15.0
"""How long a frozen gateway's listeners may take to ask another."""
AT_WORK_S = 3.0
HAND_OFF_S = 20.0
"""How long a blow waits for a hand-off before it falls all the same."""
POLL_S, CHOOSE_POLL_S = 0.1, 0.01


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One blow that fell. `requests` are those of whose tasks the victim owned one; among conductors the victim is the leader.

    `aimed`: it waited for a hand-off; `in_hand_off`: nobody had confirmed that hand-off when the signal was sent.
    Units: seconds since the phase began; `until_s` is when a stopped process went on, else `at_s`. `whole_s` is how long the
    fleet then lacked somebody, None where it still did after `PATIENCE_S`.
    """

    role: str
    how: How
    victim: str
    requests: tuple[str, ...]
    at_s: float
    until_s: float
    whole_s: float | None
    aimed: bool = False
    in_hand_off: bool = False
    after: Recovery = Recovery()

    @property
    def signal(self) -> str:
        return SIGNALS[self.how]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    victim: Member
    process: psutil.Process
    hand_off: HandOff | None = None


class FaultInjector:
    """Carries blows out. Whom SIGTERM made leave for good is replaced here; whom SIGKILL took, its keeper starts again."""

    def __init__(self, watch: Watch, trail: EventLog, extras: Extras) -> None:
        self._watch, self._trail, self._extras = watch, trail, extras
        self._now_s: Callable[[], float] = time.perf_counter
        self._pause = threading.Event()

    def strike_all(
        self, blows: Iterable[Fault], now_s: Callable[[], float], tell: Callable[[InjectedFault], None]
    ) -> list[InjectedFault]:
        """`now_s` is the phase's clock. Ends early if the fleet does not become whole again: another blow would tell nothing."""
        self._now_s = now_s
        hits: list[InjectedFault] = []
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

    def _strike(self, blow: Fault) -> InjectedFault:
        target = self._choose(blow)
        victim, process = target.victim, target.process
        words = _words(blow.role, process)
        blow_us, at_s = self._trail.now_us(), self._now_s()
        match blow.how:
            case How.KILL:
                process.kill()
            case How.TERM:
                process.terminate()
            case How.STOP:
                process.suspend()
        in_hand_off = target.hand_off is not None and self._trail.is_under_way(target.hand_off)
        if blow.how is How.STOP:
            in_time = self._thaw(process, victim)
        else:
            in_time = self._until(lambda: _has_ended(process))
        until_s = self._now_s() if blow.how is How.STOP else at_s
        if blow.how is How.TERM:
            self._extras.start(words)
        whole = in_time and self._until(lambda: not self._watch.is_listed(victim)) and self.await_whole()
        whole_s = self._now_s() - at_s if whole else None
        registered = "" if blow.role == GATEWAY else blow.role
        after = self._trail.after(victim.id, registered, blow_us)
        # Both: a killed gateway's listeners may be elsewhere before it is fenced, and a hand-off leaves no time to ask.
        requests = tuple(dict.fromkeys((*victim.requests, *after.requests)))
        return InjectedFault(
            role=blow.role, how=blow.how, victim=victim.id, requests=requests, at_s=at_s, until_s=until_s, whole_s=whole_s,
            aimed=blow.in_hand_off, in_hand_off=in_hand_off, after=after,
        )  # fmt: skip

    def _choose(self, blow: Fault) -> _Target:
        """Raises: ChaosError if nobody is there to be struck."""
        aimed = self._in_hand_off(blow.role) if blow.in_hand_off else None
        return aimed or self._busiest(blow.role)

    def _in_hand_off(self, role: str) -> _Target | None:
        """Either side of the next hand-off, if one comes soon, and its worker is still there."""
        stage = StageName(role.partition(".")[0])
        giving = self._watch.gives_away(role)
        hand_off = self._trail.next_hand_off(stage, giving=giving, patience_s=HAND_OFF_S)
        if hand_off is None:
            return None
        # No search through all processes now: the hand-off lasts milliseconds.
        victim = Member.of(hand_off.worker)
        with contextlib.suppress(psutil.NoSuchProcess):
            return _Target(victim=victim, process=psutil.Process(victim.pid), hand_off=hand_off)
        return None

    def _busiest(self, role: str) -> _Target:
        """Who holds most tasks, at a moment when somebody holds one, if such a moment comes soon: short tasks are easily missed.

        Raises: ChaosError if nobody is there to be struck.
        """
        # By process and not by pid alone: psutil refuses a pid that was given to another one meanwhile.
        processes = find(*_words(role))
        deadline_s = self._now_s() + AT_WORK_S
        while True:
            there = [member for member in self._watch.members(role) if member.pid in processes]
            victim = max(there, key=lambda member: len(member.requests), default=None)
            late = self._now_s() > deadline_s
            if victim is not None and (victim.requests or role == CONDUCTOR or late):
                return _Target(victim=victim, process=processes[victim.pid])
            if late:
                raise ChaosError(f"nobody serves {role}, although chaos had done nothing to it since the fleet was whole")
            self._pause.wait(CHOOSE_POLL_S)

    def _thaw(self, process: psutil.Process, victim: Member) -> bool:
        """Let a frozen process go on once others work on what it held, and a gateway's listeners have turned to another."""
        try:
            lapsed = self._until(lambda: not self._watch.is_listed(victim))
            self._pause.wait(TAKEN_OVER_S)
            if victim.role == GATEWAY:
                self._until(lambda: not self._watch.has_unheard(), HEARD_AGAIN_S)
            return lapsed
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def _until(self, reached: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        deadline_s = self._now_s() + patience_s
        while not reached():
            if self._now_s() > deadline_s:
                return False
            self._pause.wait(POLL_S)
        return True


def gateway_words(port: int) -> list[str]:
    """One that listens elsewhere than the deployment says, so that there may be two."""
    return [GATEWAY, "--set", f"web.port={port}"]


def _words(role: str, process: psutil.Process | None = None) -> list[str]:
    """The words of `fleet` that run such a process; with `process`, one to take its place, where listeners look for it."""
    if role == GATEWAY and process is not None:
        return gateway_words(listening_port(process))
    return [role] if role in (CONDUCTOR, GATEWAY) else ["worker", role]


def _has_ended(process: psutil.Process) -> bool:
    """One that was not collected yet has ended too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
