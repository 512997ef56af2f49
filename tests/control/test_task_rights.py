"""Rights of workers and gateways to a task: worker deaths are counted per task, and a right that
Redis lost is attached again.
"""

from typing import cast

from fleet.control import keys, scripts
from fleet.control.connect import pairs
from fleet.control.notices import MovedNotice, parse_notices
from fleet.core.events import TaskLost
from fleet.core.ids import CLIENT, EdgeName, Epoch, WorkerId
from tests.control_plane import (
    GATEWAY,
    OTHER,
    OTHER_GATEWAY,
    REQUEST,
    ROLE,
    STAGE,
    WORKER,
    Control,
)
from tests.support import stream_entries

ROWS, IDS = EdgeName("rows"), EdgeName("ids")


def test_failed_step_counts_as_a_death_and_keeps_its_worker(control: Control) -> None:
    """A failed step counts as a death. The worker stays registered but no longer owns the task, and
    may claim it again.
    """
    for _ in range(2):
        assert control.lose_task(control.own()) == "ok"
    task = control.task()
    assert (task["state"], task["deaths"], task["owner"]) == ("granted", "2", "")
    assert [event.deaths for event in control.events_of(TaskLost)] == [1, 2]
    assert control.tasks_of() == set()
    assert control.client.zscore(keys.WORKERS, WORKER) is not None


def test_death_over_an_idle_task_is_not_counted(control: Control) -> None:
    """A death counts only if the task had unprocessed input, even if a new owner must consume all
    input again from the beginning.
    """

    def report_idle(epoch: Epoch, rested: int) -> str:
        return control.run(scripts.report_idle(REQUEST, STAGE, epoch, {ROWS: rested, IDS: 0}))

    control.client.hset(keys.request(REQUEST), "edges", f"{ROWS},{IDS}")
    arrivals = ((False, None), (False, 0), (True, None), (False, 1), (False, None), (True, 1))
    for arrives, rested in arrivals:
        if arrives:
            control.client.xadd(keys.edge(REQUEST, ROWS), {"h": "a chunk"})
        control.register(WORKER)
        epoch = control.grant_alone()
        old = Epoch(epoch - 1)
        claim = scripts.claim(WORKER, ROLE, "0-1", REQUEST, STAGE, epoch, inputs=(ROWS, IDS))
        assert control.run(claim) == "ok"
        assert report_idle(old, 99) == "stale"
        assert rested is None or report_idle(epoch, rested) == "ok"
        control.kill()
    lost = control.events_of(TaskLost)
    assert [event.deaths for event in lost] == [0, 0, 1, 1, 2, 3]
    assert [event.alone for event in lost] == [False, False, True, False, True, True]


def test_death_counts_as_alone_only_for_a_dead_worker_with_an_alone_grant(control: Control) -> None:
    for alone, died in ((False, True), (True, True), (True, False)):
        control.register(WORKER)
        control.own(alone=alone)
        control.leave(died=died)
    assert [event.alone for event in control.events_of(TaskLost)] == [False, True, False]


def test_attach_at_a_higher_epoch_than_that_of_redis_is_accepted_and_raises_it(
    control: Control,
) -> None:
    """Redis lost the other gateway's attach. An attach that holds a higher epoch than Redis is
    accepted and raises the epoch in Redis, so that the lost holder's calls are refused.
    """
    control.register(OTHER_GATEWAY, "")
    before = control.epoch(CLIENT)
    lost = Epoch(before + 3_600_000_000)
    assert control.attach(OTHER_GATEWAY) == "ok"
    assert control.attach(GATEWAY, held=lost) == "ok"
    assert control.task(CLIENT)["owner"] == GATEWAY and control.epoch(CLIENT) > lost
    assert control.attach(OTHER_GATEWAY, held=lost) == "stale"
    assert control.abort(right=before) == "stale"
    assert control.abort(right=Epoch(control.epoch(CLIENT) + 1)) == "ok"


def test_attach_notifies_the_gateway_that_held_the_request(control: Control) -> None:
    control.register(OTHER_GATEWAY, "")
    for _ in range(2):
        assert control.attach(OTHER_GATEWAY) == "ok"
    notices = [notice for entry in control.inbox(GATEWAY) for notice in parse_notices(pairs(entry))]
    (moved,) = [notice for notice in notices if isinstance(notice, MovedNotice)]
    assert moved.request == REQUEST and moved.epoch < control.epoch(CLIENT)
    assert control.inbox(OTHER_GATEWAY) == [], "a gateway needs no notice of its own attach"


def test_detach_gives_up_a_request(control: Control) -> None:
    """A gateway that detaches gives the request up; a repeated call is refused, since its epoch is
    over.
    """
    held = control.epoch(CLIENT)
    assert [control.detach(GATEWAY, held) for _ in range(2)] == ["ok", "stale"]
    assert control.task(CLIENT)["owner"] == "" and control.tasks_of(GATEWAY) == set()
    (lost,) = control.events_of(TaskLost)
    assert lost.stage == CLIENT and lost.epoch == control.epoch(CLIENT) > held
    assert control.attach(GATEWAY) == "ok"


def test_cached_prefix_is_that_of_the_last_owner_with_rows(control: Control) -> None:
    def retain(epoch: Epoch, worker: WorkerId, num_rows: int = 3) -> str:
        return control.run(
            scripts.cache_prefix(
                REQUEST, STAGE, epoch, worker, "talk", num_rows=num_rows, reused=2, keep_s=60
            )
        )

    def cached_at() -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", control.client.hgetall(keys.cached_prefix("talk")))

    assert retain(control.own(), WORKER) == "ok"
    control.kill()
    control.register(OTHER)
    new = control.own(OTHER)
    assert retain(new, OTHER, num_rows=0) == "ok"
    assert cached_at() == {STAGE.encode(): WORKER.encode()}, "the new owner caches nothing"
    assert retain(new, OTHER) == "ok"
    assert cached_at() == {STAGE.encode(): OTHER.encode()}
    assert 0 < control.client.pttl(keys.cached_prefix("talk")) <= 60_000
    assert control.task()["cached_rows"] == "2"


def test_fact_that_needs_no_right_is_logged_and_kept_under_one_id(control: Control) -> None:
    assert control.run(scripts.log_fact("warning", "worker", WORKER, STAGE, "it died")) == "ok"
    logged, kept = (stream_entries(control.client, key) for key in (keys.LOGS, keys.FACTS))
    assert logged == kept and len(logged) == 1
