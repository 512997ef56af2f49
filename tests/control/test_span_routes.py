"""Routes over span workers, and span-worker deaths, are recorded only for callers with the right to
do so.
"""

import pytest

from fleet.control import keys, scripts
from fleet.control.connect import run, text, texts
from fleet.core.events import TaskLost
from fleet.core.ids import Epoch, RoleName, WorkerId
from fleet.telemetry.views import WorkerOrder
from tests.control_plane import MAX_DEATHS, REQUEST, STAGE, WORKER, Control

ANCHOR, OTHER_ANCHOR = WorkerId("lm@test:5:a"), WorkerId("lm@test:6:b")
FIRST, SECOND, THIRD = (WorkerId(f"lm.span@test:{number}:a") for number in (7, 8, 9))


class Routes(Control):
    """A control plane with two anchors and three span workers."""

    def set_route(self, anchor: WorkerId, *hops: WorkerId) -> list[str]:
        """Set the anchor's route over span workers with one layer each; return all words of the
        answer.
        """
        spans = [(hop, f"{at}:{at}") for at, hop in enumerate(hops)]
        return texts(run(self.client, scripts.set_route(anchor, spans)))

    def route(self, anchor: WorkerId, *hops: WorkerId) -> int:
        """Set the anchor's route over span workers with one layer each; return the route's
        generation.
        """
        word, generation = self.set_route(anchor, *hops)
        assert word == "ok"
        return int(generation)

    def order_words(self, action: WorkerOrder, worker: WorkerId) -> list[str]:
        return texts(run(self.client, scripts.order(worker, action)))

    def field(self, name: str, *workers: WorkerId) -> list[str]:
        """Return a field of every given worker's hash."""
        return [text(self.client.hget(keys.worker(worker), name)) for worker in workers]

    def anchor_of(self, worker: WorkerId) -> str:
        return self.field("anchor", worker)[0]


@pytest.fixture
def fleet(control: Control) -> Routes:
    routes = Routes(control.client, control.leader)
    for worker in (ANCHOR, OTHER_ANCHOR):
        assert routes.register(worker) == "ok"
    for worker in (FIRST, SECOND, THIRD):
        assert routes.register(worker, "lm.span") == "ok"
    return routes


def test_worker_leaves_a_route_if_its_anchor_says_that_others_can_have_its_layers(
    fleet: Routes,
) -> None:
    fleet.route(ANCHOR, FIRST, SECOND)
    assert fleet.client.zcard(keys.role_workers(RoleName("lm.span"), "accepting")) == 3, (
        "the third is free, and has too little memory"
    )
    fleet.run(scripts.note_gap(ANCHOR, "", {FIRST: "2 GiB are missing"}))
    assert fleet.order_words("drain", FIRST) == [
        "needed",
        "2 GiB are missing",
    ]
    assert fleet.order("drain", SECOND) == "ok"
    fleet.run(scripts.note_gap(ANCHOR, "", {}))
    assert fleet.order_words("stop", FIRST) == [
        "needed",
        f"{SECOND} is about to leave its route",
    ]
    fleet.route(ANCHOR, FIRST)
    assert fleet.order("stop", FIRST) == "ok"


def test_standby_span_is_recorded_by_a_listed_anchor_of_an_unused_worker(fleet: Routes) -> None:
    def note(anchor: WorkerId, worker: WorkerId) -> str:
        return fleet.run(scripts.note_standby(anchor, worker, "1:1"))

    fleet.route(ANCHOR, FIRST)
    assert (note(ANCHOR, SECOND), note(ANCHOR, FIRST)) == ("ok", "claimed")
    assert fleet.field("span", FIRST, SECOND, THIRD) == ["0:0", "1:1", ""]
    fleet.kill(ANCHOR)
    fleet.kill(SECOND)
    assert (note(ANCHOR, THIRD), note(OTHER_ANCHOR, SECOND), note(OTHER_ANCHOR, FIRST)) == (
        "unlisted",
        "unlisted",
        "ok",
    )
    assert fleet.field("span", SECOND, THIRD) == ["", ""]


def test_span_worker_in_a_route_may_leave_only_if_another_is_free(fleet: Routes) -> None:
    """A span worker in a route may leave only if another is free to replace it. A worker that
    stands by is free; a worker in another route, or one that is leaving, is not.
    """
    fleet.route(ANCHOR, FIRST)
    fleet.route(OTHER_ANCHOR, SECOND)
    assert fleet.order("drain", THIRD) == "ok", "no anchor uses it"
    assert fleet.order_words("stop", FIRST) == ["needed", ""]
    assert fleet.client.hget(keys.worker(FIRST), "leaving") is None
    assert fleet.order("resume", THIRD) == "ok"
    assert fleet.order("drain", FIRST) == "ok"
    fleet.kill(OTHER_ANCHOR)
    assert fleet.order("drain", SECOND) == "ok", "its anchor is lost"


def test_route_over_a_fenced_worker_is_refused_and_claims_no_other(fleet: Routes) -> None:
    fleet.kill(SECOND)
    assert fleet.set_route(ANCHOR, FIRST, SECOND) == ["gone", SECOND]
    assert fleet.anchor_of(FIRST) == "" and fleet.client.exists(keys.worker(SECOND)) == 0
    assert fleet.client.hget(keys.worker(ANCHOR), "route") is None


def test_worker_in_the_route_of_another_anchor_is_refused_until_that_one_is_fenced(
    fleet: Routes,
) -> None:
    fleet.route(ANCHOR, FIRST, SECOND)
    assert fleet.set_route(OTHER_ANCHOR, THIRD, SECOND) == ["claimed", SECOND]
    assert (fleet.anchor_of(SECOND), fleet.anchor_of(THIRD)) == (ANCHOR, "")
    fleet.kill(ANCHOR)
    fleet.route(OTHER_ANCHOR, THIRD, SECOND)
    assert (fleet.anchor_of(SECOND), fleet.anchor_of(THIRD)) == (OTHER_ANCHOR, OTHER_ANCHOR)


def test_worker_that_is_not_in_the_next_route_is_free(fleet: Routes) -> None:
    fleet.route(ANCHOR, FIRST, SECOND)
    fleet.route(ANCHOR, FIRST, THIRD)
    assert fleet.field("anchor", FIRST, SECOND, THIRD) == [ANCHOR, "", ANCHOR]
    fleet.route(OTHER_ANCHOR, SECOND)
    assert fleet.anchor_of(SECOND) == OTHER_ANCHOR
    fleet.route(ANCHOR, THIRD)
    assert fleet.anchor_of(SECOND) == OTHER_ANCHOR, "it is released by its own anchor only"


def test_route_records_its_workers_and_their_spans(fleet: Routes) -> None:
    generation = fleet.route(ANCHOR, SECOND, FIRST)
    assert fleet.client.hmget(keys.worker(ANCHOR), ["route", "generation"]) == [
        f'[["{SECOND}","0:0"],["{FIRST}","1:1"]]'.encode(),
        str(generation).encode(),
    ]
    assert fleet.field("span", FIRST, SECOND) == ["1:1", "0:0"]


def test_route_without_workers_releases_the_last_ones(fleet: Routes) -> None:
    fleet.route(ANCHOR, FIRST, SECOND)
    fleet.route(ANCHOR)
    assert fleet.field("anchor", FIRST, SECOND) == ["", ""]
    assert fleet.client.hget(keys.worker(ANCHOR), "route") == b"[]"


def test_generations_grow_also_when_redis_loses_the_last_one(fleet: Routes) -> None:
    seen = [
        fleet.route(anchor, worker) for anchor, worker in ((ANCHOR, FIRST), (OTHER_ANCHOR, SECOND))
    ]
    fleet.client.delete(keys.PREFIX + "route_generation")
    seen.append(fleet.route(ANCHOR, FIRST))
    beyond_the_clock = seen[-1] + 10**12
    fleet.client.set(keys.PREFIX + "route_generation", beyond_the_clock)
    seen += [fleet.route(ANCHOR, FIRST) for _ in range(2)]
    assert seen == sorted(set(seen)) and seen[-2:] == [beyond_the_clock + 1, beyond_the_clock + 2]


def suspect(control: Control, epoch: int) -> str:
    return control.run(scripts.suspect_task(REQUEST, STAGE, Epoch(epoch)))


def span_worker_dies(control: Control, epoch: int, *, observed_first: bool = False) -> None:
    """Let a span worker of the owner's route die while it computes for the task: the route's
    connections break, and the worker's keeper sees its process end.
    """
    control.register(FIRST, "lm.span")
    assert control.run(scripts.set_route(WORKER, [(FIRST, "1:2")])) == "ok"
    if observed_first:
        control.leave(FIRST, died=True)
    assert suspect(control, epoch) == "ok"
    if not observed_first:
        control.leave(FIRST, died=True)


@pytest.mark.parametrize("observed_first", [True, False])
def test_first_death_of_a_span_worker_is_counted_and_the_task_keeps_its_owner(
    control: Control, observed_first: bool
) -> None:
    epoch = control.own()
    span_worker_dies(control, epoch, observed_first=observed_first)
    task = control.task()
    assert (task["deaths"], task["state"], task["owner"]) == ("1", "running", WORKER)
    assert control.append(epoch) == "ok" and control.events_of(TaskLost) == []


def test_broken_connection_to_a_living_span_worker_counts_no_death(control: Control) -> None:
    """A connection may break because a process paused; its lease may lapse, and it joins again."""
    epoch = control.own()
    control.register(FIRST, "lm.span")
    assert control.run(scripts.set_route(WORKER, [(FIRST, "1:2")])) == "ok"
    for _ in range(2 * MAX_DEATHS):
        assert [suspect(control, epoch), control.fence(FIRST)] == ["ok", "ok"]
        control.register(FIRST, "lm.span")
    assert "deaths" not in control.task() and control.task()["owner"] == WORKER


def test_route_that_replaced_the_dead_worker_already_is_looked_through(control: Control) -> None:
    epoch = control.own()
    control.register(FIRST, "lm.span")
    for route in ([(FIRST, "1:2")], []):
        assert control.run(scripts.set_route(WORKER, route)) == "ok"
    control.leave(FIRST, died=True)
    assert suspect(control, epoch) == "ok"
    assert control.task()["deaths"] == "1"


def test_second_death_without_progress_grants_the_task_alone(control: Control) -> None:
    epoch = control.own()
    for index in range(2):
        span_worker_dies(control, epoch)
        assert control.append(epoch, index) == "ok", (
            "progress: the next death counts as the first again"
        )
    for _ in range(2):
        span_worker_dies(control, epoch)
    task = control.task()
    assert (task["deaths"], task["state"], task["owner"], task["alone"]) == (
        "2",
        "granted",
        "",
        "1",
    )
    assert [control.append(epoch, 2), suspect(control, epoch)] == ["stale", "stale"]
    assert control.client.smembers(keys.worker_tasks(WORKER)) == set()
    (lost,) = control.events_of(TaskLost)
    assert epoch < lost.epoch < control.epoch() and not lost.alone
    assert control.claim(control.epoch()) == "ok"


def test_task_that_ran_alone_fails_its_request_after_a_further_death(control: Control) -> None:
    epoch = control.own()
    for _ in range(2):
        span_worker_dies(control, epoch)
    alone = control.epoch()
    assert control.claim(alone) == "ok"
    span_worker_dies(control, alone)
    assert control.client.hget(keys.request(REQUEST), "code") == b"worker_lost"
    assert [control.append(alone), suspect(control, control.epoch())] == ["stale", "ended"]


def test_task_that_ran_alone_and_progressed_keeps_its_owner(control: Control) -> None:
    epoch = control.own(alone=True)
    assert control.append(epoch) == "ok"
    span_worker_dies(control, epoch)
    assert (control.task()["state"], control.task()["deaths"]) == ("running", "1")


def test_session_of_a_file_is_recorded_only_for_a_listed_worker(control: Control) -> None:
    def adopt(worker: WorkerId) -> str:
        return control.run(scripts.adopt_prefix(worker, STAGE, "talk", keep_s=60))

    assert adopt(WORKER) == "ok"
    assert control.client.hgetall(keys.cached_prefix("talk")) == {STAGE.encode(): WORKER.encode()}
    assert 0 < control.client.pttl(keys.cached_prefix("talk")) <= 60_000
    control.register(ANCHOR)
    control.kill()
    assert [adopt(ANCHOR), adopt(WORKER)] == ["ok", "stale"]
    assert control.client.hgetall(keys.cached_prefix("talk")) == {STAGE.encode(): ANCHOR.encode()}
