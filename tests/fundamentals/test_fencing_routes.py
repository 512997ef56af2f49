"""Routes of anchors, and the deaths of span workers over tasks: who may write them, and what they change."""

import json
from typing import cast

import pytest

from fleet.control import keys, scripts
from fleet.control.connect import run, text, texts
from fleet.core.events import TaskLost
from fleet.core.ids import WorkerId
from tests.fundamentals.control_plane import OTHER, REQUEST, STAGE, WORKER, Control, join

ROLE_OF_SPANS = "lm.span"
FIRST, SECOND, THIRD = (WorkerId(f"lm.span@test:{number}:s") for number in (5, 6, 7))


@pytest.fixture
def routed(control: Control) -> Control:
    """Two anchors and three span workers."""
    control.register(OTHER)
    for worker in (FIRST, SECOND, THIRD):
        control.register(worker, ROLE_OF_SPANS)
    return control


def set_route(control: Control, anchor: WorkerId, *workers: WorkerId) -> list[str]:
    hops = [(worker, f"{number}:{number}") for number, worker in enumerate(workers, start=1)]
    return texts(run(control.client, scripts.set_route(anchor, hops)))


def field_of(control: Control, worker: WorkerId, name: str) -> str:
    return text(cast("bytes | None", control.client.hget(keys.worker(worker), name)))


def test_route_is_recorded_under_growing_generations(routed: Control) -> None:
    (answer, first), (_, second) = set_route(routed, WORKER, FIRST, SECOND), set_route(routed, WORKER, FIRST, THIRD)
    assert answer == "ok" and int(second) > int(first) > 0
    assert field_of(routed, WORKER, "generation") == second
    assert json.loads(field_of(routed, WORKER, "route")) == [[FIRST, "1:1"], [THIRD, "2:2"]]
    assert [field_of(routed, worker, "anchor") for worker in (FIRST, SECOND, THIRD)] == [WORKER, "", WORKER]
    assert [field_of(routed, worker, "span") for worker in (FIRST, THIRD)] == ["1:1", "2:2"]


def test_generations_grow_although_redis_lost_the_last_one(routed: Control) -> None:
    _, first = set_route(routed, WORKER, FIRST)
    routed.client.delete(keys.PREFIX + "route_generation")
    _, second = set_route(routed, WORKER, FIRST)
    assert int(second) > int(first)


def test_fenced_anchor_cannot_set_a_route_and_its_workers_are_free(routed: Control) -> None:
    assert set_route(routed, WORKER, FIRST)[0] == "ok"
    assert set_route(routed, OTHER, FIRST) == ["claimed", FIRST]
    routed.kill()
    assert set_route(routed, WORKER, FIRST) == ["stale"]
    assert set_route(routed, OTHER, FIRST)[0] == "ok"


def test_route_through_a_gone_worker_is_refused_without_effect(routed: Control) -> None:
    routed.kill(SECOND)
    assert set_route(routed, WORKER, FIRST, SECOND) == ["gone", SECOND]
    assert field_of(routed, FIRST, "anchor") == "" and field_of(routed, WORKER, "route") == ""


def suspect(control: Control, epoch: int) -> str:
    return control.run(scripts.suspect_task(REQUEST, STAGE, type(control.epoch())(epoch)))


def test_death_over_a_task_is_counted_at_its_epoch_only(control: Control) -> None:
    old = control.own()
    assert suspect(control, old) == "ok" and control.task()["deaths"] == "1"
    assert control.run(scripts.lose_task(REQUEST, STAGE, old)) == "ok"
    control.own()
    assert suspect(control, old) == "stale" and control.task()["deaths"] == "2"
    control.abort()
    assert suspect(control, control.epoch()) == "ended"


def test_task_that_advances_between_deaths_keeps_its_owner(control: Control) -> None:
    epoch = control.own()
    for index in range(4):
        assert suspect(control, epoch) == "ok"
        assert control.append(epoch, index) == "ok"
    assert control.epoch() == epoch and control.task()["deaths"] == "1"


def test_second_death_without_progress_lets_the_task_run_alone_and_a_third_condemns_it(control: Control) -> None:
    epoch = control.own()
    assert [suspect(control, epoch), suspect(control, epoch)] == ["ok", "lost"]
    assert control.task()["state"] == "granted" and control.task()["alone"] == "1"
    alone = control.epoch()
    assert control.claim(alone) == "ok"
    assert suspect(control, alone) == "lost"
    assert control.task()["state"] == "lost", "the conductor gives it up"
    assert [(event.deaths, event.alone) for event in control.events_of(TaskLost)] == [(2, False), (3, True)]


def test_workers_with_other_kernels_are_refused_where_both_name_them(control: Control) -> None:
    """Only with invariant numerics do workers name their kernels."""
    assert join(control.client, "lm@new:1:a", kernels="AVX512 of torch 2") == ["ok"]
    why = "its kernels is AVX2 of torch 2, that of lm@new:1:a is AVX512 of torch 2"
    assert join(control.client, "talker@new:1:b", kernels="AVX2 of torch 2") == ["skew", why]
    assert join(control.client, "talker@new:1:c") == ["ok"]


def test_span_workers_are_compared_with_their_anchor(control: Control) -> None:
    own = {"stage": "lm", "dtype": "float32", "engine": "torch", "numerics": "fast"}
    assert join(control.client, "lm@new:1:a", **own) == ["ok"]
    assert join(control.client, "lm.span@new:2:b", **own) == ["ok"]
    for name, value in (("dtype", "bfloat16"), ("numerics", "invariant")):
        answer, why = join(control.client, f"lm.span@new:3:{name}", **{**own, name: value})
        assert answer == "skew" and why.startswith(f"its {name} is {value}, that of lm")
