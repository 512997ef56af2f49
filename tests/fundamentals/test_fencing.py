"""Fencing: a write that requires a right is refused, in the same script, once a higher epoch has
been granted.
"""

import re
from pathlib import Path
from typing import cast

from fleet.control import keys, scripts
from fleet.control.connect import pairs, text
from fleet.control.notices import MovedNotice, parse_notices
from fleet.core.chunk import encode_location
from fleet.core.events import TaskFailed, TaskGranted, TaskLost
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, Walk, WorkerId
from tests.fundamentals.control_plane import (
    GATEWAY,
    OTHER,
    REQUEST,
    ROLE,
    STAGE,
    TEXT,
    WORKER,
    Control,
    join,
    place,
    set_deadline,
)
from tests.support import stream_entries

READ_ONLY = {"admission", "availability", "leases", "queues", "stale_streams"}
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


def test_grant_at_stale_epoch_is_refused(control: Control) -> None:
    old = control.epoch()
    assert control.grant(old) == "ok"
    assert control.grant(old) == "stale"


def test_grant_of_an_owned_task_is_refused(control: Control) -> None:
    """An overdue grant that was claimed at the last moment remains with its owner."""
    assert control.grant(control.own()) == "owned"


def test_grant_by_a_former_leader_is_refused(control: Control) -> None:
    control.leader = control.depose()
    assert control.grant(control.epoch()) == "not_leader"


def test_epochs_only_rise_and_follow_redis_time(control: Control) -> None:
    seen = [control.epoch()]
    for _ in range(3):
        control.grant(seen[-1])
        seen.append(control.epoch())
    seconds, _ = control.client.time()
    assert seen == sorted(set(seen))
    assert abs(seen[-1] / 1e6 - seconds) < 5


def test_second_claim_of_one_grant_is_refused(control: Control) -> None:
    epoch = control.own()
    assert control.claim(epoch, OTHER) == "unlisted"
    control.register(OTHER)
    assert control.claim(epoch, OTHER) == "stale"


def test_stale_append_finish_ack_and_fail_change_nothing(control: Control) -> None:
    old = control.own()
    assert control.append(old) == "ok"
    control.kill()
    assert control.grant(control.epoch()) == "ok"
    assert control.append(old, 1) == "stale"
    assert control.append(old, 1, finish=True) == "stale"
    failed = TaskFailed(
        request=REQUEST, stage=STAGE, epoch=old, code="engine_error", message="late"
    )
    assert control.run(scripts.fail(failed)) == "stale"
    stale_ack = scripts.Ack(
        request=REQUEST, stage=CLIENT, epoch=Epoch(1), edge=TEXT, consumed=1, producer=STAGE
    )
    assert control.run(scripts.ack([stale_ack])) == "stale"
    assert control.task()["state"] == "granted"
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 1


def test_chunk_index_is_appended_once_and_in_order(control: Control) -> None:
    epoch = control.own()
    assert [control.append(epoch, i) for i in (0, 0, 2, 1)] == ["ok", "duplicate", "gap", "ok"]
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 2


def test_consumed_count_only_grows(control: Control) -> None:
    control.own()
    for consumed in (5, 3):
        ack = scripts.Ack(
            request=REQUEST,
            stage=CLIENT,
            epoch=control.epoch(CLIENT),
            edge=TEXT,
            consumed=consumed,
            producer=STAGE,
        )
        control.run(scripts.ack([ack]))
    assert control.client.hget(keys.task(REQUEST, CLIENT), "consumed:text") == b"5"


def test_abort_by_a_stale_gateway_is_refused(control: Control) -> None:
    """After another gateway attached, the first one's late disconnect has no effect."""
    old = control.epoch(CLIENT)
    control.register(OTHER_GATEWAY, "")
    assert control.run(scripts.attach(REQUEST, OTHER_GATEWAY)) == "ok"
    assert [
        control.abort(right=right) for right in (old, control.epoch(CLIENT), scripts.API_RIGHT)
    ] == ["stale", "ok", "ended"]


def test_writes_for_an_ended_request_are_refused(control: Control) -> None:
    epoch = control.own()
    control.abort()
    assert control.append(control.epoch()) == "ended"
    assert control.append(epoch) == "stale"
    assert control.grant(control.epoch()) == "ended"
    assert control.run(scripts.attach(REQUEST, GATEWAY)) == "ended"
    assert (
        control.run(scripts.set_walk(control.leader, REQUEST, STAGE, TEXT, 0, Walk("decode")))
        == "ended"
    )


def test_worker_is_fenced_only_with_the_deadline_that_the_leader_saw(control: Control) -> None:
    epoch = control.own()
    seen_us = int(control.client.zscore(keys.WORKERS, WORKER) or 0)
    assert (
        control.run(scripts.fence_worker("somebody|1", WORKER, deadline_us=seen_us)) == "not_leader"
    )
    assert control.run(scripts.renew(WORKER, 1_000_000, {})) == "ok"
    assert control.run(scripts.fence_worker(control.leader, WORKER, deadline_us=seen_us)) == "alive"
    assert control.fence() == "ok"
    assert control.append(epoch) == "stale"
    assert control.run(scripts.renew(WORKER, 1_000_000, {})) == "unlisted"
    assert (control.task()["state"], control.task()["owner"]) == ("granted", "")


def test_walk_is_set_once_per_index_and_only_by_the_leader(control: Control) -> None:
    def set_walk(leader: str, walk: str) -> str:
        return control.run(scripts.set_walk(leader, REQUEST, STAGE, TEXT, 3, Walk(walk)))

    assert set_walk("somebody|1", "decode") == "not_leader"
    assert set_walk(control.leader, "decode") == "ok"
    assert set_walk(control.leader, "prefill") == "duplicate"


def test_submit_beyond_the_queue_bound_is_refused(control: Control) -> None:
    assert control.submit(bound=1)[0] == "full"
    assert control.client.exists(keys.request(RequestId("req-2"))) == 0


def test_one_conductor_leads_and_a_new_term_is_higher(control: Control) -> None:
    assert control.run(scripts.lead(WorkerId("conductor@other"), "", 60_000)) == ""
    former = control.depose()
    assert int(control.leader.rpartition("|")[2]) > int(former.rpartition("|")[2])


def test_claim_of_a_repeated_grant_is_refused(control: Control) -> None:
    old = control.epoch()
    control.grant(old)
    first = control.epoch()
    control.grant(first)
    assert control.claim(first) == "stale"
    assert control.claim(control.epoch()) == "ok"


def test_finished_task_is_granted_only_to_recompute_tensors(control: Control) -> None:
    """Its former worker may then write nothing more; the new one relocates the tensors and finishes
    the task again.
    """
    old = control.own()
    assert control.append(old, finish=True) == "ok"
    assert control.relocate(old, WORKER) == "ok"
    assert control.grant(old) == "owned"
    control.register(OTHER)
    assert control.lose_tensors() == "ok"
    new = control.epoch()
    assert control.claim(new, OTHER) == "ok"
    assert (control.grant(old), control.grant(new)) == ("stale", "owned")
    assert [
        control.relocate(old, WORKER),
        control.append(old, finish=True),
        control.append(old, 1),
    ] == ["stale"] * 3
    assert control.task()["state"] == "running"
    assert control.relocate(new, OTHER, 1) == "gap"
    assert control.relocate(new, OTHER) == "ok"
    assert control.client.hget(keys.loc(REQUEST, TEXT), "0") == encode_location(place(OTHER))
    assert control.append(new, finish=True) == "duplicate"
    assert control.task()["state"] == "finished"
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 1


def test_relocate_by_a_fenced_worker_is_refused(control: Control) -> None:
    old = control.own()
    control.append(old)
    control.relocate(old, OTHER)
    control.kill()
    assert control.relocate(old, WORKER) == "stale"
    assert control.client.hget(keys.loc(REQUEST, TEXT), "0") == encode_location(place(OTHER))
    control.abort()
    assert control.relocate(control.epoch(), WORKER) == "ended"
    assert control.client.exists(keys.loc(REQUEST, TEXT)) == 0


def test_lost_tensors_are_reported_only_by_the_consumer_owner(control: Control) -> None:
    """A producer that runs recomputes them without an order; a finished one is granted again,
    once.
    """
    old, producing = control.epoch(CLIENT), control.own()
    control.register(OTHER_GATEWAY, "")
    assert control.run(scripts.attach(REQUEST, OTHER_GATEWAY)) == "ok"
    assert (control.lose_tensors(), control.epoch()) == ("ok", producing)
    assert control.append(producing, finish=True) == "ok"
    assert (control.lose_tensors(old), control.epoch()) == ("stale", producing)
    assert control.lose_tensors() == "ok" and control.epoch() > producing
    recomputing = control.epoch()
    assert control.events_of(TaskGranted)[-1] == TaskGranted(
        request=REQUEST, stage=STAGE, epoch=recomputing
    )
    assert (control.lose_tensors(), control.epoch()) == ("ok", recomputing), (
        "a repeated report grants nothing"
    )
    control.abort()
    assert control.lose_tensors() == "ended"


def test_deaths_without_progress_are_counted_and_leaving_is_not(control: Control) -> None:
    """After progress, the next death is counted as the first again."""
    seen: list[int] = []
    for num_chunks in (0, 0, 1, 1):
        epoch = control.own()
        if num_chunks > int(control.task().get("produced:text", 0)):
            assert control.append(epoch) == "ok"
        control.kill()
        seen.append(int(control.task()["deaths"]))
        control.register(WORKER)
    assert seen == [1, 2, 1, 2]
    control.own()
    assert control.leave() == "ok"
    assert control.task()["deaths"] == "2"
    lost = control.events_of(TaskLost)
    assert [event.deaths for event in lost] == [1, 2, 1, 2, 2]
    assert lost[-1].epoch < control.epoch()


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


def test_second_fence_of_a_worker_leaves_the_next_owner(control: Control) -> None:
    control.own()
    control.kill()
    control.register(OTHER)
    epoch = control.own(OTHER)
    assert control.run(scripts.fence_worker(control.leader, WORKER)) == "alive"
    assert control.leave() == "ok"
    assert (control.epoch(), control.task()["owner"], control.task()["deaths"]) == (
        epoch,
        OTHER,
        "1",
    )


def test_dead_letter_is_written_only_by_the_leader_for_a_live_request(control: Control) -> None:
    def end(leader: str) -> str:
        call = scripts.end_request(
            leader, REQUEST, "failed", "worker_lost", "three died", None, dead_stage=STAGE
        )
        return control.run(call)

    epoch = control.own()
    old = control.depose()
    assert end(old) == "not_leader"
    assert (control.client.exists(keys.DEAD), control.append(epoch)) == (0, "ok")
    assert [end(control.leader), end(control.leader)] == ["ok", "ended"]
    ((_, letter),) = stream_entries(control.client, keys.DEAD)
    assert (letter[b"r"], letter[b"s"], letter[b"why"]) == (
        REQUEST.encode(),
        STAGE.encode(),
        b"three died",
    )
    assert letter[b"spec"] == control.client.hget(keys.request(REQUEST), "spec")
    assert control.append(epoch, 1) == "stale"


def test_failed_request_without_a_dead_stage_writes_no_dead_letter(control: Control) -> None:
    ended = scripts.end_request(control.leader, REQUEST, "failed", "engine_error", "NaN", None)
    assert control.run(ended) == "ok"
    assert control.client.exists(keys.DEAD) == 0


def test_gateway_reattaches_only_requests_without_a_newer_gateway(control: Control) -> None:
    other, back = OTHER_GATEWAY, WorkerId("gateway@test:1:c")
    assert control.run(scripts.attach(REQUEST, other)) == "unlisted"
    for gateway in (other, back):
        control.register(gateway, "")
    first = control.epoch(CLIENT)
    assert control.run(scripts.attach(REQUEST, other)) == "ok"
    assert control.run(scripts.attach(REQUEST, back, held=first)) == "stale"
    assert control.task(CLIENT)["owner"] == other
    held = control.epoch(CLIENT)
    replies = [control.run(scripts.attach(REQUEST, back, held=held)) for _ in range(2)]
    assert replies == ["ok", "ok"], "the first reply may have been lost"
    assert control.task(CLIENT)["owner"] == back


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


def test_submit_by_a_fenced_gateway_or_of_a_known_id_is_refused(control: Control) -> None:
    assert control.submit(REQUEST)[0] == "exists"
    control.kill(GATEWAY)
    assert control.submit()[0] == "stale"
    assert control.client.exists(keys.request(RequestId("req-2"))) == 0


def test_worker_registers_once_and_a_fenced_one_neither_renews_nor_drains(control: Control) -> None:
    assert control.register(WORKER) == "exists"
    control.kill()
    assert control.run(scripts.renew(WORKER, 1_000_000, {"running": 1})) == "unlisted"
    assert control.run(scripts.drain(WORKER)) == "unlisted"
    assert control.client.exists(keys.worker(WORKER)) == 0


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


def test_former_leader_deletes_no_retained_audio(control: Control) -> None:
    control.client.zadd(keys.RETAINED_AUDIO, {"req-ended|": 1})
    former = control.depose()
    assert (
        control.run(scripts.sweep(former)) == "not_leader"
        and control.client.zcard(keys.RETAINED_AUDIO) == 1
    )
    assert (
        control.run(scripts.sweep(control.leader)) == "ok"
        and control.client.zcard(keys.RETAINED_AUDIO) == 0
    )


def test_fact_that_needs_no_right_is_logged_and_kept_under_one_id(control: Control) -> None:
    assert control.run(scripts.log_fact("warning", "worker", WORKER, STAGE, "it died")) == "ok"
    logged, kept = (stream_entries(control.client, key) for key in (keys.LOGS, keys.FACTS))
    assert logged == kept and len(logged) == 1


def test_every_writing_script_has_a_fencing_test() -> None:
    files = Path(__file__).parent.glob("test_fencing*.py")
    sources = [file.read_text() for file in [*files, Path(__file__).parent / "control_plane.py"]]
    tried = {name for source in sources for name in re.findall(r"scripts\.(\w+)\(", source)}
    assert set(scripts.SCRIPTS) - READ_ONLY <= tried
