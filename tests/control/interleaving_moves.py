"""Possible next moves of a small fleet in the interleaving check: moves of its workers, their
keepers, the client and the leading conductor, and faults while the budget lasts.

`interleaving_search` tries the moves in every order.
"""

from collections.abc import Iterator

from tests.control.interleaving_store import (
    CONSUMER,
    PRODUCER,
    STAGES,
    MirrorTask,
    Scripts,
    Store,
    submitted,
)
from tests.control.interleaving_world import Budget, MirrorWorker, Move, World

SECOND_HALVES = "XYZxyz"
"""Letters of the worker places that serve the second role of a split stage."""


class Fleet:
    """Possible moves of one fleet: its worker places, and the models of the scripts."""

    def __init__(
        self,
        places: str,
        budget: Budget,
        scripts: Scripts | None = None,
        *,
        faulty: str = "",
        sizes: tuple[int, int] = (2, 1),
        split: int | None = None,
        credits: int = 99,
        reports_once: bool = False,
    ) -> None:
        """Describe the fleet.

        `places`: one letter per worker, upper case for the producer's stage. `faulty`: places that
        may have faults. `sizes`: number of chunks that each stage produces. `credits`: number of
        chunks by which the producer may be ahead. `reports_once`: whether a consumer reports lost
        tensors only once. `split`: stage that has two roles, if any.
        """
        self.scripts, self.split = scripts or Scripts(), split
        self.faulty = faulty
        self.credits = credits
        self.reports_once = reports_once
        workers = tuple(
            MirrorWorker(place, _stage_of(place), self.role_of(place)) for place in places
        )
        roles = [
            f"{name}.prefill" if stage == split else str(name) for stage, name in enumerate(STAGES)
        ]
        store = submitted(self.scripts, sizes, roles)
        store = store._replace(listed=frozenset(worker.id for worker in workers))
        self.start = World(store, workers, budget)

    def role_of(self, place: str) -> str:
        stage = _stage_of(place)
        half = "decode" if place in SECOND_HALVES else "prefill"
        return f"{STAGES[stage]}.{half}" if stage == self.split else str(STAGES[stage])

    def ended(self, world: World) -> bool:
        return bool(world.store.end)

    def faults(self, world: World) -> Iterator[Move]:
        """Yield the faults that the budget still allows."""
        budget = world.budget
        if world.store.end == "":
            yield from self._worker_faults(world)
        if budget.early_grants:
            after = budget._replace(early_grants=budget.early_grants - 1)
            for label, early in self._overdue(world):
                yield label, early._replace(budget=after)

    def _worker_faults(self, world: World) -> Iterator[Move]:
        store, budget = world.store, world.budget
        for n, worker in enumerate(world.workers):
            holds = (
                worker.granted_epoch or worker.run_epoch or worker.lends or worker.id in store.at
            )
            if (
                worker.id not in store.listed
                or worker.dead
                or worker.place not in self.faulty
                or not holds
            ):
                continue
            late = store._replace(late=store.late | {worker.id})
            if budget.deaths:
                left = budget._replace(deaths=budget.deaths - 1)
                yield (
                    f"{worker.id} dies",
                    world.with_worker(n, worker._replace(dead=True), late)._replace(budget=left),
                )
            if budget.freezes and worker.id not in store.late:
                left = budget._replace(freezes=budget.freezes - 1)
                yield f"{worker.id} freezes", world._replace(store=late, budget=left)
            if worker.run_epoch and store.tasks[worker.stage].state != "finished":
                yield from self._work_faults(world, n, worker)

    def _work_faults(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        budget = world.budget
        if budget.failures:
            left = budget._replace(failures=budget.failures - 1)
            after, answer = self.scripts.fail(world.store, worker.stage, worker.run_epoch)
            yield (
                f"{worker.id}: fail -> {answer}",
                world.with_worker(n, worker.idle(), after)._replace(budget=left),
            )
        if budget.steps:
            left = budget._replace(steps=budget.steps - 1)
            after, answer = self.scripts.lose_task(world.store, worker.stage, worker.run_epoch)
            yield (
                f"{worker.id}: lose_task -> {answer}",
                world.with_worker(n, worker.idle(), after)._replace(budget=left),
            )

    def fault_free_moves(self, world: World) -> Iterator[Move]:
        """Yield all possible moves that are not faults."""
        if world.store.end:
            return
        yield from self._leader_moves(world)
        for n, worker in enumerate(world.workers):
            if worker.id not in world.store.listed:
                yield from self._fenced_moves(world, n, worker)
            elif worker.dead:
                yield self._end(world, worker)
            else:
                yield from self._worker_moves(world, n, worker)
        size = world.store.sizes[CONSUMER]
        if world.store.consumed_by_client < world.store.tasks[CONSUMER].produced == size:
            store, answer = self.scripts.ack_by_client(world.store, size)
            yield f"the client received all chunks -> {answer}", world._replace(store=store)

    def _leader_moves(self, world: World) -> Iterator[Move]:
        """Yield the moves of the leading conductor, which remembers nothing between them."""
        store = world.store
        for worker in sorted(store.late):
            after, answer = self.scripts.fence_worker(store, store.term, worker)
            yield f"the lease of {worker} lapses -> {answer}", world._replace(store=after)
        held = any(
            task.state == "granted"
            and not task.waits
            and any(
                w.granted_epoch == task.epoch and w.stage == stage and acts(world, w)
                for w in world.workers
            )
            for stage, task in enumerate(store.tasks)
        )
        if not held:
            yield from self._overdue(world)

    def _overdue(self, world: World) -> Iterator[Move]:
        """Yield the move that repeats the grants that left their streams unclaimed, if any."""
        after, answer = self.scripts.overdue(world.store, world.store.term)
        if after != world.store:
            yield f"overdue grants -> {answer}", world._replace(store=after)

    def _end(self, world: World, worker: MirrorWorker) -> Move:
        """Return the move of a keeper that sees its worker's process end."""
        after, answer = self.scripts.end_worker(world.store, worker.id)
        return f"the end of {worker.id} is observed -> {answer}", world._replace(store=after)

    def _fenced_moves(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        reborn = MirrorWorker(worker.place, worker.stage, worker.role, worker.born + 1)
        store = world.store._replace(listed=world.store.listed | {reborn.id})
        yield f"{reborn.id} joins", world.with_worker(n, reborn, store)
        if worker.dead:
            if any(each[0] == worker.id for each in world.store.evidence):
                yield self._end(world, worker)
            return
        if worker.run_epoch and worker.stage == PRODUCER:
            yield from self._relocate(world, n, worker)
        if worker.lends:
            yield (
                f"{worker.id} reuses its pages",
                world.with_worker(n, worker._replace(lends=False)),
            )

    def _worker_moves(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        store = world.store
        task = store.tasks[worker.stage]
        if worker.id in store.late:
            yield (
                f"{worker.id}: renew",
                world._replace(store=store._replace(late=store.late - {worker.id})),
            )
        if worker.granted_epoch:
            yield self._claim(world, n, worker)
        elif (
            task.waits
            and task.role == worker.role
            and not self._is_spare(world, n)
            and not _has_notices(store, worker)
        ):
            assert not worker.run_epoch, (
                f"{worker.id} reads a grant of the task that it still holds"
            )
            delivered = store.with_task(worker.stage, task._replace(waits=False))
            yield (
                f"{worker.id} reads a grant",
                world.with_worker(n, worker._replace(granted_epoch=task.epoch), delivered),
            )
        if worker.lends or _has_notices(store, worker):
            yield from self._lend(world, n, worker)
        if worker.run_epoch:
            yield from self._run(world, n, worker, task)

    def _claim(self, world: World, n: int, worker: MirrorWorker) -> Move:
        after, answer = self.scripts.claim(
            world.store, worker.id, worker.stage, worker.granted_epoch
        )
        next_worker = worker.idle()._replace(granted_epoch=0)
        if answer == "ok":
            offered = world.store.tasks[worker.stage].offer == "offered"
            next_worker = next_worker._replace(
                run_epoch=worker.granted_epoch,
                again=tuple(range(len(world.store.at))) if worker.stage == PRODUCER else (),
                pull="under way" if offered else "",
                logged=world.store.tasks[PRODUCER].produced
                if offered and worker.stage == CONSUMER
                else 0,
            )
        return f"{worker.id}: claim -> {answer}", world.with_worker(n, next_worker, after)

    def _run(self, world: World, n: int, worker: MirrorWorker, task: MirrorTask) -> Iterator[Move]:
        if worker.pull:
            yield from self._pull(world, n, worker, task)
        elif self._is_first_half(worker):
            yield from self._hand_off(world, n, worker)
        if not worker.pull:
            yield from self._produce(world, n, worker, task)
        if worker.stage == CONSUMER:
            yield from self._consume(world, n, worker)
        elif not worker.pull:
            yield from self._relocate(world, n, worker)

    def _is_first_half(self, worker: MirrorWorker) -> bool:
        return worker.stage == self.split and worker.place not in SECOND_HALVES

    def _produce(
        self, world: World, n: int, worker: MirrorWorker, task: MirrorTask
    ) -> Iterator[Move]:
        """Yield the append of the worker's next chunk, possible after the logged chunks are
        relocated; if the log is complete, the last chunk is appended again. The first role of a
        split stage produces at most one chunk.
        """
        last = world.store.sizes[worker.stage] - 1
        index = min(task.produced, last)
        if (
            worker.again
            or task.state == "finished"
            or (task.produced and self._is_first_half(worker))
        ):
            return
        if worker.stage == CONSUMER and worker.consumed < self._needed(world.store, index):
            return
        if (
            worker.stage == PRODUCER
            and task.produced - world.store.tasks[CONSUMER].consumed >= self.credits
        ):
            return
        store = world.store
        if worker.stage == CONSUMER:
            store, _ = self.scripts.ack(store, worker.run_epoch, worker.consumed)
        store, answer = self.scripts.append(
            store, worker.id, worker.stage, worker.run_epoch, index, finish=index == last
        )
        done = answer in ("stale", "ended") or index == last
        yield (
            f"{worker.id}: append {index} -> {answer}",
            world.with_worker(n, worker.idle() if done else worker, store),
        )

    def _needed(self, store: Store, index: int) -> int:
        """Return the number of input chunks that the consumer needs for its chunk `index`; the last
        one needs all.
        """
        all_, last = store.sizes[PRODUCER], store.sizes[CONSUMER] - 1
        return all_ if index == last else min(index + 1, all_)

    def _hand_off(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        """Yield the hand-off of a task to the second role. The move is possible before the chunk is
        appended and before tensors are recomputed, since the policy may hold back the append, and a
        full arena the recomputation.
        """
        role = f"{STAGES[worker.stage]}.decode"
        store, answer = self.scripts.hand_off(
            world.store, worker.id, worker.stage, worker.run_epoch, role
        )
        after = worker.idle()._replace(lends=answer == "ok")
        yield f"{worker.id}: hand_off -> {answer}", world.with_worker(n, after, store)

    def _lend(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        """Yield the moves of a hand-off's source: read its inbox, or withdraw the offer."""
        for worker_id, kind in sorted(world.store.notices):
            if worker_id == worker.id:
                store = world.store._replace(notices=world.store.notices - {(worker_id, kind)})
                after = worker.idle() if kind in ("x", "y") else worker._replace(lends=False)
                yield f"{worker.id} reads {kind}", world.with_worker(n, after, store)
        if worker.lends:
            store, answer = self.scripts.release(world.store, worker.id, worker.stage)
            yield (
                f"{worker.id}: release -> {answer}",
                world.with_worker(n, worker._replace(lends=False), store),
            )

    def _pull(self, world: World, n: int, worker: MirrorWorker, task: MirrorTask) -> Iterator[Move]:
        """Yield the moves of a hand-off's new owner: the read of the blocks and its confirmation. A
        read from pages that are no longer lent returns wrong data.
        """
        if worker.pull == "under way":
            source = world.worker_of(task.source)
            if source is not None:
                state = "here" if source.lends else "wrong"
                yield (
                    f"{worker.id}: its blocks are {state}",
                    world.with_worker(n, worker._replace(pull=state)),
                )
            yield (
                f"{worker.id}: its pull fails",
                world.with_worker(n, worker._replace(pull="", logged=0)),
            )
        elif worker.consumed >= worker.logged:
            store, answer = self.scripts.confirm(world.store, worker.stage, worker.run_epoch)
            after = worker._replace(pull="", logged=0)
            if answer == "ok":
                assert worker.pull == "here", (
                    f"{worker.id} continues with blocks that are not the request's"
                )
                after = after._replace(
                    again=tuple(index for index in worker.again if index >= task.begun)
                )
            elif answer != "released":
                after = worker.idle()
            yield f"{worker.id}: confirm -> {answer}", world.with_worker(n, after, store)

    def _relocate(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        if worker.again:
            index, *rest = worker.again
            store, answer = self.scripts.relocate(world.store, worker.id, worker.run_epoch, index)
            after = worker.idle() if answer == "stale" else worker._replace(again=tuple(rest))
            yield f"{worker.id}: relocate {index} -> {answer}", world.with_worker(n, after, store)

    def _consume(self, world: World, n: int, worker: MirrorWorker) -> Iterator[Move]:
        store = world.store
        if worker.consumed == store.tasks[PRODUCER].produced:
            return
        holder = store.at[worker.consumed]
        if holder not in store.listed:
            if worker.reported != holder or (not self.reports_once and self._is_quiet(world)):
                after, answer = self.scripts.lose_tensors(store, worker.run_epoch)
                reporter = worker._replace(reported=holder)
                yield (
                    f"{worker.id}: lose_tensors of {worker.consumed} -> {answer}",
                    world.with_worker(n, reporter, after),
                )
        elif world.worker_of(holder) is not None:
            reader = worker._replace(consumed=worker.consumed + 1, reported="")
            if self.credits < store.sizes[PRODUCER]:
                store, _ = self.scripts.ack(store, worker.run_epoch, reader.consumed)
            yield f"{worker.id} reads chunk {worker.consumed}", world.with_worker(n, reader, store)

    def _is_quiet(self, world: World) -> bool:
        """Return True if no pending move would restore the consumer's input, so that its wait
        counts as long.
        """
        under_way = any(
            worker.again or (worker.pull and worker.stage == PRODUCER) for worker in world.workers
        )
        task = world.store.tasks[PRODUCER]
        return not under_way and (
            task.state == "finished" or (self.split == PRODUCER and task.state == "running")
        )

    def _is_spare(self, world: World, n: int) -> bool:
        """Return True if the preceding worker of the same role is equally untouched, so that its
        moves cover the moves of this worker.
        """
        if n == 0 or world.workers[n].role != world.workers[n - 1].role:
            return False
        return all(_is_untouched(world, worker) for worker in world.workers[n - 1 : n + 1])


def _stage_of(place: str) -> int:
    return PRODUCER if place.isupper() else CONSUMER


def acts(world: World, worker: MirrorWorker) -> bool:
    return worker.id in world.store.listed and not worker.dead


def _has_notices(store: Store, worker: MirrorWorker) -> bool:
    return any(worker_id == worker.id for worker_id, _ in store.notices)


def _is_untouched(world: World, worker: MirrorWorker) -> bool:
    store = world.store
    return (
        acts(world, worker)
        and worker.id not in store.late
        and worker.id not in store.at
        and worker.is_untouched()
    )
