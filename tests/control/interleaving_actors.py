"""State of the processes of workers in an interleaving check on a real Redis, and when two worlds
count as the same. Knows no move.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fleet.core.ids import WorkerId
from tests.control.interleaving_redis import NoticeSeen, View

ALONE = "1"
"""Group of a suspect beside which no other task may run."""


class HeldGrant(NamedTuple):
    """A grant that a process has read. `entry`: "" if it came by the inbox or with its group."""

    request: str
    stage: str
    epoch: int
    group: str = ""
    entry: str = ""

    @property
    def pair(self) -> str:
        return f"{self.request}|{self.stage}"


class Run(NamedTuple):
    """A task that a process computes as its owner. `consumed`: number of chunks read, by input."""

    request: str
    stage: str
    epoch: int
    group: str = ""
    consumed: tuple[int, ...] = ()

    @property
    def pair(self) -> str:
        return f"{self.request}|{self.stage}"


class Process(NamedTuple):
    """A place for a worker process, its present process and incarnation. `status`: up, paused (its
    lease has lapsed), dead, or away (it has not joined). `serial`: number of incarnations at this
    place. `was_listed`: whether the present process has joined before.

    `granted`: grants that it has read. `reserved`: suspects that it claims once it runs nothing.
    """

    place: str
    stage: str
    pid: int = 1
    serial: int = 1
    status: str = "up"
    was_listed: bool = True
    granted: tuple[HeldGrant, ...] = ()
    reserved: tuple[HeldGrant, ...] = ()
    runs: tuple[Run, ...] = ()

    @property
    def id(self) -> WorkerId:
        return WorkerId(f"{self.stage}@{self.place}:{self.pid}:{self.serial}")

    def idle(self) -> "Process":
        return self._replace(granted=(), reserved=(), runs=())

    def without(self, request: str, stage: str, below: float = float("inf")) -> "Process":
        """Return the process without its run of a task, if its epoch is lower than `below`."""
        pair = f"{request}|{stage}"
        return self._replace(
            runs=tuple(run for run in self.runs if run.pair != pair or run.epoch >= below)
        )

    def is_untouched(self) -> bool:
        return self.status == "up" and self == Process(self.place, self.stage)


class Faults(NamedTuple):
    """Numbers of faults that may still happen.

    `deaths` and `pauses`: a process that holds something dies, or is paused until its lease lapses.
    `lapses`: the lease of a dead process lapses before its end is observed. `aborts`: the client
    aborts. `losses`: a consumer misses tensors. `progress`: a task appends a chunk that does not
    end it.
    """

    deaths: int = 0
    pauses: int = 0
    lapses: int = 0
    aborts: int = 0
    losses: int = 0
    progress: int = 0


class Actors(NamedTuple):
    """State of the processes. `kills`: number of processes that a task has killed. `ended_with`:
    tasks that ran in the process whose end was observed last.
    """

    processes: tuple[Process, ...]
    faults: Faults
    kills: int = 0
    ended_with: tuple[Run, ...] = ()

    def with_process(self, n: int, process: Process) -> "Actors":
        return self._replace(processes=(*self.processes[:n], process, *self.processes[n + 1 :]))


@dataclass(frozen=True, slots=True, eq=False)
class RealWorld:
    """A state of Redis and of the processes. `key`: equal for worlds that differ only in times and
    in how high their epochs are.
    """

    view: View = field(repr=False)
    dump: bytes = field(repr=False)
    actors: Actors = field(repr=False)
    key: Hashable
    cause: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RealWorld) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


SEEN = (
    "state",
    "owner",
    "reserved_for",
    "alone",
    "deaths",
    "produced",
    "consumed",
    "closed",
    "waits",
    "parked_by",
    "starved",
    "idle_consumed",
)
"""Beginnings of the fields of a task's hash by which scripts decide, except epochs and times."""


class Canonical:
    """What two worlds have in common that differ only in times, in how high their epochs are, and
    in the names of incarnations and halves.
    """

    def __init__(self, view: View, actors: Actors) -> None:
        self._view, self._actors = view, actors
        self._serials = {process.place: process.serial for process in actors.processes}
        self._groups: dict[str, str] = {}

    def key(self) -> Hashable:
        view = self._view
        tasks = tuple(
            (pair, tuple(sorted(self._fields(task)))) for pair, task in sorted(view.tasks.items())
        )
        entries = tuple(
            (role, tuple(self._entry(*entry[:3], entry.is_read) for entry in of))
            for role, of in sorted(view.entries.items())
        )
        inboxes = tuple(
            (self._worker(worker), tuple(self._notice(notice) for notice in of))
            for worker, of in sorted(view.inbox.items())
        )
        evidence = tuple(
            (self._worker(worker), pair, *self._evidence(value))
            for worker, of in sorted(view.evidence.items())
            for pair, value in sorted(of.items())
        )
        halves = tuple(
            (self._group(group), tuple(members))
            for group, members in sorted(view.suspects.items())
            if group in self._groups
        )
        listed = tuple(map(self._worker, sorted(view.listed)))
        requests = tuple(sorted(view.requests.items()))
        actors = self._actors._replace(
            processes=tuple(map(self._process, self._actors.processes)),
            ended_with=tuple(run._replace(epoch=0) for run in self._actors.ended_with),
        )
        return tasks, entries, inboxes, evidence, halves, listed, requests, actors

    def _fields(self, task: dict[str, str]) -> Iterator[tuple[str, str]]:
        for name, value in task.items():
            if name == "alone":
                yield name, self._group(value)
            elif name in ("owner", "reserved_for", "parked_by"):
                yield name, self._worker(value)
            elif name.startswith(SEEN):
                yield name, value

    def _group(self, group: str) -> str:
        if group in ("", ALONE):
            return group
        return self._groups.setdefault(group, f"half {len(self._groups)}")

    def _worker(self, worker: str) -> str:
        """Return a name for an incarnation by its age."""
        _, found, place = worker.partition("@")
        if not found or place.startswith("test:"):
            return worker
        name, _, serial = place.split(":")
        return f"{name}-{self._serials[name] - int(serial)}"

    def _entry(self, pair: str, epoch: str, group: str, is_read: str) -> tuple[str | bool, ...]:
        return pair, self._view.is_current(pair, epoch), self._group(group), is_read

    def _notice(self, notice: NoticeSeen) -> tuple[str | bool, ...]:
        pair = f"{notice.request}|{notice.stage}"
        current = self._view.is_current(pair, notice.epoch)
        return notice.kind, pair, current, self._group(notice.group)

    def _evidence(self, value: str) -> tuple[str, str]:
        produced, _, group = value.partition("|")
        return produced, self._group(group)

    def _process(self, process: Process) -> Process:
        """Return the process with 1 for each epoch that is its task's, and 0 for an older one."""
        return process._replace(
            pid=0,
            serial=0,
            granted=tuple(map(self._grant, process.granted)),
            reserved=tuple(map(self._grant, process.reserved)),
            runs=tuple(
                run._replace(
                    epoch=int(self._view.is_current(run.pair, run.epoch)),
                    group=self._group(run.group),
                )
                for run in process.runs
            ),
        )

    def _grant(self, grant: HeldGrant) -> HeldGrant:
        return grant._replace(
            epoch=int(self._view.is_current(grant.pair, grant.epoch)),
            group=self._group(grant.group),
            entry="entry" if grant.entry else "",
        )
