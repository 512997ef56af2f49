"""Every order of moves of workers, keepers, client and conductor is checked: each state is valid,
and leads to the request's end.

`interleaving_store` models the scripts, `interleaving_moves` lists the possible next moves, and
`interleaving_search` tries all orders. Mutations show that the check can fail.
"""

import pytest

from fleet.graphs import GRAPHS
from tests.control.interleaving_explore import Broken
from tests.control.interleaving_moves import Fleet
from tests.control.interleaving_search import Search
from tests.control.interleaving_store import (
    CONSUMER,
    MAX_DEATHS,
    PAIR,
    PRODUCER,
    Answer,
    MirrorTask,
    Scripts,
    Store,
)
from tests.control.interleaving_world import Budget, World

TWO_PRODUCERS, TWO_CONSUMERS = "ABc", "Acd"
PRODUCERS, CONSUMERS = "AB", "cd"
TWO_FROM_PRODUCER, TWO_FROM_CONSUMER, ONE_EACH = (2, 1), (1, 2), (1, 1)


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch, no_collection: None) -> None:
    """Register the model's graph."""
    monkeypatch.setitem(GRAPHS, PAIR.name, PAIR)


def explore(fleet: Fleet) -> Search:
    search = Search(fleet=fleet)
    search.run(fleet.start)
    return search


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(Budget(deaths=1, early_grants=1), id="a worker dies, a grant is early"),
        pytest.param(Budget(freezes=1, failures=1), id="a worker freezes and wakes, a task fails"),
        pytest.param(Budget(freezes=1, deaths=1), id="a worker freezes, a worker dies"),
    ],
)
def test_producer_recovers_in_every_interleaving(budget: Budget) -> None:
    search = explore(Fleet(TWO_PRODUCERS, budget, faulty=PRODUCERS, sizes=TWO_FROM_PRODUCER))
    ends = {world.store.end for world in search.worlds}
    assert ends == {"", "finished", *(["failed"] if budget.failures else [])}


def test_deaths_of_a_working_and_a_publishing_worker_are_recovered() -> None:
    search = explore(Fleet(TWO_PRODUCERS, Budget(deaths=2), faulty=PRODUCERS, sizes=ONE_EACH))
    assert {world.store.end for world in search.worlds} == {"", "finished"}
    assert any(was_recomputed(world) for world in search.worlds)


@pytest.mark.parametrize("places", ["Ac", "ABc"])
def test_task_that_kills_its_workers_alone_fails_its_request(places: str) -> None:
    search = explore(Fleet(places, Budget(steps=MAX_DEATHS + 1), faulty="AB", sizes=ONE_EACH))
    assert {world.store.end for world in search.worlds} == {"", "finished", "failed"}


def was_recomputed(world: World) -> bool:
    """Return True if the producer's tensors were recomputed. Its epochs are then: granted at 1,
    lost at 2, granted at 3, granted to recompute at 4, closed at 5.
    """
    (producer, _) = world.store.tasks
    return world.store.end == "finished" and producer.epoch >= 5 and producer.deaths > 0


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(Budget(deaths=1, early_grants=1), id="a worker dies, a grant is early"),
        pytest.param(Budget(freezes=1, deaths=1), id="a worker freezes, a worker dies"),
    ],
)
def test_consumer_recovers_in_every_interleaving(budget: Budget) -> None:
    search = explore(Fleet(TWO_CONSUMERS, budget, faulty=CONSUMERS, sizes=TWO_FROM_CONSUMER))
    assert {world.store.end for world in search.worlds} == {"", "finished"}


@pytest.mark.parametrize(
    ("places", "faulty", "sizes", "budget"),
    [
        pytest.param(
            "AXc", "AXc", TWO_FROM_PRODUCER, Budget(deaths=1), id="producer: any worker dies"
        ),
        pytest.param(
            "AXc",
            "AX",
            TWO_FROM_PRODUCER,
            Budget(freezes=1),
            id="producer: a half freezes and wakes",
        ),
        pytest.param(
            "AXc", "", TWO_FROM_PRODUCER, Budget(early_grants=1), id="producer: a grant is early"
        ),
        pytest.param(
            "AXc", "AX", TWO_FROM_PRODUCER, Budget(steps=1), id="producer: a step fails as a whole"
        ),
        pytest.param(
            "Acx", "Acx", TWO_FROM_CONSUMER, Budget(deaths=1), id="consumer: any worker dies"
        ),
        pytest.param(
            "Acx",
            "cx",
            TWO_FROM_CONSUMER,
            Budget(freezes=1),
            id="consumer: a half freezes and wakes",
        ),
    ],
)
def test_hand_off_completes_in_every_interleaving(
    places: str, faulty: str, sizes: tuple[int, int], budget: Budget
) -> None:
    """A hand-off completes in every order of moves. The producer may be one chunk ahead, so that it
    waits for a consumer whose input is lost.
    """
    search = explore(
        Fleet(places, budget, faulty=faulty, sizes=sizes, split=split_stage(places), credits=1)
    )
    assert {world.store.end for world in search.worlds} == {"", "finished"}
    assert {"offered", "confirmed", "released"} <= {
        task.offer for world in search.worlds for task in world.store.tasks
    }


def split_stage(places: str) -> int:
    return PRODUCER if places.startswith("AX") else CONSUMER


class GrantsWithoutRaising(Scripts):
    def raised(self, task: MirrorTask, by: str) -> int:
        return task.epoch if by == "grant" else super().raised(task, by)


class RegrantsWithoutRaising(Scripts):
    """Mutation: a lost task is granted again at the epoch of its former owner."""

    def raised(self, task: MirrorTask, by: str) -> int:
        return task.epoch if by in ("lose", "regrant") else super().raised(task, by)


class LosesWithoutGranting(Scripts):
    def grant_task(
        self, store: Store, stage: int, task: MirrorTask, role: str, *, alone: bool, by: str
    ) -> Store:
        return (
            store
            if by == "regrant"
            else super().grant_task(store, stage, task, role, alone=alone, by=by)
        )


class ClosesUndelivered(Scripts):
    def is_complete(self, store: Store) -> bool:
        return all(task.state == "finished" for task in store.tasks)


class ClosesWithAnOpenTask(Scripts):
    """Mutation: the delivery closes the request although a finished task runs again to recompute
    its tensors.
    """

    def is_complete(self, store: Store) -> bool:
        return store.consumed_by_client == store.sizes[CONSUMER]


class NeverCloses(Scripts):
    def close_if_complete(self, store: Store) -> Store:
        return store


class ClosesAtDeliveryOnly(Scripts):
    """Mutation: a task that ends after the delivery does not close the request."""

    def append(
        self, store: Store, worker: str, stage: int, epoch: int, index: int, *, finish: bool
    ) -> Answer:
        return NeverCloses().append(store, worker, stage, epoch, index, finish=finish)


class AppendsAtAnyEpoch(Scripts):
    def may_append(self, task: MirrorTask, epoch: int) -> bool:
        return True


class AppendsAgain(Scripts):
    """Mutation: a chunk that the log already holds is appended again."""

    def append(
        self, store: Store, worker: str, stage: int, epoch: int, index: int, *, finish: bool
    ) -> Answer:
        after, answer = super().append(store, worker, stage, epoch, index, finish=finish)
        if answer != "duplicate":
            return after, answer
        task = after.tasks[stage]
        return after.with_task(stage, task._replace(log=(*task.log, index))), "ok"


class ImportsUnlistedSource(Scripts):
    """Mutation: KV blocks are imported although their source has left and may reuse the pages."""

    def may_take(self, store: Store, task: MirrorTask) -> bool:
        return task.offer == "offered"


class ExpectsRecomputation(Scripts):
    """Mutation: an owner that imported KV blocks is expected to recompute the chunks published
    before.
    """

    def skips(self, task: MirrorTask) -> bool:
        return False


class LeavesCondemnedTasks(Scripts):
    """Mutation: the request of a task that kills its workers alone stays open."""

    def condemn(self, store: Store) -> Store:
        return store


class CondemnsAtFirstDeath(Scripts):
    """Mutation: a request fails at the first worker death over it."""

    def grant_task(
        self, store: Store, stage: int, task: MirrorTask, role: str, *, alone: bool, by: str
    ) -> Store:
        if by == "regrant" and task.deaths:
            return self.condemn(store.with_task(stage, task))
        return super().grant_task(store, stage, task, role, alone=alone, by=by)


class CountsLapses(Scripts):
    """Mutation: a lapsed lease counts like a death, although the worker may live."""

    def counts(self, how: str) -> bool:
        return how in ("died", "failed", "lapsed")


@pytest.mark.one_in(3, "mutated scripts")
@pytest.mark.parametrize(
    ("scripts", "message"),
    [
        (GrantsWithoutRaising, "without an epoch"),
        (RegrantsWithoutRaising, "of A0, which was fenced, was answered"),
        (LosesWithoutGranting, "never ends as it should"),
        (ClosesUndelivered, "closed as finished while a task is open"),
        (ClosesWithAnOpenTask, "closed as finished while a task is open"),
        (ClosesAtDeliveryOnly, "never ends as it should"),
        (AppendsAtAnyEpoch, "finish at epoch 2 of producer, which is at 3, was answered duplicate"),
        (AppendsAgain, r"the log of producer is \(0, 1, 1\)"),
    ],
)
def test_mutated_script_is_detected(scripts: type[Scripts], message: str) -> None:
    with pytest.raises(Broken, match=message):
        explore(Fleet(TWO_PRODUCERS, Budget(deaths=2), scripts(), faulty=PRODUCERS))


def test_import_from_an_unlisted_source_is_detected() -> None:
    with pytest.raises(Broken, match="blocks that are not the request's"):
        explore(
            Fleet("AXc", Budget(freezes=1), ImportsUnlistedSource(), faulty="A", split=PRODUCER)
        )


def test_skipped_recomputation_of_lost_tensors_is_detected() -> None:
    with pytest.raises(Broken, match="never ends as it should"):
        explore(
            Fleet(
                "AXc",
                Budget(deaths=1),
                ExpectsRecomputation(),
                faulty="A",
                split=PRODUCER,
                credits=1,
            )
        )


@pytest.mark.parametrize(
    ("scripts", "budget"),
    [
        (LeavesCondemnedTasks, Budget(steps=MAX_DEATHS + 1)),
        (CondemnsAtFirstDeath, Budget(deaths=1)),
    ],
)
def test_mutated_judgement_is_detected(scripts: type[Scripts], budget: Budget) -> None:
    with pytest.raises(Broken, match="never ends as it should"):
        explore(Fleet(TWO_PRODUCERS, budget, scripts(), faulty=PRODUCERS))


def test_pauses_of_living_workers_condemn_no_request() -> None:
    """However often leases lapse, a request does not fail, since no end of a process was
    observed.
    """
    pauses = Budget(freezes=MAX_DEATHS + 1)
    fleet = Fleet("Ac", pauses, faulty="A", sizes=ONE_EACH)
    assert {world.store.end for world in explore(fleet).worlds} == {"", "finished"}
    counted = explore(Fleet("Ac", pauses, CountsLapses(), faulty="A", sizes=ONE_EACH))
    assert "failed" in {world.store.end for world in counted.worlds}


def test_single_report_of_lost_tensors_suffices() -> None:
    """A single report of lost tensors suffices: the script that records it grants the task, without
    the conductor.
    """
    explore(Fleet(TWO_PRODUCERS, Budget(deaths=1), faulty=PRODUCERS, reports_once=True))
