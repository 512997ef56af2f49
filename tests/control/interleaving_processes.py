"""Moves of worker processes in an interleaving check on a real Redis, of their keepers and of the
leading conductor. What the tasks do is defined by subclasses of `RealFleet`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import Reply, first_text, text, texts
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec
from tests.control.interleaving_actors import (
    ALONE,
    Actors,
    Canonical,
    Faults,
    HeldGrant,
    Process,
    RealWorld,
    Run,
)
from tests.control.interleaving_redis import Command, Mutation, RealStore, View

GATEWAY, CONDUCTOR = WorkerId("gateway@test:1:0"), WorkerId("conductor@test")
LEASE_US, LATER_US = 36_000_000_000, 9_000_000_000_000_000


class PlannedMove(NamedTuple):
    """A possible move: commands to run in order, and what the processes are after their replies.
    `expected`: answer of the last command, "" for any.
    """

    label: str
    commands: Sequence[Command]
    settle: Callable[[list[Reply]], Actors]
    expected: str = ""


class RealFleet(ABC):
    """Possible moves of worker processes. `slots`: number of tasks that a worker runs at once.
    `reads`: number of grants that it reads at once.
    """

    stages: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    slots, reads = 1, 99

    def __init__(
        self,
        client: redis.Redis,
        processes: str,
        faults: Faults,
        *,
        num_requests: int = 1,
        faulty: str = "ABCDE",
    ) -> None:
        """Describe the fleet. `processes`: places, and behind each `:` the stage that it serves.
        `faulty`: places whose processes may have faults.
        """
        self.client, self.faulty = client, faulty
        self.requests = [f"r{number}" for number in range(num_requests)]
        self.leader = ""
        self.actors = Actors(
            tuple(
                Process(place, stage)
                for place, _, stage in (word.partition(":") for word in processes.split())
            ),
            faults,
        )

    def begin(self, mutation: Mutation | None = None) -> RealWorld:
        """Submit the requests to an empty Redis, and return this state."""
        self.store = RealStore(self.client, mutation)
        workers = [(process.id, process.stage) for process in self.actors.processes]
        registered = [self._register(*worker) for worker in (*workers, (GATEWAY, ""))]
        submitted = [
            scripts.submit(
                RequestSpec(
                    id=RequestId(request),
                    graph="text",
                    prompt_ids=(1,),
                    outputs=tuple(EdgeName(name) for name in self.outputs),
                ),
                None,
                bound=99,
                stages=[StageName(stage) for stage in self.stages],
                edges=[EdgeName(edge) for edge in self.edges],
                gateway=GATEWAY,
            )
            for request in self.requests
        ]
        leading = scripts.lead(CONDUCTOR, "", 600_000)
        replies, view, dump = self.store.begin([leading, *registered, *submitted])
        self.leader, *answers = map(first_text, replies)
        assert set(answers) == {"ok"}, answers
        return self.world(view, dump, self.actors)

    def _register(self, worker: WorkerId, stage: str) -> Command:
        fields: dict[str, str | bytes] = {"kind": "test", "capacity": str(self.slots)}
        return scripts.register(worker, stage, LEASE_US, fields)

    def world(self, view: View, dump: bytes, actors: Actors, cause: str = "") -> RealWorld:
        return RealWorld(view, dump, actors, Canonical(view, actors).key(), cause)

    def after(
        self, world: RealWorld, plans: Sequence[PlannedMove]
    ) -> Iterator[tuple[str, RealWorld]]:
        """Make each move in the world; yield its name, with the replies, and the world after it."""
        results = self.store.run(world.dump, [plan.commands for plan in plans])
        for plan, (replies, view, dump) in zip(plans, results, strict=True):
            answers = ", ".join(_brief(reply) for reply in replies)
            label = f"{plan.label} -> {answers}"
            assert not plan.expected or answers.endswith(plan.expected), label
            yield label, self.world(view, dump, plan.settle(replies), plan.label)

    def plans(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield all possible moves that are not faults."""
        yield from self._leader_plans(world)
        for n, process in enumerate(world.actors.processes):
            if process.status == "up":
                if not self._is_spare(world.actors, n):
                    yield from self._worker_plans(world, n, process)
            elif process.status == "dead":
                yield self._observe_end(world, n, process)
            elif process.status == "paused":
                yield self._wake(world, n, process)
            else:
                yield self._join(world, n, process)
        yield from self.client_plans(world)

    def faults(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield the faults that are still to happen."""
        actors, faults = world.actors, world.actors.faults
        for n, process in enumerate(actors.processes):
            if process.place not in self.faulty:
                continue
            holds = process.granted or process.reserved or process.runs
            if faults.deaths and process.status != "dead" and (holds or self._died_late(process)):
                left = actors._replace(faults=faults._replace(deaths=faults.deaths - 1))
                yield _silent(f"{process.id} dies", self.dead(left, n, process))
            if faults.pauses and process.status == "up" and holds:
                left = actors._replace(faults=faults._replace(pauses=faults.pauses - 1))
                paused = left.with_process(n, process._replace(status="paused"))
                yield self._lapse(world, process, paused)
            if faults.lapses and process.status == "dead" and process.id in world.view.listed:
                left = actors._replace(faults=faults._replace(lapses=faults.lapses - 1))
                yield self._lapse(world, process, left)
        yield from self.task_faults(world)

    def _died_late(self, process: Process) -> bool:
        """Return True if a process may die that has lost its lease and reported that it left."""
        return process.status == "paused" or (process.status == "away" and process.was_listed)

    def dead(self, actors: Actors, n: int, process: Process) -> Actors:
        return actors.with_process(n, process._replace(status="dead", granted=(), reserved=()))

    @abstractmethod
    def writes(self, pair: str, epoch: int) -> list[Command]:
        """Return calls of every script that needs the right of the owner at this epoch."""

    def accepted_late_writes(self, world: RealWorld) -> list[str]:
        """Return the writes that are accepted although the task is parked, or runs elsewhere."""
        view = world.view
        stale = {
            (run.pair, run.epoch)
            for process in world.actors.processes
            for run in process.runs
            if not view.is_current(run.pair, run.epoch)
        }
        stale |= {
            (pair, int(task["epoch"]))
            for pair, task in view.tasks.items()
            if task["state"] == "parked"
        }
        tried = [(pair, self.writes(pair, epoch)) for pair, epoch in sorted(stale)]
        calls = [(pair, call) for pair, of in tried for call in of]
        if not calls:
            return []
        wrong: list[str] = []
        try:
            results = list(self.store.run(world.dump, [[call for _, call in calls]]))
        except AssertionError as error:
            return [f"a former owner's writes are not refused: {error}"]
        for replies, after, dump in results:
            wrong += [
                f"{call} of a former owner of {pair} was answered {_brief(reply)}"
                for (pair, call), reply in zip(calls, replies, strict=True)
                if _brief(reply) not in ("stale", "ended")
            ]
            if not wrong and self.world(after, dump, world.actors) != world:
                wrong.append(f"a former owner's writes change {sorted(stale)}")
        return wrong

    @abstractmethod
    def run_plans(
        self, world: RealWorld, n: int, process: Process, run: Run
    ) -> Iterator[PlannedMove]:
        """Yield the moves of an owner."""

    @abstractmethod
    def client_plans(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield the moves of the client."""

    @abstractmethod
    def task_faults(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield the faults of tasks and requests."""

    def claim(self, process: Process, grant: HeldGrant) -> Command:
        return scripts.claim(
            process.id,
            RoleName(process.stage),
            grant.entry,
            RequestId(grant.request),
            StageName(grant.stage),
            Epoch(grant.epoch),
            *self.edges_of(grant.stage),
        )

    def edges_of(self, stage: str) -> tuple[tuple[EdgeName, ...], dict[EdgeName, StageName]]:
        """Return a stage's input edges, and its output edges with their consumers."""
        return (), {EdgeName(self.edges[0]): CLIENT}

    def _is_spare(self, actors: Actors, n: int) -> bool:
        """Return True if the moves of another process that has done nothing cover this one's."""
        process = actors.processes[n]
        return process.is_untouched() and any(
            other.is_untouched() and other.stage == process.stage for other in actors.processes[:n]
        )

    # The leading conductor and the keepers

    def _leader_plans(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield the decision about grants that nobody will claim, if any: their time passes."""
        view = world.view
        granted = [pair for pair, task in view.tasks.items() if task["state"] == "granted"]
        coming = {
            grant.pair
            for process in world.actors.processes
            for grant in (*process.granted, *process.reserved)
            if process.status == "up" and view.is_current(grant.pair, grant.epoch)
        }
        coming |= {
            f"{notice.request}|{notice.stage}"
            for notices in view.inbox.values()
            for notice in notices
            if view.is_current(f"{notice.request}|{notice.stage}", notice.epoch)
        }
        coming |= {
            entry.pair
            for entries in view.entries.values()
            for entry in entries
            if not entry.is_read and view.is_current(entry.pair, entry.epoch)
        }
        due = [pair for pair in granted if pair not in coming]
        if due:
            wait = [pair for pair in granted if pair in coming]
            later = [("ZADD", keys.PREFIX + "granted", "XX", LATER_US, pair) for pair in wait]
            commands = [*later, scripts.overdue(self.leader, 0, None)]
            yield PlannedMove(f"overdue: {due}", commands, lambda _: world.actors, "ok")

    def _lapse(self, world: RealWorld, process: Process, after: Actors) -> PlannedMove:
        deadline_us = int(float(world.view.listed[process.id]))
        call = scripts.fence_worker(self.leader, process.id, deadline_us=deadline_us)
        return PlannedMove(f"the lease of {process.id} lapses", [call], lambda _: after, "ok")

    def _observe_end(self, world: RealWorld, n: int, process: Process) -> PlannedMove:
        """Return the move of a keeper that sees a process end, and starts another one."""
        reborn = process.idle()._replace(
            pid=process.pid + 1, serial=process.serial + 1, status="away", was_listed=False
        )
        after = world.actors.with_process(n, reborn)._replace(ended_with=process.runs)
        calls = [scripts.fence_worker("", process.id, died=True, cause="killed")]
        return PlannedMove(
            f"the end of {process.id} is observed",
            calls if process.was_listed else [],
            lambda _: after,
        )

    def _wake(self, world: RealWorld, n: int, process: Process) -> PlannedMove:
        """Return the move of a paused process that learns that it was fenced: it drops its work and
        reports that it has left.
        """
        after = world.actors.with_process(n, process.idle()._replace(status="away"))
        call = scripts.fence_worker("", process.id)
        return PlannedMove(f"{process.id} wakes and leaves", [call], lambda _: after, "ok")

    def _join(self, world: RealWorld, n: int, process: Process) -> PlannedMove:
        serial = process.serial + process.was_listed
        joined = process._replace(status="up", serial=serial, was_listed=True)
        after = world.actors.with_process(n, joined)
        call = self._register(joined.id, joined.stage)
        return PlannedMove(f"{joined.id} joins", [call], lambda _: after, "ok")

    # Grants

    def _worker_plans(self, world: RealWorld, n: int, process: Process) -> Iterator[PlannedMove]:
        view = world.view
        is_exclusive = bool(process.reserved) or any(run.group for run in process.runs)
        free = self.slots - len(process.runs) - len(process.granted)
        free = 0 if is_exclusive else min(free, self.reads)
        has_unread = any(
            not entry.is_read
            for stream in keys.role_streams(RoleName(process.stage))
            for entry in view.entries.get(stream.removeprefix(keys.PREFIX + "role:"), [])
        )
        if process.id in view.inbox or (free > 0 and has_unread):
            yield self._read(world, n, process, max(free, 0))
        if process.granted:
            yield self._accept(world, n, process)
        elif process.reserved and not process.runs:
            yield self._take_group(world, n, process)
        for run_ in process.runs:
            yield from self.run_plans(world, n, process, run_)

    def _read(self, world: RealWorld, n: int, process: Process, free: int) -> PlannedMove:
        """Return a read of the inbox, and of grants for free slots."""
        inbox = world.view.inbox.get(process.id, [])
        commands: list[Command] = [("XTRIM", keys.inbox(process.id), "MAXLEN", 0)]
        commands.append(scripts.read_grants(process.id, RoleName(process.stage), free))

        def settle(replies: list[Reply]) -> Actors:
            after, grants = process, list[HeldGrant]()
            for notice in inbox:
                if notice.kind == "g":
                    epoch = int(notice.epoch)
                    grants.append(HeldGrant(notice.request, notice.stage, epoch, notice.group))
                elif notice.kind == "y":
                    after = after.without(notice.request, notice.stage, int(notice.epoch))
                else:
                    after = after.without(notice.request, process.stage)
            entries = replies[1] if isinstance(replies[1], list) else []
            for entry, values in cast("list[tuple[bytes, list[bytes]]]", entries):
                _, request, _, stage, _, epoch, _, group = texts(values)
                grants.append(HeldGrant(request, stage, int(epoch), group, text(entry)))
            held = {run.pair for run in after.runs} & {grant.pair for grant in grants}
            assert not held, f"{process.id} reads a grant of {held}, which it still runs"
            return world.actors.with_process(n, after._replace(granted=(*process.granted, *grants)))

        return PlannedMove(f"{process.id} reads", commands, settle)

    def _accept(self, world: RealWorld, n: int, process: Process) -> PlannedMove:
        """Return the claims of ordinary grants, and the reservations of suspects."""
        ordinary = [grant for grant in process.granted if not grant.group]
        suspects = [grant for grant in process.granted if grant.group]
        held = [*process.reserved, *suspects]
        commands: list[Command] = [self.claim(process, grant) for grant in ordinary]
        commands += [self._reserve(process, grant) for grant in held]

        def settle(replies: list[Reply]) -> Actors:
            runs = _claimed(ordinary, replies)
            reserved = _reserved(held, replies[len(ordinary) :])
            after = process._replace(granted=(), reserved=reserved, runs=(*process.runs, *runs))
            return world.actors.with_process(n, after)

        return PlannedMove(f"{process.id} claims", commands, settle)

    def _take_group(self, world: RealWorld, n: int, process: Process) -> PlannedMove:
        """Return the claims of the suspects that are next to run here without others."""
        group = process.reserved[0].group
        taken = [grant for grant in process.reserved if grant.group == group]
        taken = taken[:1] if group == ALONE else taken
        left = tuple(grant for grant in process.reserved if grant not in taken)

        def settle(replies: list[Reply]) -> Actors:
            after = process._replace(
                reserved=_reserved(left, replies[len(taken) :]), runs=_claimed(taken, replies)
            )
            return world.actors.with_process(n, after)

        commands: list[Command] = [self.claim(process, grant) for grant in taken]
        commands += [self._reserve(process, grant) for grant in left]
        return PlannedMove(f"{process.id} claims suspects", commands, settle)

    def _reserve(self, process: Process, grant: HeldGrant) -> Command:
        return scripts.reserve(
            process.id,
            RoleName(process.stage),
            grant.entry,
            RequestId(grant.request),
            StageName(grant.stage),
            Epoch(grant.epoch),
        )


def _claimed(grants: Sequence[HeldGrant], replies: Sequence[Reply]) -> tuple[Run, ...]:
    return tuple(
        Run(grant.request, grant.stage, grant.epoch, grant.group)
        for grant, reply in zip(grants, replies, strict=False)
        if first_text(reply) == "ok"
    )


def _reserved(grants: Sequence[HeldGrant], replies: Sequence[Reply]) -> tuple[HeldGrant, ...]:
    """Return the grants that are still reserved, with those of their groups."""
    reserved: list[HeldGrant] = []
    for grant, reply in zip(grants, replies, strict=True):
        answer, *rest = texts(reply)
        if answer != "ok":
            continue
        group, *others = rest
        reserved.append(grant._replace(entry=""))
        for request, stage, epoch in zip(others[::3], others[1::3], others[2::3], strict=True):
            reserved.append(HeldGrant(request, stage, int(epoch), group))
    return tuple(dict.fromkeys(reserved))


def _silent(label: str, after: Actors) -> PlannedMove:
    return PlannedMove(label, [], lambda _: after)


def _brief(reply: Reply) -> str:
    if not isinstance(reply, list):
        return text(reply)
    parts = cast("list[Reply]", reply)
    return text(parts[0]) if parts and isinstance(parts[0], bytes) else f"{len(parts)} grants"
