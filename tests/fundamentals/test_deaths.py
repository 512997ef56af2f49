"""Recovery: after the death of a worker, a successor continues where the log ends, and the answer
equals the undisturbed one. A task whose workers die again and again runs alone, then becomes a dead
letter.
"""

import asyncio
from collections.abc import Callable

import pytest

from fleet.control import keys
from fleet.control.dead_letters import read_letters
from fleet.core.errors import FleetError
from fleet.core.events import TaskGranted, TaskLost
from fleet.core.ids import CLIENT, EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import Graph, get_graph
from tests.control_plane import GATEWAY, MAX_DEATHS, OTHER, REQUEST, STAGE, WORKER, Control
from tests.disturbances import OMNI, on_chunk, replace_worker
from tests.harness import (
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    collected,
    fake_spec,
    held,
    in_step,
    open_fleet,
)
from tests.support import wait_until

TEXT = get_graph("text")

LOSSES: dict[str, Callable[[Control], object]] = {
    "fenced by the leader": lambda control: control.fence(),
    "seen dying by its keeper": lambda control: control.leave(died=True),
    "it left": lambda control: control.leave(),
    "failed in a step": lambda control: control.lose_task(control.epoch()),
    "redelivered by an operator": lambda control: control.redeliver(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_task_is_granted_again_by_the_script_that_loses_it(control: Control, name: str) -> None:
    old = control.own()
    assert control.append(old) == "ok"
    assert LOSSES[name](control) == "ok"
    (lost,), granted = control.events_of(TaskLost), control.events_of(TaskGranted)[-1]
    assert old < lost.epoch < granted.epoch == control.epoch()
    assert control.grants() == [(STAGE, control.epoch(), False)]
    control.register(OTHER)
    assert control.claim(worker=OTHER) == "ok"
    assert [control.append(epoch, 1) for epoch in (old, control.epoch())] == ["stale", "ok"]


def test_lost_client_is_not_granted(control: Control) -> None:
    """The client's end of a request is a task of its gateway. When the gateway gives that task up,
    no script grants it: another gateway attaches, or the leader aborts the request.
    """
    assert control.detach(GATEWAY, control.epoch(CLIENT)) == "ok"
    assert control.task(CLIENT)["state"] == "lost"
    assert [event.stage for event in control.events_of(TaskGranted)] == [STAGE]


def test_deaths_without_progress_are_counted_and_leaving_is_not(control: Control) -> None:
    """Deaths without progress are counted, and a worker that leaves does not count. After progress,
    the count starts again.
    """
    for num_chunks in (0, 0, 1, 1):
        epoch = control.own()
        if num_chunks > int(control.task().get("produced:text", 0)):
            assert control.append(epoch) == "ok"
        control.kill()
        control.register(WORKER)
    control.own()
    assert control.leave() == "ok"
    assert [event.deaths for event in control.events_of(TaskLost)] == [1, 2, 1, 2, 2]


def test_request_fails_after_a_death_over_its_task_that_ran_alone(control: Control) -> None:
    """After two deaths a task runs alone; if its worker dies again, the request fails and becomes a
    dead letter.
    """
    seen: list[tuple[str, bool]] = []
    for _ in range(MAX_DEATHS + 1):
        assert control.claim() == "ok"
        control.kill()
        control.register(WORKER)
        seen.append((control.task()["state"], control.task()["alone"] == "1"))
    assert seen == [("granted", False), ("granted", True), ("aborted", True)]
    last = control.events_of(TaskLost)[-1]
    assert last.alone and last.deaths == MAX_DEATHS + 1
    assert [letter.request for letter in read_letters(control.client)] == [REQUEST]
    assert control.redeliver() == "ended"


def test_lapsed_lease_moves_the_task_and_counts_no_death(control: Control) -> None:
    """A worker whose lease lapses may be paused, and live: its tasks move to others, however often
    that happens, and nothing counts against them.
    """
    for _ in range(3 * MAX_DEATHS):
        control.own()
        assert control.fence() == "ok"
        control.register(WORKER)
    assert {event.deaths for event in control.events_of(TaskLost)} == {0}
    assert control.task()["state"] == "granted" and control.task()["alone"] == ""


def test_late_end_of_a_silent_worker_counts_against_a_task_without_progress(
    control: Control,
) -> None:
    """A worker's lease lapses before its keeper sees its process end. The death counts against a
    task that has not progressed since, although the task has moved.
    """
    for deaths in (1, 2):
        control.own()
        assert [control.fence(), control.leave(died=True)] == ["ok", "ok"]
        control.register(WORKER)
        assert control.task()["deaths"] == str(deaths)
    assert control.task()["alone"] == "1", "the grant after the second death is to run alone"
    control.register(OTHER)
    assert [control.claim(), control.fence()] == ["ok", "ok"]
    assert control.claim(worker=OTHER) == "ok"
    assert control.append(control.epoch()) == "ok"
    assert control.leave(died=True) == "ok"
    assert control.task()["deaths"] == "2", "the task has progressed since"


def test_late_end_of_a_worker_that_ran_a_task_alone_condemns_its_request(control: Control) -> None:
    control.own(alone=True)
    for field, value in (("deaths", MAX_DEATHS), ("produced_at_death", 0)):
        control.client.hset(keys.task(REQUEST, STAGE), field, value)
    assert control.fence() == "ok"
    assert [letter.request for letter in read_letters(control.client)] == []
    assert control.leave(died=True) == "ok"
    assert [letter.request for letter in read_letters(control.client)] == [REQUEST]


@pytest.mark.parametrize("at", [0, 3, 15])
@pytest.mark.parametrize("graph", [OMNI, TEXT], ids=lambda graph: graph.name)
@pytest.mark.parametrize("conductor", [True, False])
async def test_answer_is_complete_after_each_stage_is_killed_twice(
    redis_url: str, graph: Graph, at: int, conductor: bool
) -> None:
    """The answer is complete although every stage's worker is killed twice. Scripts grant the tasks
    of a fenced worker, so no conductor is needed.
    """
    async with open_fleet(redis_url, *in_step(graph), conductor=conductor) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        for stage in graph.stages:
            spec = fake_spec(fleet)

            def kill(
                edge: EdgeName, index: int, spec: RequestSpec = spec, stage: StageName = stage.name
            ) -> None:
                if edge == graph.edges[0].name and index in (at, at + 4):
                    replace_worker(fleet, spec, stage)

            assert_same(await answer_disturbed(client, spec, None, kill), expected)
        await asyncio.to_thread(wait_until, lambda: not held(fleet), "workers to hold nothing")


async def test_answer_is_complete_after_all_stages_are_killed_together(redis_url: str) -> None:
    async with open_fleet(redis_url, *in_step(OMNI)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)

        def kill() -> None:
            for stage in OMNI.stages:
                replace_worker(fleet, spec, stage.name)

        disturb = on_chunk("text", 8, kill)
        assert_same(await answer_disturbed(client, spec, None, disturb), expected)


async def test_worker_resumed_after_its_lease_writes_nothing(redis_url: str) -> None:
    """A worker that resumes after its lease lapsed is fenced: all its later writes are refused, and
    it drops its tasks.
    """
    async with open_fleet(redis_url, *in_step(OMNI)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)

        def fence_talker() -> None:
            stale = fleet.owner(spec.id, StageName("talker"))
            fleet.add_worker("talker")
            fleet.fence(stale)
            wait_until(lambda: stale.worker in fleet.killed, "the stale worker to end")

        disturb = on_chunk("text", 5, fence_talker)
        assert_same(await answer_disturbed(client, spec, None, disturb), expected)


async def test_request_that_kills_its_worker_alone_becomes_the_only_dead_letter(
    redis_url: str,
) -> None:
    async with open_fleet(redis_url, *in_step(TEXT)) as (fleet, client):
        expected = await answer(client, fake_spec(fleet))
        # Neither answer is read at first, so both pause: no progress resets the count of deaths.
        poison = await client.requests.submit(fake_spec(fleet), None)
        other = await client.requests.submit(fake_spec(fleet), None)
        both = {poison.request_id, other.request_id}
        for together, num_new in ((both, 1), (both, 2), ({poison.request_id}, 1)):
            await asyncio.to_thread(kill_with_tasks, fleet, poison.request_id, together, num_new)
        with pytest.raises(FleetError, match=f"3 workers of stage {STAGE} died") as caught:
            _ = [chunk async for chunk in poison]
        assert caught.value.code == "worker_lost"
        assert_same(await collected(other, other.spec), expected)
        assert [letter.request for letter in read_letters(fleet.clients[0])] == [poison.request_id]


def kill_with_tasks(
    fleet: ThreadFleet, request: RequestId, together: set[RequestId], num_new: int
) -> None:
    """Add `num_new` workers, then kill the request's worker at a moment when it runs exactly the
    requests in `together`, all paused.
    """
    dying = fleet.owner(request, STAGE)
    wait_until(lambda: set(dying.tasks) == together, f"{together} to run together")
    wait_until(lambda: dying.tasks[request].paused, "the task to pause")
    for _ in range(num_new):
        fleet.add_worker(dying.role)
    fleet.kill(dying)
