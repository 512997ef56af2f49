"""Fencing: a write that requires a right is refused, in the same script, once a higher epoch has
been granted.
"""

from typing import cast

from fleet.control import keys, scripts
from fleet.control.connect import pairs, text
from fleet.control.notices import MovedNotice, parse_notices
from fleet.core.events import TaskLost
from fleet.core.ids import CLIENT, EdgeName, Epoch, WorkerId
from tests.control_plane import (
    GATEWAY,
    OTHER,
    REQUEST,
    ROLE,
    STAGE,
    WORKER,
    Control,
    join,
    set_deadline,
)
from tests.support import stream_entries

OTHER_GATEWAY = WorkerId("gateway@test:2:b")
ROWS, IDS = EdgeName("rows"), EdgeName("ids")


def test_worker_of_another_version_is_refused_with_a_stored_reason(control: Control) -> None:
    fields = {"protocol": "1", "package": "2.0", "checkpoint": "abc"}
    assert join(control.client, "lm@new:1:a", **fields) == ["ok"]
    for field, own_value in (("protocol", "2"), ("package", "2.1"), ("checkpoint", "abd")):
        why = f"its {field} is {own_value}, that of lm@new:1:a is {fields[field]}"
        assert join(control.client, f"lm@new:1:{field}", **{**fields, field: own_value}) == [
            "skew",
            why,
        ]
    assert control.client.zcard(keys.REFUSED) == 3
    assert join(control.client, "lm@new:1:b", **fields) == ["ok"]


def test_stored_refusals_are_bounded_in_age_and_number_while_more_come(control: Control) -> None:
    """A worker that is started again and again has a new id each time."""
    assert join(control.client, "lm@new:1:a", package="2.0") == ["ok"]
    long_ago_us = int(control.client.time()[0] - 3700) * 1_000_000
    control.client.zadd(keys.REFUSED, {"lm@old:1:a its package is 1.0": long_ago_us})
    for number in range(110):
        assert join(control.client, f"lm@new:1:{number}", package="2.1")[0] == "skew"
    entries = cast("list[bytes]", control.client.zrange(keys.REFUSED, 0, -1))
    stored = [text(entry).partition(" ")[0] for entry in entries]
    assert stored == [f"lm@new:1:{number}" for number in range(10, 110)]


def test_split_stage_workers_with_different_page_layout_are_refused(control: Control) -> None:
    computes = {
        "stage": "lm",
        "dtype": "float32",
        "page_size_tokens": "16",
        "engine": "vllm",
        "tensor_parallel_size": "1",
        "quantization": "none",
        "device_kind": "cpu",
    }
    assert join(control.client, "lm.prefill@a", **computes) == ["ok"]
    other = {
        "dtype": "bfloat16",
        "page_size_tokens": "32",
        "engine": "torch",
        "tensor_parallel_size": "2",
        "quantization": "fp8",
        "device_kind": "cuda",
    }
    for field, own_value in other.items():
        why = f"its {field} is {own_value}, that of lm.prefill@a is {computes[field]}"
        assert join(control.client, f"lm.decode@{field}", **{**computes, field: own_value}) == [
            "skew",
            why,
        ]
    assert join(control.client, "lm.decode@b", **computes) == ["ok"]
    other_stage = {**computes, "stage": "voice", "dtype": "bfloat16"}
    assert join(control.client, "voice.decode@c", **other_stage) == ["ok"], (
        "it shares no pages with these workers"
    )
    assert join(control.client, "ears@d") == ["ok"]


def test_lapsed_workers_do_not_refuse_another_version(control: Control) -> None:
    """The listed workers were not fenced yet, but their leases have lapsed."""
    assert join(control.client, "lm@dead:1:a", checkpoint="old") == ["ok"]
    assert join(control.client, "lm@next:1:a", checkpoint="new")[0] == "skew", (
        "the first worker may still be alive"
    )
    set_deadline(control.client, "lm@dead:1:a", 1)
    assert join(control.client, "lm@next:1:b", checkpoint="new") == ["ok"]
    assert join(control.client, "lm@next:1:c", checkpoint="old")[0] == "skew", (
        "the live worker decides the version"
    )


def test_failed_step_counts_as_a_death_and_keeps_its_worker(control: Control) -> None:
    """Only the owner may report it; it then owns the task no more, and may claim it again."""
    old = control.own()
    now = control.own() if control.run(scripts.lose_task(REQUEST, STAGE, old)) == "ok" else old
    assert control.run(scripts.lose_task(REQUEST, STAGE, old)) == "stale"
    assert (control.append(old), control.task()["owner"]) == ("stale", WORKER)
    assert control.run(scripts.lose_task(REQUEST, STAGE, now)) == "ok"
    assert (control.task()["state"], control.task()["deaths"], control.task()["owner"]) == (
        "granted",
        "2",
        "",
    )
    assert [event.deaths for event in control.events_of(TaskLost)] == [1, 2]
    assert control.client.smembers(keys.worker_tasks(WORKER)) == set()
    assert control.client.zscore(keys.WORKERS, WORKER) is not None
    control.abort()
    assert control.run(scripts.lose_task(REQUEST, STAGE, control.epoch())) == "ended"


def test_death_over_an_idle_task_is_not_counted(control: Control) -> None:
    """Only a death with unprocessed input counts, even if the input would have to be consumed again
    from the beginning.
    """

    def die(*, rested: int | None = None) -> None:
        control.register(WORKER)
        assert control.grant(control.epoch(), alone=True) == "ok"
        old, epoch = epochs[-1], control.epoch()
        epochs.append(epoch)
        assert (
            control.run(
                scripts.claim(WORKER, ROLE, "0-1", REQUEST, STAGE, epoch, inputs=(ROWS, IDS))
            )
            == "ok"
        )
        assert control.run(scripts.report_idle(REQUEST, STAGE, old, {ROWS: 99})) == "stale"
        if rested is not None:
            assert (
                control.run(scripts.report_idle(REQUEST, STAGE, epoch, {ROWS: rested, IDS: 0}))
                == "ok"
            )
        control.kill()

    epochs = [Epoch(1)]
    for arrives, rested in (
        (False, None),
        (False, 0),
        (True, None),
        (False, 1),
        (False, None),
        (True, 1),
    ):
        if arrives:
            control.client.xadd(keys.edge(REQUEST, ROWS), {"h": "a chunk"})
        die(rested=rested)
    lost = control.events_of(TaskLost)
    assert [event.deaths for event in lost] == [0, 0, 1, 1, 2, 3]
    assert [event.alone for event in lost] == [False, False, True, False, True, True]


def test_death_counts_as_alone_only_for_a_dead_worker_with_an_alone_grant(control: Control) -> None:
    for alone, died in ((False, True), (True, True), (True, False)):
        control.register(WORKER)
        control.own(alone=alone)
        control.leave(died=died)
    assert [event.alone for event in control.events_of(TaskLost)] == [False, True, False]
    assert control.task()["died_alone"] == ""


def test_attach_at_a_higher_epoch_than_that_of_redis_is_accepted_and_raises_it(
    control: Control,
) -> None:
    """Redis lost the writes since `before`: the attach of the other gateway."""
    control.register(OTHER_GATEWAY, "")
    before = control.epoch(CLIENT)
    lost = Epoch(before + 3_600_000_000)
    assert control.run(scripts.attach(REQUEST, OTHER_GATEWAY)) == "ok"
    assert control.run(scripts.attach(REQUEST, GATEWAY, held=lost)) == "ok"
    assert control.task(CLIENT)["owner"] == GATEWAY and control.epoch(CLIENT) > lost
    assert control.run(scripts.attach(REQUEST, OTHER_GATEWAY, held=lost)) == "stale"
    assert control.abort(right=before) == "stale"
    assert control.abort(right=Epoch(control.epoch(CLIENT) + 1)) == "ok"


def test_attach_notifies_the_gateway_that_held_the_request(control: Control) -> None:
    control.register(OTHER_GATEWAY, "")
    for _ in range(2):
        assert control.run(scripts.attach(REQUEST, OTHER_GATEWAY)) == "ok"
    notices = [
        notice
        for _, fields in stream_entries(control.client, keys.inbox(GATEWAY))
        for notice in parse_notices(pairs(fields))
    ]
    (moved,) = [notice for notice in notices if isinstance(notice, MovedNotice)]
    assert moved.request == REQUEST and moved.epoch < control.epoch(CLIENT)
    assert control.client.xlen(keys.inbox(OTHER_GATEWAY)) == 0, (
        "a gateway needs no notice of its own attach"
    )


def test_detach_gives_up_a_request_only_for_its_gateway_at_its_epoch(control: Control) -> None:
    """Another gateway may attach before the call arrives, which must then neither detach nor abort
    the request.
    """
    control.register(OTHER_GATEWAY, "")
    seen = control.epoch(CLIENT)
    assert control.run(scripts.attach(REQUEST, OTHER_GATEWAY)) == "ok"
    assert control.run(scripts.detach(REQUEST, GATEWAY, seen)) == "stale"
    assert control.run(scripts.detach(REQUEST, GATEWAY, control.epoch(CLIENT))) == "stale"
    held = control.epoch(CLIENT)
    assert control.run(scripts.detach(REQUEST, OTHER_GATEWAY, held)) == "ok"
    assert control.task(CLIENT)["owner"] == "" and not control.client.smembers(
        keys.worker_tasks(OTHER_GATEWAY)
    )
    (lost,) = [event for event in control.events_of(TaskLost) if event.stage == CLIENT]
    assert lost.epoch == control.epoch(CLIENT) > held
    assert control.run(scripts.detach(REQUEST, OTHER_GATEWAY, held)) == "stale"
    assert control.run(scripts.attach(REQUEST, GATEWAY)) == "ok"
    control.abort()
    assert control.run(scripts.detach(REQUEST, GATEWAY, control.epoch(CLIENT))) == "ended"


def test_cached_prefix_is_written_only_by_the_task_owner(control: Control) -> None:
    def retain(epoch: Epoch, worker: WorkerId, num_rows: int = 3) -> str:
        return control.run(
            scripts.cache_prefix(
                REQUEST, STAGE, epoch, worker, "talk", num_rows=num_rows, reused=2, keep_s=60
            )
        )

    old = control.own()
    assert retain(old, WORKER) == "ok"
    control.kill()
    control.register(OTHER)
    new = control.own(OTHER)
    assert [retain(new, OTHER, num_rows=0), retain(old, WORKER)] == ["ok", "stale"]
    assert control.client.hgetall(keys.cached_prefix("talk")) == {
        STAGE.encode(): WORKER.encode()
    }, "the new owner caches nothing"
    assert [retain(new, OTHER), retain(old, WORKER)] == ["ok", "stale"]
    assert control.client.hgetall(keys.cached_prefix("talk")) == {STAGE.encode(): OTHER.encode()}
    assert 0 < control.client.pttl(keys.cached_prefix("talk")) <= 60_000
    assert control.task()["cached_rows"] == "2"
    control.abort()
    assert [retain(new, OTHER), retain(control.epoch(), OTHER)] == ["ended", "ended"]


def test_fact_that_needs_no_right_is_logged_and_kept_under_one_id(control: Control) -> None:
    assert control.run(scripts.log_fact("warning", "worker", WORKER, STAGE, "it died")) == "ok"
    logged, kept = (stream_entries(control.client, key) for key in (keys.LOGS, keys.FACTS))
    assert logged == kept and len(logged) == 1
