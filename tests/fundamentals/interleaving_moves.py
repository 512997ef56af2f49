"""Everything that can happen next to a small fleet: its workers, its client, its conductor, and faults while the budget lasts.

The conductor is the real `step` and `resume`; it carries out one command at a time, and everybody else may act in between. Knows
no order: `interleaving_search` tries them all.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fleet.conductor.invariants import violations
from fleet.conductor.state import ConductorState, RequestRecord, TaskRecord, TaskState
from fleet.conductor.step import Decision, resume, step
from fleet.core import events as ev
from fleet.core.commands import Command, EndRequest, FenceWorker, GrantTask
from fleet.core.ids import Epoch, StageName, WorkerId
from tests.fundamentals import interleaving_store as model
from tests.fundamentals.interleaving_store import CONSUMER, PRODUCER, STAGES, SUBMITTED, Answer, R, Scripts, Store, Task

RETOLD = 2
"""How many events that were read already may be told again."""


class Worker(NamedTuple):
    """One place for a worker; `born` counts its incarnations. `hand`: epoch of a grant that was read and not yet claimed.

    `run`: the epoch it believes to own its task at, 0 for none. Of a producer's: `again`, logged chunks whose new place it has
    yet to tell. Of a consumer's: `taken` chunks, and `told`, whose loss it has reported.
    """

    place: str
    stage: int
    born: int = 0
    dead: bool = False
    hand: int = 0
    run: int = 0
    again: tuple[int, ...] = ()
    taken: int = 0
    told: str = ""

    @property
    def id(self) -> str:
        return f"{self.place}{self.born}"


class Boss(NamedTuple):
    """The conductor. Phases: down, noted (the last event's id), read (the hashes), up.

    `known` numbers its state; `read` counts events; `facts` are those that the hashes told it, `orders` commands not yet sent.
    """

    phase: str = "up"
    known: int = 0
    facts: tuple[ev.Event, ...] = ()
    orders: tuple[Command, ...] = ()
    read: int = 0


class Budget(NamedTuple):
    """What may still go wrong: deaths and freezes of workers that hold something, deaths of the conductor, events told again,
    grants repeated though their worker is only slow, failures.
    """

    deaths: int = 0
    freezes: int = 0
    crashes: int = 0
    retold: int = 0
    hasty: int = 0
    failures: int = 0


class World(NamedTuple):
    store: Store
    workers: tuple[Worker, ...]
    boss: Boss
    budget: Budget

    def with_worker(self, n: int, worker: Worker, store: Store | None = None) -> "World":
        workers = (*self.workers[:n], worker, *self.workers[n + 1 :])
        return World(store or self.store, workers, self.boss, self.budget)


Move = tuple[str, World]
Steps = dict[tuple[int, ev.Event], tuple[int, tuple[Command, ...]]]


class Fleet:
    """The moves of one setting: which workers there are, and how the scripts and the conductor behave."""

    def __init__(
        self, places: str, budget: Budget, scripts: Scripts | None = None,
        *, frail: int = PRODUCER, sizes: tuple[int, int] = (2, 1), reports_once: bool = False,
    ) -> None:  # fmt: skip
        """`places`: one letter a worker, upper case for the producer's role. `frail`: the stage whose workers have faults.
        `sizes`: chunks each stage makes. `reports_once`: a consumer says once, and never again, what it lost.
        """
        self.frail = frail
        self.scripts = scripts or Scripts()
        self.reports_once = reports_once
        self.states: list[ConductorState] = []
        self._numbers: dict[object, int] = {}
        self._steps: Steps = {}
        workers = tuple(Worker(place, PRODUCER if place.isupper() else CONSUMER) for place in places)
        store = Store(sizes, listed=frozenset(worker.id for worker in workers), events=(SUBMITTED,))
        self.start = World(store, workers, Boss(known=self._number(ConductorState())), budget)

    def decide(self, state: ConductorState, event: ev.Event) -> Decision:
        return step(state, event)

    def ended(self, world: World) -> bool:
        """The request has ended, and the conductor knows."""
        return bool(world.store.end) and world.boss.phase == "up" and not self.states[world.boss.known].requests

    def faults(self, world: World) -> Iterator[Move]:
        """What the budget allows to go wrong."""
        budget, boss = world.budget, world.boss
        if world.store.end == "" and (budget.deaths or budget.freezes or budget.failures):
            yield from self._worker_faults(world)
        if budget.crashes and boss.phase != "down":
            after = budget._replace(crashes=budget.crashes - 1)
            yield "the conductor dies", _tidy(world._replace(boss=Boss(phase="down"), budget=after))
        if budget.retold and boss.read and self._is_idle(boss):
            after = budget._replace(retold=budget.retold - 1)
            yield "events are told again", world._replace(boss=boss._replace(read=0), budget=after)
        if budget.hasty and self._is_idle(boss):
            after = budget._replace(hasty=budget.hasty - 1)
            for label, late in self._overdue(world, hasty=True):
                yield label, late._replace(budget=after)

    def _worker_faults(self, world: World) -> Iterator[Move]:
        store, budget = world.store, world.budget
        for n, worker in enumerate(world.workers):
            holds = worker.hand or worker.run or worker.id in store.at
            if worker.id not in store.listed or worker.dead or worker.stage != self.frail or not holds:
                continue
            late = store._replace(late=store.late | {worker.id})
            if budget.deaths:
                left = budget._replace(deaths=budget.deaths - 1)
                yield f"{worker.id} dies", world.with_worker(n, worker._replace(dead=True), late)._replace(budget=left)
            if budget.freezes and worker.id not in store.late:
                left = budget._replace(freezes=budget.freezes - 1)
                yield f"{worker.id} freezes", world._replace(store=late, budget=left)
            if budget.failures and worker.run and store.tasks[worker.stage].state != "finished":
                left = budget._replace(failures=budget.failures - 1)
                after, answer = self.scripts.fail(store, worker.stage, worker.run)
                failed = _tidy(world.with_worker(n, _idle(worker), after)._replace(budget=left))
                yield f"{worker.id}: fail -> {answer}", failed

    def moves(self, world: World) -> Iterator[Move]:
        """What happens without a fault."""
        for label, after in self._moves(world):
            yield label, _tidy(after)

    def _moves(self, world: World) -> Iterator[Move]:
        yield from self._boss_moves(world)
        if world.store.end:
            return
        for n, worker in enumerate(world.workers):
            if worker.id not in world.store.listed:
                reborn = Worker(worker.place, worker.stage, worker.born + 1)
                store = world.store._replace(listed=world.store.listed | {reborn.id})
                yield f"{reborn.id} joins", world.with_worker(n, reborn, store)
                if worker.run and not worker.dead and worker.stage == PRODUCER:
                    yield from self._relocate(world, n, worker)
            elif not worker.dead:
                yield from self._worker_moves(world, n, worker)
        size = world.store.sizes[CONSUMER]
        if world.store.taken_by_client < world.store.tasks[CONSUMER].produced == size:
            store, answer = self.scripts.ack_by_client(world.store, size)
            yield f"the client has taken all -> {answer}", world._replace(store=store)

    def _worker_moves(self, world: World, n: int, worker: Worker) -> Iterator[Move]:
        store = world.store
        task = store.tasks[worker.stage]
        if worker.id in store.late:
            yield f"{worker.id}: renew", world._replace(store=store._replace(late=store.late - {worker.id}))
        if worker.hand:
            after, answer = self.scripts.claim(store, worker.id, worker.stage, worker.hand)
            opened = _idle(worker)._replace(hand=0)
            if answer == "ok":
                opened = opened._replace(run=worker.hand, again=tuple(range(len(store.at))) if worker.stage == PRODUCER else ())
            yield f"{worker.id}: claim -> {answer}", world.with_worker(n, opened, after)
        elif task.waits and not worker.run and not _is_spare(world, n):
            taken = store.with_task(worker.stage, task._replace(waits=False))
            yield f"{worker.id} reads a grant", world.with_worker(n, worker._replace(hand=task.epoch), taken)
        if worker.run:
            yield from self._produce(world, n, worker, task)
            yield from self._relocate(world, n, worker) if worker.stage == PRODUCER else self._consume(world, n, worker)

    def _produce(self, world: World, n: int, worker: Worker, task: Task) -> Iterator[Move]:
        """The next chunk; one that makes again what the log holds whole ends with the last chunk told twice."""
        last = world.store.sizes[worker.stage] - 1
        index = min(task.produced, last)
        if task.state == "finished" or (worker.stage == CONSUMER and worker.taken < self._needed(world.store, index)):
            return
        store = world.store
        if worker.stage == CONSUMER:
            store, _ = self.scripts.ack(store, worker.run, worker.taken)
        store, answer = self.scripts.append(store, worker.id, worker.stage, worker.run, index, finish=index == last)
        done = answer in ("stale", "ended") or (index == last and not worker.again)
        yield f"{worker.id}: append {index} -> {answer}", world.with_worker(n, _idle(worker) if done else worker, store)

    def _needed(self, store: Store, index: int) -> int:
        """How much of its input the consumer must have for a chunk; for its last one all."""
        all_, last = store.sizes[PRODUCER], store.sizes[CONSUMER] - 1
        return all_ if index == last else min(index + 1, all_)

    def _relocate(self, world: World, n: int, worker: Worker) -> Iterator[Move]:
        if worker.again:
            index, *rest = worker.again
            store, answer = self.scripts.relocate(world.store, worker.id, worker.run, index)
            over = answer == "stale" or (not rest and store.tasks[PRODUCER].state == "finished")
            after = _idle(worker) if over else worker._replace(again=tuple(rest))
            yield f"{worker.id}: relocate {index} -> {answer}", world.with_worker(n, after, store)

    def _consume(self, world: World, n: int, worker: Worker) -> Iterator[Move]:
        store = world.store
        if worker.taken == store.tasks[PRODUCER].produced:
            return
        holder = store.at[worker.taken]
        if holder not in store.listed:
            if worker.told != holder or (not self.reports_once and self._is_quiet(world)):
                after, answer = self.scripts.lose_tensors(store, worker.run)
                told = worker._replace(told=holder)
                yield f"{worker.id}: lose_tensors of {worker.taken} -> {answer}", world.with_worker(n, told, after)
        elif not any(other.dead and other.id == holder for other in world.workers):
            yield f"{worker.id} takes {worker.taken}", world.with_worker(n, worker._replace(taken=worker.taken + 1, told=""))

    def _is_quiet(self, world: World) -> bool:
        """Nothing under way would bring what the consumer waits for, so that it has waited long."""
        idle = self._is_idle(world.boss) and world.boss.read == len(world.store.events)
        remade = any(worker.again for worker in world.workers)
        return idle and world.store.tasks[PRODUCER].state == "finished" and not remade

    def _is_idle(self, boss: Boss) -> bool:
        return boss.phase == "up" and not boss.orders and not boss.facts

    def _boss_moves(self, world: World) -> Iterator[Move]:
        store, boss = world.store, world.boss
        if boss.phase == "down":
            led = store._replace(term=store.term + 1, events=())
            yield "a conductor leads", world._replace(store=led, boss=Boss(phase="noted"))
        elif boss.phase == "noted":
            record = read_request(store)
            state, orders = resume(ConductorState(), record) if record else (ConductorState(), ())
            yield "it reads the hashes", world._replace(boss=Boss("read", self._number(state), (), orders))
        elif boss.orders:
            after, answer = self.carry_out(store, boss.orders[0])
            label = f"{type(boss.orders[0]).__name__} -> {answer}"
            yield label, world._replace(store=after, boss=boss._replace(orders=boss.orders[1:]))
        elif boss.phase == "read":
            facts = missed_facts(store) if self.states[boss.known].requests else ()
            yield "it reads what was missed", world._replace(boss=boss._replace(phase="up", facts=facts))
        elif boss.facts:
            yield self._apply(world._replace(boss=boss._replace(facts=boss.facts[1:])), boss.facts[0])
        else:
            yield from self._watch(world)

    def _watch(self, world: World) -> Iterator[Move]:
        store, boss = world.store, world.boss
        if boss.read < len(store.events):
            yield self._apply(world._replace(boss=boss._replace(read=boss.read + 1)), store.events[boss.read])
        for worker in sorted(store.late):
            yield self._apply(world, ev.WorkerExpired(worker=WorkerId(worker)))
        yield from self._overdue(world, hasty=False)

    def _overdue(self, world: World, *, hasty: bool) -> Iterator[Move]:
        """A delivered grant that is not claimed in time: because its worker is gone, or (`hasty`) only slow."""
        for record in self.states[world.boss.known].requests.values():
            for stage, name in enumerate(STAGES):
                task, seen = world.store.tasks[stage], record.tasks[name]
                if seen.state is not TaskState.GRANTED or task.waits:
                    continue
                held = any(w.hand == task.epoch and w.stage == stage and _acts(world, w) for w in world.workers)
                needed = not held and task.state == "granted" and task.epoch == seen.epoch
                if needed != hasty:
                    yield self._apply(world, ev.GrantOverdue(request=R, stage=name, epoch=seen.epoch))

    def _apply(self, world: World, event: ev.Event) -> Move:
        key = (world.boss.known, event)
        if key not in self._steps:
            state, commands = self.decide(self.states[world.boss.known], event)
            self._steps[key] = self._number(state), commands
        known, commands = self._steps[key]
        boss = world.boss._replace(known=known, orders=commands)
        return f"it learns {_said(event)}", world._replace(boss=boss)

    def carry_out(self, store: Store, command: Command) -> Answer:
        """As the driver's `_call`, by the leader of this term."""
        match command:
            case GrantTask(stage=stage, expected_epoch=at, alone=alone, remake=remake):
                return self.scripts.grant(store, store.term, STAGES.index(stage), at, alone=alone, remake=remake)
            case EndRequest(state=state):
                return self.scripts.end_request(store, store.term, state)
            case FenceWorker(worker=worker):
                return self.scripts.fence_worker(store, store.term, worker)
            case _:
                raise AssertionError(f"no script for {command}")

    def _number(self, state: ConductorState) -> int:
        records = tuple((*record.tasks.values(), record.delivered, record.ending) for record in state.requests.values())
        if records not in self._numbers:
            assert violations(state) == [], violations(state)
            self._numbers[records] = len(self.states)
            self.states.append(state)
        return self._numbers[records]


def read_request(store: Store) -> RequestRecord | None:
    """The driver's `read_live` for the one request."""
    if store.end:
        return None
    tasks = dict(zip(STAGES, map(_record, STAGES, store.tasks), strict=True))
    delivered = store.taken_by_client == store.sizes[CONSUMER]
    return RequestRecord(id=R, graph=model.PAIR.name, outputs=SUBMITTED.outputs, tasks=tasks, delivered=delivered)


def _record(name: StageName, task: Task) -> TaskRecord:
    owner = WorkerId(task.owner) if task.owner else None
    return TaskRecord(stage=name, state=TaskState(task.state), epoch=Epoch(task.epoch), owner=owner, alone=task.alone)


def missed_facts(store: Store) -> tuple[ev.Event, ...]:
    """The driver's `missed_facts`."""
    facts: list[ev.Event] = []
    for name, task in zip(STAGES, store.tasks, strict=True):
        epoch = Epoch(task.epoch)
        if task.state == "lost":
            facts.append(ev.TaskLost(request=R, stage=name, epoch=epoch, deaths=task.deaths, alone=task.died_alone))
        elif task.state == "failed":
            facts.append(ev.TaskFailed(request=R, stage=name, epoch=epoch, code="engine_error", message=""))
    return tuple(facts)


def _tidy(world: World) -> World:
    """Forget events that nobody will read again, so that equal worlds are one."""
    boss, events = world.boss, world.store.events
    if boss.phase == "down":
        return world._replace(store=world.store._replace(events=())) if events else world
    old = boss.read - (RETOLD if world.budget.retold else 0)
    if old <= 0:
        return world
    return world._replace(store=world.store._replace(events=events[old:]), boss=boss._replace(read=boss.read - old))


def _idle(worker: Worker) -> Worker:
    return Worker(worker.place, worker.stage, worker.born, worker.dead, worker.hand)


def _is_spare(world: World, n: int) -> bool:
    """The worker before it in the same role is as untouched as this one: what this one might do, that one does."""
    if n == 0 or world.workers[n].stage != world.workers[n - 1].stage:
        return False
    fencing = any(isinstance(order, FenceWorker) for order in world.boss.orders)
    return not fencing and all(_is_untouched(world.store, worker) for worker in world.workers[n - 1 : n + 1])


def _is_untouched(store: Store, worker: Worker) -> bool:
    listed = worker.id in store.listed and worker.id not in store.late and worker.id not in store.at
    return listed and worker == Worker(worker.place, worker.stage)


def _acts(world: World, worker: Worker) -> bool:
    return worker.id in world.store.listed and not worker.dead


def _said(event: ev.Event) -> str:
    told = [str(getattr(event, name)) for name in ("stage", "epoch", "worker") if hasattr(event, name)]
    return " ".join([type(event).__name__, *told])
