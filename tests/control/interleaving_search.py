"""The interleaving check of one request's tasks: a search that checks the invariants of every
reachable world.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.control.interleaving_explore import Exploration
from tests.control.interleaving_moves import Fleet
from tests.control.interleaving_store import CONSUMER, MAX_DEATHS, PRODUCER, STAGES, Scripts, Store
from tests.control.interleaving_world import MirrorWorker, Move, World


@dataclass(slots=True)
class Search(Exploration[World]):
    """Search over all worlds that a fleet can reach. `stores`: states of the hashes that were
    already checked.
    """

    fleet: Fleet = field(kw_only=True)
    stores: set[tuple[object, ...]] = field(default_factory=set[tuple[object, ...]])

    def fault_free_moves(self, world: World) -> Iterator[Move]:
        return self.fleet.fault_free_moves(world)

    def faults(self, world: World) -> Iterator[Move]:
        return self.fleet.faults(world)

    def has_ended(self, world: World) -> bool:
        return self.fleet.ended(world)

    def ended_well(self, world: World) -> bool:
        return is_expected_end(self.fleet, world)

    def wrong(self, world: World) -> list[str]:
        wrong = [
            *self._wrong_store(world.store),
            *wrong_owners(world),
        ]
        return wrong + late_writes(self.fleet.scripts, world)

    def wrong_move(self, before: World, after: World) -> str:
        return (
            "closed as finished while a task is open"
            if num_open_at_close(before.store, after.store) > 1
            else ""
        )

    def _wrong_store(self, store: Store) -> list[str]:
        """Return what is wrong with a state of the hashes, one message per fault; each state is
        checked only once.
        """
        key = (store.tasks, store.at, store.end, store.consumed_by_client)
        if key in self.stores:
            return []
        self.stores.add(key)
        return [*wrong_logs(store), *old_epochs(self.fleet.scripts, store)]


def is_expected_end(fleet: Fleet, world: World) -> bool:
    """Return True if a request that failed had a reason: a task failed, or killed its workers even
    when it ran alone.
    """
    condemned = any(task.alone and task.deaths > MAX_DEATHS for task in world.store.tasks)
    return (
        world.store.end == "finished"
        or condemned
        or world.budget.failures < fleet.start.budget.failures
    )


def num_open_at_close(before: Store, after: Store) -> int:
    """Return the number of tasks, the client's included, that were open before the move that closed
    the request; 0 if the move did not close it. The request must be closed by the last task to end.
    """
    if after.end != "finished" or before.end:
        return 0
    delivered = before.consumed_by_client == before.sizes[CONSUMER]
    return sum(task.state != "finished" for task in before.tasks) + (not delivered)


def wrong_logs(store: Store) -> list[str]:
    wrong = [
        f"{STAGES[n]} is {t.state} without an epoch"
        for n, t in enumerate(store.tasks)
        if t.epoch == 0
    ]
    wrong += [
        f"the log of {STAGES[n]} is {t.log}"
        for n, t in enumerate(store.tasks)
        if t.log != tuple(range(t.produced))
    ]
    if store.end == "finished":
        wrong += [
            f"finished with {t.log} of {STAGES[n]}"
            for n, t in enumerate(store.tasks)
            if t.produced != store.sizes[n]
        ]
        wrong += (
            ["finished, but the client has not received all chunks"]
            if store.consumed_by_client != store.sizes[1]
            else []
        )
    if store.end:
        wrong += [
            f"ended, but blocks of {STAGES[n]} are still {t.offer}"
            for n, t in enumerate(store.tasks)
            if t.offer
        ]
    return wrong


def wrong_owners(world: World) -> list[str]:
    """Return violations of single ownership: at most one worker may write for a task, the owner in
    the task's hash.
    """
    wrong: list[str] = []
    for stage, task in enumerate(world.store.tasks):
        owners = [
            w.id
            for w in world.workers
            if w.stage == stage
            and w.run_epoch
            and w.run_epoch == task.epoch
            and task.state == "running"
        ]
        if owners != [task.owner] and (owners or task.owner):
            wrong.append(
                f"{STAGES[stage]} is owned by {task.owner or 'no worker'}, and {owners} may "
                "write for it"
            )
    return wrong


def writes(
    scripts: Scripts, store: Store, worker: str, stage: int, epoch: int
) -> list[tuple[str, tuple[Store, str]]]:
    """Yield every write that requires the right of a task's owner, with its reply."""
    produced = store.tasks[stage].produced
    tried = [
        ("append", scripts.append(store, worker, stage, epoch, produced, finish=False)),
        ("finish", scripts.append(store, worker, stage, epoch, max(produced - 1, 0), finish=True)),
        ("fail", scripts.fail(store, stage, epoch)),
        ("lose_task", scripts.lose_task(store, stage, epoch)),
        ("hand_off", scripts.hand_off(store, worker, stage, epoch, "decode")),
        ("confirm", scripts.confirm(store, stage, epoch)),
    ]
    if stage == PRODUCER:
        return [*tried, ("relocate", scripts.relocate(store, worker, epoch, 0))]
    tried += [
        ("lose_tensors", scripts.lose_tensors(store, epoch)),
        ("report_idle", scripts.report_idle(store, epoch, 1)),
    ]
    return [*tried, ("ack", scripts.ack(store, epoch, store.sizes[PRODUCER]))]


def old_epochs(scripts: Scripts, store: Store) -> list[str]:
    """Return the writes that are accepted although their epoch is lower than the task's; there must
    be none.
    """
    return [
        f"{name} at epoch {task.epoch - 1} of {STAGES[stage]}, which is at {task.epoch}, was "
        f"answered {answer}"
        for stage, task in enumerate(store.tasks)
        if task.epoch > 1
        for name, (after, answer) in writes(scripts, store, "late", stage, task.epoch - 1)
        if answer != "stale" or after != store
    ]


def late_writes(scripts: Scripts, world: World) -> list[str]:
    """Return the writes of a fenced worker, by its former right, that are accepted; there must be
    none.

    A finished task had no owner to fence, so its epoch stands: its last worker may still relocate
    the tensors, which is a move of its own.
    """
    return [
        f"{name} of {worker.id}, which was fenced, was answered {answer}"
        for worker in world.workers
        if worker.run_epoch
        and worker.id not in world.store.listed
        and not _has_finished(world.store, worker)
        for name, (after, answer) in writes(
            scripts, world.store, worker.id, worker.stage, worker.run_epoch
        )
        if answer != "stale" or after != world.store
    ]


def _has_finished(store: Store, worker: MirrorWorker) -> bool:
    task = store.tasks[worker.stage]
    return task.state == "finished" and task.epoch == worker.run_epoch
