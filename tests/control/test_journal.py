"""The journal has an entry for what happens to processes, roles and answers, written by the script
that makes the change; and the record of a process that has ended says for days what it held.
"""

from typing import Any, cast

import pytest

from fleet.control import keys, scripts
from fleet.control.connect import text
from fleet.control.lua_source import read
from fleet.control.telemetry.journal import entry_of
from fleet.core.errors import KeyAtLimit, NoWorker, Overloaded
from fleet.core.ids import RequestId, WorkerId
from fleet.telemetry.journal import WHAT, JournalEntry
from fleet.telemetry.views import (
    GONE_KEPT_DAYS,
    MAX_GONE_KEPT,
    SERIES_KEPT_S,
    SERIES_STEP_S,
    TaskRef,
)
from tests.control_plane import (
    CONDUCTOR,
    GATEWAY,
    MAX_DEATHS,
    OTHER,
    REQUEST,
    ROLE,
    STAGE,
    WORKER,
    Control,
    entries_of,
)
from tests.harness import fake_spec, open_fleet

DAY_US = 24 * 3600 * 1_000_000
HELD = (TaskRef(request=REQUEST, stage=STAGE),)


def journal_of(control: Control) -> list[JournalEntry]:
    raw = cast("list[Any]", control.client.xrange(keys.JOURNAL))
    return [entry_of(entry, fields) for entry, fields in entries_of(raw)]


def entries(control: Control, *what: str) -> list[JournalEntry]:
    """Return the entries of these kinds, oldest first."""
    return [entry for entry in journal_of(control) if entry.what in what]


def only_entry(control: Control, what: str) -> JournalEntry:
    (entry,) = entries(control, what)
    assert entry.at_us > 0
    return entry


def test_beginning_of_a_fleet_is_its_leader_and_its_processes(control: Control) -> None:
    began = [(entry.what, entry.worker, entry.role) for entry in journal_of(control)]
    assert began == [
        ("led", CONDUCTOR, ""),
        ("joined", GATEWAY, ""),
        ("joined", WORKER, ROLE),
    ]


def test_ordinary_answer_is_not_in_the_journal(control: Control) -> None:
    before = journal_of(control)
    epoch = control.own()
    control.append(epoch, finish=True)
    control.acknowledge(delivered=True)
    control.submit("req-2")
    control.abort(RequestId("req-2"))
    assert control.renew() == "ok"
    assert journal_of(control) == before


def test_standby_worker_joins_as_such(control: Control) -> None:
    control.register(OTHER, standby=1)
    assert entries(control, "joined")[-1].detail == "standby"


@pytest.mark.parametrize("cause", ["SIGKILL", "exit status 3"])
def test_death_has_its_cause_and_its_tasks_once(control: Control, cause: str) -> None:
    control.own()
    for _ in range(2):
        control.leave(died=True, cause=cause)
    died = only_entry(control, "died")
    assert (died.worker, died.role, died.detail, died.count) == (WORKER, ROLE, cause, 1)
    lost = only_entry(control, "lost")
    assert (lost.worker, lost.request, lost.stage) == (WORKER, REQUEST, STAGE)
    assert lost.detail == "died" and died.id < lost.id


def test_end_of_each_kind_is_an_entry(control: Control) -> None:
    control.leave()
    control.register(OTHER)
    control.fence(OTHER)
    assert [(e.what, e.worker, e.count) for e in entries(control, "left", "lapsed", "died")] == [
        ("left", WORKER, 0),
        ("lapsed", OTHER, 0),
    ]
    control.leave(OTHER, died=True, cause="SIGKILL")
    late = only_entry(control, "died")
    assert (late.worker, late.detail) == (OTHER, "SIGKILL"), "its end was seen after its lease"


def test_order_names_the_key_and_only_changes_are_entered(control: Control) -> None:
    for by in ("night shift", "day shift"):
        assert control.run(scripts.order(WORKER, "drain", by)) == "ok"
    assert control.run(scripts.order(WORKER, "dump", "night shift")) == "ok"
    ordered = only_entry(control, "ordered")
    assert (ordered.worker, ordered.role) == (WORKER, ROLE)
    assert (ordered.by, ordered.detail) == ("night shift", "drain")


def test_orders_on_answers_name_the_key(control: Control) -> None:
    epoch = control.own()
    assert control.run(scripts.redeliver(REQUEST, STAGE, epoch, "night shift")) == "ok"
    for _ in range(2):
        control.run(scripts.abort(REQUEST, scripts.OPERATOR_RIGHT, "stop", "day shift"))
    ordered = [(e.detail, e.request, e.stage, e.by) for e in entries(control, "ordered")]
    assert ordered == [
        ("redeliver", REQUEST, STAGE, "night shift"),
        ("cancel", REQUEST, "", "day shift"),
    ]


async def test_retry_is_entered_if_an_operator_ordered_it(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet)
        await client.requests.submit(spec, None)
        again = await client.operations.retry(spec.id, by="night shift")
        await client.operations.retry(spec.id)
        (ordered,) = await client.telemetry.journal(what=("ordered",))
        assert (ordered.detail, ordered.request, ordered.by) == ("retry", again, "night shift")


def test_end_of_the_last_worker_that_accepts_tasks_is_told_from_others(control: Control) -> None:
    control.register(OTHER)
    control.run(scripts.order(OTHER, "drain"))
    control.leave(died=True)
    control.run(scripts.order(OTHER, "resume"))
    control.drain(OTHER)
    kinds = ("ordered", "died", "leaving")
    assert [entry.serving for entry in entries(control, *kinds)] == [1, 0, 1, 0]


def test_standby_worker_that_takes_over_counts_as_serving(control: Control) -> None:
    control.register(OTHER, standby=1)
    control.leave(died=True)
    assert only_entry(control, "died").serving == 1


def test_worker_that_leaves_by_its_own_decision_is_an_entry_once(control: Control) -> None:
    for _ in range(2):
        control.drain()
    leaving = only_entry(control, "leaving")
    assert (leaving.worker, leaving.role) == (WORKER, ROLE)


def test_new_leader_is_an_entry_and_a_renewed_lead_is_not(control: Control) -> None:
    assert control.run(scripts.lead(CONDUCTOR, control.leader, 60_000)) == control.leader
    assert len(entries(control, "led")) == 1
    control.depose()
    assert [entry.worker for entry in entries(control, "led")] == [CONDUCTOR, "conductor@other"]


def test_lost_task_is_recovered_with_the_pause_since_the_loss(control: Control) -> None:
    control.own()
    control.register(OTHER)
    control.leave(died=True, cause="SIGKILL")
    lost = only_entry(control, "lost")
    assert control.claim(worker=OTHER) == "ok"
    recovered = only_entry(control, "recovered")
    assert (recovered.worker, recovered.role) == (OTHER, ROLE)
    assert (recovered.request, recovered.stage) == (REQUEST, STAGE)
    assert recovered.pause_us == recovered.at_us - lost.at_us > 0
    assert "lost_us" not in control.task()


def test_pause_counts_from_the_loss_over_repeated_grants(control: Control) -> None:
    """A worker that reserves the lost task and leaves before it claims it does not begin the pause
    again.
    """
    control.own()
    control.register(OTHER)
    control.leave(died=True)
    lost_us = control.task()["lost_us"]
    assert control.read(OTHER) == [REQUEST]
    control.leave(OTHER)
    assert control.task()["lost_us"] == lost_us
    third = WorkerId("lm@test:3:c")
    control.register(third)
    assert control.claim(worker=third) == "ok"
    recovered = only_entry(control, "recovered")
    assert recovered.pause_us == recovered.at_us - int(lost_us)
    assert len(entries(control, "lost")) == 1, "no worker had the task when the second one left"


def test_claim_after_a_hand_off_is_no_recovery(control: Control) -> None:
    epoch = control.own()
    assert control.hand_off(epoch) == "ok"
    assert control.claim() == "ok"
    assert not entries(control, "lost", "recovered")


@pytest.mark.parametrize("how", ["failed", "revoked"])
def test_task_taken_from_a_living_worker_is_lost_for_that_reason(
    control: Control, how: str
) -> None:
    epoch = control.own()
    assert (control.lose_task(epoch) if how == "failed" else control.redeliver()) == "ok"
    lost = only_entry(control, "lost")
    assert (lost.worker, lost.detail) == (WORKER, how)


def test_end_of_a_gateway_counts_its_answers_without_an_entry_each(control: Control) -> None:
    control.submit("req-2")
    control.leave(GATEWAY, died=True, cause="SIGKILL")
    died = only_entry(control, "died")
    assert (died.role, died.count) == ("", 2)
    assert not entries(control, "lost")


def test_failure_of_a_request_has_its_code_and_message(control: Control) -> None:
    epoch = control.own()
    control.fail("the engine stumbled", epoch)
    assert control.run(scripts.abort(REQUEST, scripts.API_RIGHT, "stop")) == "ended"
    failed = only_entry(control, "failed")
    assert (failed.request, failed.stage, failed.worker, failed.role) == (
        REQUEST,
        STAGE,
        WORKER,
        ROLE,
    )
    assert (failed.code, failed.detail) == ("engine_error", "the engine stumbled")


def test_long_message_of_a_failure_is_cut(control: Control) -> None:
    control.fail("ü" * 5000)
    detail = only_entry(control, "failed").detail
    assert detail.rstrip("\N{REPLACEMENT CHARACTER}") == "ü" * 500


def test_dead_letter_and_deserted_role_are_failures(control: Control) -> None:
    for _ in range(MAX_DEATHS + 1):
        control.register(WORKER)
        control.own()
        control.leave(died=True)
    control.submit("req-2")
    assert control.watch(grace_us=0) == "ok"
    assert [(e.request, e.code) for e in entries(control, "failed")] == [
        (REQUEST, "worker_lost"),
        ("req-2", "overloaded"),
    ]


def test_refusals_of_a_step_are_one_entry_for_each_code(control: Control) -> None:
    counted = {
        "underruns": 3,
        "refused:overloaded": 2,
        "refused:rate_limit_exceeded": 5,
        "refused:rate_limit_exceeded:max_requests": 4,
    }
    named = {"refused:overloaded": f"{REQUEST},req-2|all | places are taken"}
    control.run(scripts.record_metrics(GATEWAY, counted, {"running:lm": 1}, named))
    assert [(e.requests, e.message) for e in entries(control, "refused")] == [
        ((REQUEST, RequestId("req-2")), "all | places are taken"),
        ((), ""),
        ((), ""),
    ]
    refused = [(e.worker, e.code, e.detail, e.count) for e in entries(control, "refused")]
    assert refused == [
        (GATEWAY, "overloaded", "", 2),
        (GATEWAY, "rate_limit_exceeded", "", 5),
        (GATEWAY, "rate_limit_exceeded", "max_requests", 4),
    ]


def test_every_kind_of_entry_is_declared() -> None:
    names = [name for name in scripts.SCRIPTS if "write_journal('" in read(name)]
    texts = [*map(read, names), read("common/endings"), read("common/losses")]
    written = {
        part.partition("'")[0] for text in texts for part in text.split("write_journal('")[1:]
    }
    assert written | {"died", "left", "lapsed"} == set(WHAT)


def test_limits_are_the_same_in_lua_and_python() -> None:
    gone = f"GONE_S, MAX_GONE, MAX_HELD = {GONE_KEPT_DAYS * 24 * 3600}, {MAX_GONE_KEPT}, 100"
    assert gone in read("common/basics")
    assert f"SERIES_KEPT_S = {SERIES_STEP_S}000000, {SERIES_KEPT_S + 100}" in read("common/logs")


def test_journal_is_trimmed(control: Control) -> None:
    pipe = control.client.pipeline(transaction=False)
    for number in range(20_500):
        pipe.xadd(keys.JOURNAL, {"at_us": number, "what": "joined"}, id=f"{number + 1}-0")
    control.client.delete(keys.JOURNAL)
    pipe.execute()
    control.leave(died=True, cause="SIGKILL")
    assert 20_000 <= control.client.xlen(keys.JOURNAL) < 20_200
    assert journal_of(control)[-1].what == "died", "the newest are kept"


def test_held_tasks_are_bounded_in_number(control: Control) -> None:
    for number in range(120):
        control.submit(f"req-many{number:03}", bound=300)
    control.leave(GATEWAY, died=True)
    held = text(control.client.hget(keys.gone(GATEWAY), "held"))
    assert held.count('"client"') == 100
    control.leave(WORKER)
    assert control.client.hget(keys.gone(WORKER), "held") == b"[]"


async def test_refused_requests_are_in_the_series_and_the_journal(redis_url: str) -> None:
    async with open_fleet(redis_url, "limits.max_requests=1", without="talker") as (fleet, client):
        await client.telemetry.write_series(client.id)
        for seed in (1, 2):
            with pytest.raises(NoWorker):
                await client.requests.submit(fake_spec(fleet, seed=seed), None)
        client.telemetry.record_refusal(Overloaded("full"))
        client.telemetry.record_refusal(KeyAtLimit("its limit", param="max_sessions"))
        await client.telemetry.write_series(client.id)
        refused = await client.telemetry.journal(what=("refused",))
        assert [(e.worker, e.code, e.detail, e.count) for e in refused] == [
            (client.id, "overloaded", "", 2),
            (client.id, "rate_limit_exceeded", "", 1),
            (client.id, "rate_limit_exceeded", "max_sessions", 1),
        ]
        steps = [point.refused for point in await client.telemetry.series() if point.refused]
        assert steps == [{"overloaded": 2, "rate_limit_exceeded": 2}]
        await client.telemetry.write_series(client.id)
        assert await client.telemetry.journal(what=("refused",)) == refused, "each is written once"


def test_script_of_an_append_knows_no_journal() -> None:
    for name in ("append", "ack", "read_grants", "renew"):
        assert "write_journal" not in scripts.source(name)
    for name, block in (("claim", "if lost_us then"), ("submit", "if ordered == '1' then")):
        head, _, rest = scripts.source(name).partition(block)
        assert "write_journal" not in head and "write_journal" in rest
