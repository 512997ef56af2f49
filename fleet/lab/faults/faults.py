"""Injection of faults into the busiest process of a role, into Redis or into clients, one after
another; each fault waits until the fleet has recovered from the last.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import psutil

from fleet.core.ids import StageName
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.event_log import EventLog
from fleet.lab.faults.processes import ExtraProcesses, find_processes, listening_port
from fleet.lab.faults.recovery import Recovery
from fleet.lab.faults.redis_faults import RedisFaults
from fleet.lab.faults.save_clock import SaveClock
from fleet.lab.faults.schedule import (
    CLIENTS,
    CONDUCTOR,
    GATEWAY,
    REDIS,
    SIGNALS,
    Fault,
    FaultKind,
    Moment,
    name_of,
)
from fleet.lab.faults.slow import SlowReaders
from fleet.lab.faults.watch import FleetWatch, Member

RECOVERY_TIMEOUT_S = 300.0
"""Time limit of a recovery: on a machine whose cores are all busy, loading a worker takes
minutes.
"""
TAKEN_OVER_S = 0.5
"""Time for which a frozen process stays frozen after its lease has lapsed, so that other workers
own its tasks when it resumes.
"""
CLIENTS_RESUME_S = 15.0
"""Time for the clients of a frozen gateway to resume at another."""
BUSY_TIMEOUT_S = 3.0
MOMENT_TIMEOUT_S = 20.0
"""Longest wait for a hand-off or a save; the fault is then injected without one."""
POLL_S, CHOOSE_POLL_S = 0.1, 0.01


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was injected, and its effect. `target`: id of the worker, gateway or leading
    conductor, or a description of the Redis server or the slow clients. `requests`: ids of the
    affected requests; () for a fault in Redis.

    `moment`: event for which the fault waited; `in_moment`: whether that event, an unconfirmed
    hand-off or a save, was still under way when the signal was sent. Units: seconds since the phase
    began; `until_s`: time at which a stopped process was resumed, Redis was repaired, or clients
    stopped reading slowly, else `at_s`. `recovered_s`: duration from the fault until the fleet was
    complete again, None if that took longer than `RECOVERY_TIMEOUT_S`.
    """

    role: str
    kind: FaultKind
    target: str
    requests: tuple[str, ...]
    at_s: float
    until_s: float
    recovered_s: float | None
    moment: Moment = Moment.ANY
    in_moment: bool = False
    recovery: Recovery = Recovery()

    @property
    def signal(self) -> str:
        """Name of the fault in reports: a signal such as "SIGKILL", or the kind of the fault."""
        return name_of(self.kind)

    @property
    def outcome(self) -> str:
        if self.recovered_s is None:
            return "not recovered"
        return f"recovered after {self.recovered_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FaultTarget:
    """A process to inject a fault into. `is_open`: returns True while the awaited event (a hand-off
    or a save) is still under way.
    """

    member: Member
    process: psutil.Process
    is_open: Callable[[], bool] = lambda: False

    @staticmethod
    def of(worker: str, is_open: Callable[[], bool]) -> "_FaultTarget | None":
        """Return the target for a worker id, None if its process has ended. Uses the pid in the id,
        since a search through all processes would outlast the event.
        """
        member = Member.of(worker)
        with contextlib.suppress(psutil.NoSuchProcess):
            return _FaultTarget(member=member, process=psutil.Process(member.pid), is_open=is_open)
        return None


class FaultInjector:
    """Injects faults into a fleet, one after another. A process that leaves after SIGTERM is
    started again by the injector; a process killed by SIGKILL is restarted by its keeper.
    """

    def __init__(
        self,
        watch: FleetWatch,
        event_log: EventLog,
        extras: ExtraProcesses,
        redis_faults: RedisFaults | None,
        saves: SaveClock,
    ) -> None:
        self._watch = watch
        self._event_log = event_log
        self._extras = extras
        self._redis_faults = redis_faults
        self._saves = saves
        self._now_s: Callable[[], float] = time.perf_counter
        self._pause = threading.Event()

    def inject_all(
        self,
        faults: Iterable[Fault],
        now_s: Callable[[], float],
        report: Callable[[InjectedFault], None],
        slow: SlowReaders | None = None,
    ) -> list[InjectedFault]:
        """Inject `faults` in order and return them with their effects. Stops early if the fleet
        does not recover. `now_s`: clock of the phase. `report`: called with each injected fault.
        `slow`: clients that read slowly; required if `faults` contains a fault in clients.
        """
        self._now_s = now_s
        injected: list[InjectedFault] = []
        for fault in faults:
            self._pause.wait(fault.pause_s)
            if fault.role == CLIENTS:
                assert slow is not None, "a run with slow readers has them"
                injected.append(self._read_slowly(fault, slow))
            else:
                inject = self._inject_in_redis if fault.role == REDIS else self._inject
                injected.append(inject(fault))
            report(injected[-1])
            if injected[-1].recovered_s is None:
                break
        return injected

    def wait_until_complete(self) -> bool:
        """Wait until the fleet is complete; return False after `RECOVERY_TIMEOUT_S`."""
        return self._wait(self._watch.is_complete)

    def _inject_in_redis(self, fault: Fault) -> InjectedFault:
        assert self._redis_faults is not None, "a run with faults in Redis has a Redis of its own"
        target, at_s = f"redis at port {self._redis_faults.servers.primary.port}", self._now_s()
        self._redis_faults.inject(fault)
        until_s = self._now_s()
        return InjectedFault(
            role=REDIS,
            kind=fault.kind,
            target=target,
            requests=(),
            at_s=at_s,
            until_s=until_s,
            recovered_s=self._now_s() - at_s if self.wait_until_complete() else None,
        )

    def _read_slowly(self, fault: Fault, slow: SlowReaders) -> InjectedFault:
        at_s = self._now_s()
        until_s, requests = slow.read(self._now_s)
        return InjectedFault(
            role=CLIENTS,
            kind=fault.kind,
            target=f"{slow.count} clients",
            requests=tuple(requests),
            at_s=at_s,
            until_s=until_s,
            recovered_s=self._now_s() - at_s if self.wait_until_complete() else None,
        )

    def _inject(self, fault: Fault) -> InjectedFault:
        target = self._at_moment(fault) or self._busiest(fault.role)
        member, process = target.member, target.process
        replacement = _command(fault.role, process)
        fault_us, at_s = self._event_log.now_us(), self._now_s()
        stopped = [*find_processes("worker").values()] if fault.in_all_workers else [process]
        affected = self._watch.live_requests() if fault.in_all_workers else member.requests
        for each in stopped:
            _send(each, signal.Signals[SIGNALS[fault.kind]])
        in_moment = target.is_open()
        in_time = self._hold(fault, member, process, stopped)
        until_s = self._now_s() if fault.kind in (FaultKind.STOP, FaultKind.PAUSE) else at_s
        if fault.kind is FaultKind.TERM:
            self._extras.start(replacement)
        complete = in_time and self.wait_until_complete()
        recovered_s = self._now_s() - at_s if complete else None
        registered = "" if fault.role == GATEWAY else fault.role
        recovery = self._event_log.recovery_since(fault_us, member.id, registered)
        return InjectedFault(
            role=fault.role,
            kind=fault.kind,
            target=member.id,
            # Both: clients of a killed gateway may resume before it is fenced, and a hand-off
            # leaves no time to read its tasks.
            requests=tuple(dict.fromkeys((*affected, *recovery.requests))),
            at_s=at_s,
            until_s=until_s,
            recovered_s=recovered_s,
            moment=fault.moment,
            in_moment=in_moment,
            recovery=recovery,
        )

    def _hold(
        self,
        fault: Fault,
        member: Member,
        process: psutil.Process,
        stopped: Sequence[psutil.Process],
    ) -> bool:
        """Wait for the effect of a fault whose signal was sent. A PAUSE ends when the process is
        resumed; any other fault ends when the process has exited or was resumed, and has left the
        fleet. Return False if that takes too long.
        """
        if fault.kind is FaultKind.PAUSE:
            try:
                self._pause.wait(fault.leases * self._watch.lease_s(fault.role))
            finally:
                for each in stopped:
                    _send(each, signal.SIGCONT)
            return True
        if fault.kind is FaultKind.STOP:
            in_time = self._resume(process, member)
        else:
            in_time = self._wait(lambda: _has_ended(process))
        return in_time and self._wait_until_gone(member)

    def _at_moment(self, fault: Fault) -> _FaultTarget | None:
        """Wait for the event of a fault (`Moment`) and return the process to hit; None if the event
        does not come in time, or its worker has ended.
        """
        stage = StageName(fault.role.partition(".")[0])
        if fault.moment is Moment.HAND_OFF:
            return self._in_hand_off(stage, from_source=self._watch.hands_off(fault.role))
        return self._in_save(stage, fault) if fault.moment is Moment.SAVE else None

    def _in_hand_off(self, stage: StageName, *, from_source: bool) -> _FaultTarget | None:
        """Wait for the next hand-off of a stage and return its source worker if `from_source`, else
        its destination; None if there is none in time or the worker's process has ended.
        """
        hand_off = self._event_log.next_hand_off(
            stage, from_source=from_source, timeout_s=MOMENT_TIMEOUT_S
        )
        if hand_off is None:
            return None
        return _FaultTarget.of(hand_off.worker, lambda: self._event_log.is_open(hand_off))

    def _in_save(self, stage: StageName, fault: Fault) -> _FaultTarget | None:
        """Wait for the next save, and return a process of the fault's role that takes part in the
        save: the worker whose KV blocks are copied, or a span worker of its route. Return None if
        no save begins in time, or the process has ended.
        """
        save = self._saves.next_save(stage, share=fault.severity, timeout_s=MOMENT_TIMEOUT_S)
        workers = [] if save is None else save.workers_of(fault.role)
        if save is None or not workers:
            return None
        worker = workers[int(fault.severity * 1000) % len(workers)]
        return _FaultTarget.of(worker, lambda: self._saves.is_open(save))

    def _busiest(self, role: str) -> _FaultTarget:
        """Return the process of a role that has the most tasks. If no process has a task, wait up
        to `BUSY_TIMEOUT_S` for one.

        Raises: ChaosError if the role has no process.
        """
        # By process and not by pid: psutil refuses a pid that now belongs to another process.
        processes = find_processes(*_command(role))
        deadline_s = self._now_s() + BUSY_TIMEOUT_S
        while True:
            members = [member for member in self._watch.members(role) if member.pid in processes]
            busiest = max(members, key=lambda member: len(member.requests), default=None)
            late = self._now_s() > deadline_s
            if busiest is not None and (busiest.requests or role == CONDUCTOR or late):
                return _FaultTarget(member=busiest, process=processes[busiest.pid])
            if late:
                raise ChaosError(
                    f"no process serves {role}, although no fault was injected since the fleet "
                    "was complete"
                )
            self._pause.wait(CHOOSE_POLL_S)

    def _resume(self, process: psutil.Process, member: Member) -> bool:
        """Keep a frozen process stopped until its lease has lapsed and other workers own its tasks,
        or until the clients of a gateway have resumed at another gateway; then resume the process.
        Return False if the lease did not lapse in time.
        """
        try:
            lapsed = self._wait_until_gone(member)
            self._pause.wait(TAKEN_OVER_S)
            if member.role == GATEWAY:
                self._wait(lambda: not self._watch.has_unassigned_consumers(), CLIENTS_RESUME_S)
            return lapsed
        finally:
            _send(process, signal.SIGCONT)

    def _wait_until_gone(self, member: Member) -> bool:
        return self._wait(lambda: not self._watch.is_registered(member))

    def _wait(self, reached: Callable[[], bool], timeout_s: float = RECOVERY_TIMEOUT_S) -> bool:
        deadline_s = self._now_s() + timeout_s
        while not reached():
            if self._now_s() > deadline_s:
                return False
            self._pause.wait(POLL_S)
        return True


def gateway_command(port: int) -> list[str]:
    """Return the `fleet` command that starts an additional gateway on `port`."""
    return [GATEWAY, "--set", f"web.port={port}"]


def _command(role: str, process: psutil.Process | None = None) -> list[str]:
    """Return the `fleet` command of a role. `process`: process that the new one replaces at the
    same address.
    """
    if role == GATEWAY and process is not None:
        return gateway_command(listening_port(process))
    return [role] if role in (CONDUCTOR, GATEWAY) else ["worker", role]


def _send(process: psutil.Process, signum: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _has_ended(process: psutil.Process) -> bool:
    """Return True if the process has ended, even if its parent has not waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
