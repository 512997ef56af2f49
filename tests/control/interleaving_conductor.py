"""The conductor of the interleaving check, which drives the real `step`: it reads, decides,
executes one command at a time, and watches leases and grants. Other processes may act in between.
"""

from collections.abc import Iterator

from fleet.conductor.invariants import violations
from fleet.conductor.state import ConductorState, RequestRecord, TaskRecord, TaskState
from fleet.conductor.step import Decision, step
from fleet.core import events as ev
from fleet.core.commands import Command, EndRequest, FenceWorker, GrantTask
from fleet.core.ids import Epoch, RoleName, StageName, WorkerId
from tests.control import interleaving_store as model
from tests.control.interleaving_store import (
    STAGES,
    SUBMITTED,
    Answer,
    MirrorTask,
    R,
    Scripts,
    Store,
)
from tests.control.interleaving_world import MirrorConductor, MirrorWorker, Move, World

MAX_REPEATED = 2
"""Number of events, already read, that may be delivered again."""
Steps = dict[tuple[int, ev.Event], tuple[int, tuple[Command, ...]]]


class Conductor:
    """Possible moves of the conductor. Conductor states are numbered, so that a world stores only a
    number. `split`: stage that has two roles, if any.
    """

    def __init__(self, scripts: Scripts, split: int | None) -> None:
        self.scripts, self.split = scripts, split
        first = {STAGES[split]: RoleName(f"{STAGES[split]}.prefill")} if split is not None else {}
        self.empty_state = ConductorState(first_roles=first)
        self.states: list[ConductorState] = []
        self._numbers: dict[object, int] = {}
        self._steps: Steps = {}
        self.initial = MirrorConductor(known=self._number(self.empty_state))

    def decide(self, state: ConductorState, event: ev.Event) -> Decision:
        return step(state, event)

    def record_of(self, world: World) -> RequestRecord | None:
        """Return the record of the request in the conductor's own state."""
        return self.states[world.conductor.known].requests.get(R)

    def moves(self, world: World) -> Iterator[Move]:
        store, conductor = world.store, world.conductor
        if conductor.phase == "down":
            led = store._replace(term=store.term + 1, events=())
            yield (
                "a conductor leads",
                world._replace(store=led, conductor=MirrorConductor(phase="noted")),
            )
        elif conductor.phase == "noted":
            record = read_request(store)
            state = self.empty_state.with_request(record) if record else self.empty_state
            yield (
                "the conductor reads the hashes",
                world._replace(conductor=MirrorConductor("read", self._number(state))),
            )
        elif conductor.orders:
            after, answer = self.carry_out(store, conductor.orders[0])
            label = f"{type(conductor.orders[0]).__name__} -> {answer}"
            yield (
                label,
                world._replace(
                    store=after, conductor=conductor._replace(orders=conductor.orders[1:])
                ),
            )
        elif conductor.phase == "read":
            facts = missed_facts(store) if self.states[conductor.known].requests else ()
            yield (
                "the conductor reads the missed events",
                world._replace(conductor=conductor._replace(phase="missed", facts=facts)),
            )
        elif conductor.facts:
            yield self._apply(
                world._replace(conductor=conductor._replace(facts=conductor.facts[1:])),
                conductor.facts[0],
            )
        elif conductor.phase == "missed":
            yield "the conductor is up", world._replace(conductor=conductor._replace(phase="up"))
        else:
            yield from self._watch(world)

    def _watch(self, world: World) -> Iterator[Move]:
        store, conductor = world.store, world.conductor
        if conductor.read < len(store.events):
            yield self._apply(
                world._replace(conductor=conductor._replace(read=conductor.read + 1)),
                store.events[conductor.read],
            )
        for worker in sorted(store.late):
            yield self._apply(world, ev.WorkerExpired(worker=WorkerId(worker), deadline_us=0))
        yield from self.overdue(world, early_grants=False)

    def overdue(self, world: World, *, early_grants: bool) -> Iterator[Move]:
        """Yield a move for each grant that the conductor finds unclaimed too long: because its
        worker is gone or, with `early_grants`, only slow.
        """
        record = self.record_of(world)
        for stage, name in enumerate(STAGES if record is not None else ()):
            assert record is not None
            task, seen = world.store.tasks[stage], record.tasks[name]
            if seen.state is not TaskState.GRANTED or task.waits:
                continue
            held = any(
                w.granted_epoch == task.epoch and w.stage == stage and acts(world, w)
                for w in world.workers
            )
            needed = not held and task.state == "granted" and task.epoch == seen.epoch
            if needed != early_grants:
                yield self._apply(world, ev.GrantOverdue(request=R, stage=name, epoch=seen.epoch))

    def _apply(self, world: World, event: ev.Event) -> Move:
        key = (world.conductor.known, event)
        if key not in self._steps:
            state, commands = self.decide(self.states[world.conductor.known], event)
            self._steps[key] = self._number(state), commands
        known, commands = self._steps[key]
        conductor = world.conductor._replace(known=known, orders=commands)
        return f"the conductor reads {_describe(event)}", world._replace(conductor=conductor)

    def carry_out(self, store: Store, command: Command) -> Answer:
        """Run the script of a command as the current leader, like the driver's `_call`."""
        match command:
            case GrantTask(stage=stage, role=role, expected_epoch=at, alone=alone):
                return self.scripts.grant(
                    store, store.term, STAGES.index(stage), at, role, alone=alone
                )
            case EndRequest(state=state):
                return self.scripts.end_request(store, store.term, state)
            case FenceWorker(worker=worker):
                return self.scripts.fence_worker(store, store.term, worker)
            case _:
                raise AssertionError(f"no script for {command}")

    def _number(self, state: ConductorState) -> int:
        records = tuple(
            (
                *((self.comparable(task), task.alone) for task in record.tasks.values()),
                record.ending,
            )
            for record in state.requests.values()
        )
        if records not in self._numbers:
            assert violations(state) == [], violations(state)
            self._numbers[records] = len(self.states)
            self.states.append(state)
        return self._numbers[records]

    def comparable(self, task: TaskRecord) -> tuple[object, ...]:
        """Return a task record that can be compared with the hashes: a task without a role gets its
        stage's first role.
        """
        role = task.role or self.empty_state.first_roles.get(task.stage, RoleName(task.stage))
        return task.state, task.epoch, task.owner, role


def read_request(store: Store) -> RequestRecord | None:
    """Read the one request of the model from the hashes, like the driver's `read_live`."""
    if store.end:
        return None
    tasks = dict(zip(STAGES, map(_record, STAGES, store.tasks), strict=True))
    return RequestRecord(id=R, graph=model.PAIR.name, outputs=SUBMITTED.outputs, tasks=tasks)


def _record(name: StageName, task: MirrorTask) -> TaskRecord:
    return TaskRecord(
        stage=name,
        state=TaskState(task.state),
        epoch=Epoch(task.epoch),
        owner=WorkerId(task.owner) if task.owner else None,
        alone=task.alone,
        role=RoleName(task.role) if task.role else None,
    )


def missed_facts(store: Store) -> tuple[ev.Event, ...]:
    """Derive the events that a conductor missed from the hashes, like the driver's
    `missed_facts`.
    """
    facts: list[ev.Event] = []
    for name, task in zip(STAGES, store.tasks, strict=True):
        epoch = Epoch(task.epoch)
        if task.state == "lost":
            facts.append(
                ev.TaskLost(
                    request=R, stage=name, epoch=epoch, deaths=task.deaths, alone=task.died_alone
                )
            )
        elif task.state == "failed":
            facts.append(
                ev.TaskFailed(request=R, stage=name, epoch=epoch, code="engine_error", message="")
            )
    return tuple(facts)


def tidy(world: World) -> World:
    """Drop events that cannot be read again, so that equivalent worlds compare equal."""
    conductor, events = world.conductor, world.store.events
    if conductor.phase == "down":
        return world._replace(store=world.store._replace(events=())) if events else world
    old = conductor.read - (MAX_REPEATED if world.budget.repeats else 0)
    if old <= 0:
        return world
    return world._replace(
        store=world.store._replace(events=events[old:]),
        conductor=conductor._replace(read=conductor.read - old),
    )


def acts(world: World, worker: MirrorWorker) -> bool:
    return worker.id in world.store.listed and not worker.dead


def _describe(event: ev.Event) -> str:
    values = [
        str(getattr(event, name)) for name in ("stage", "epoch", "worker") if hasattr(event, name)
    ]
    return " ".join([type(event).__name__, *values])
