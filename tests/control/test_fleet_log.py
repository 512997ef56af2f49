"""Deaths, dead letters, drains and refusals appear in the fleet's log: one line per event, with its
worker, stage and request.
"""

import asyncio

import msgspec
import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.log_stream import fields_of
from fleet.core.errors import NoWorker, Overloaded
from fleet.core.ids import WorkerId
from fleet.core.log_labels import Labels
from fleet.telemetry.views import LogQuery
from tests.control_plane import (
    GATEWAY,
    MAX_DEATHS,
    OTHER,
    REQUEST,
    ROLE,
    STAGE,
    TEXT,
    WORKER,
    Control,
    join,
    log_lines,
)
from tests.harness import collected, fake_spec, open_fleet

Labelled = tuple[str, str, str, str, str]


def only_line(client: redis.Redis, level: str = "") -> tuple[Labelled, str]:
    """Return the only log line of this level: its labels (level, process, worker, stage, request)
    and its text.
    """
    (line,) = log_lines(client, level)
    assert line.at_us > 0
    return (line.level, line.process, line.worker, line.stage, line.request), line.message


def test_death_of_a_worker_is_one_warning_with_cause_and_tasks(control: Control) -> None:
    control.own()
    for _ in range(2):
        assert control.leave(died=True, cause="SIGKILL") == "ok"
    assert only_line(control.client) == (
        ("warning", "worker", WORKER, STAGE, REQUEST),
        f"worker {WORKER} died (SIGKILL); it held {REQUEST} ({STAGE})",
    )
    assert control.client.hget(keys.gone(WORKER), "cause") == b"SIGKILL"


def test_death_detected_by_a_lapsed_lease_is_logged_as_such(control: Control) -> None:
    control.own()
    assert control.fence() == "ok"
    labels, message = only_line(control.client)
    assert labels == ("warning", "worker", WORKER, STAGE, REQUEST)
    assert "its lease lapsed" in message and f"it held {REQUEST} ({STAGE})" in message


def test_death_of_a_gateway_names_the_requests_of_its_clients(control: Control) -> None:
    control.submit()
    control.leave(GATEWAY, died=True, cause="exit status 3")
    assert only_line(control.client) == (
        ("warning", "web", GATEWAY, "", ""),
        f"gateway {GATEWAY} died (exit status 3); it held req-1 (client), req-2 (client)",
    )


def test_death_with_many_requests_names_a_bounded_number(control: Control) -> None:
    for number in range(100):
        control.submit(f"req-more{number:03}", bound=200)
    control.leave(GATEWAY, died=True, cause="SIGKILL")
    _, message = only_line(control.client)
    assert "req-more000 (client)" in message and message.endswith(" and 41 more")
    assert len(message) < 4000


def test_dead_letter_is_an_error_with_the_last_worker_and_the_request(control: Control) -> None:
    for _ in range(MAX_DEATHS + 1):
        control.register(WORKER)
        control.own()
        control.leave(died=True, cause="SIGSEGV")
    labels, message = only_line(control.client, "error")
    assert labels[2:] == (WORKER, STAGE, REQUEST)
    assert f"request {REQUEST} is a dead letter: 3 workers of stage {STAGE} died" in message
    assert len(log_lines(control.client, "warning")) == MAX_DEATHS + 1


def test_drain_is_logged_when_it_is_ordered_and_when_it_is_done(control: Control) -> None:
    epoch = control.own()
    for _ in range(2):
        assert [control.order("drain"), control.renew()] == ["ok", "ok"]
    control.append(epoch, finish=True)
    assert [control.renew(), control.renew()] == ["ok", "ok"]
    ordered, drained = log_lines(control.client)
    assert ordered.message == f"worker {WORKER} is ordered to drain; it holds {REQUEST} ({STAGE})"
    assert drained.message == f"worker {WORKER} is drained: it holds no tasks and accepts none"
    assert {(line.level, line.worker, line.stage) for line in (ordered, drained)} == {
        ("info", WORKER, STAGE)
    }
    assert [control.order("drain"), control.renew()] == ["ok", "ok"]
    for order in ("resume", "resume", "drain"):
        assert control.order(order) == "ok"
    assert control.renew() == "ok"
    later_messages = [
        line.message.partition(";")[0].removeprefix(f"worker {WORKER} is ")
        for line in log_lines(control.client)[2:]
    ]
    assert later_messages == [
        "ordered to resume",
        "ordered to drain",
        "drained: it holds no tasks and accepts none",
    ]


@pytest.mark.parametrize("ordered", [True, False])
def test_stop_is_logged_when_it_begins_and_when_the_worker_has_left(
    control: Control, ordered: bool
) -> None:
    if ordered:
        assert control.order("stop") == "ok"
    for call in (scripts.drain(WORKER), scripts.fence_worker("", WORKER)):
        control.run(call)
        control.run(call)
    began, left = log_lines(control.client)
    how = "is ordered to stop" if ordered else "is leaving by its own decision"
    assert began.message == f"worker {WORKER} {how}; it holds nothing"
    assert left.message == f"worker {WORKER} left; it held nothing"
    assert {(line.level, line.worker) for line in (began, left)} == {("info", WORKER)}


def test_refused_worker_is_a_warning_with_its_reason(control: Control) -> None:
    control.client.hset(keys.worker(WORKER), "package", "1.0")
    assert join(control.client, OTHER, package="2.0")[0] == "skew"
    labels, message = only_line(control.client)
    assert labels == ("warning", "worker", OTHER, STAGE, "")
    why = f"worker {OTHER} is refused: its package is 2.0, that of {WORKER} is 1.0; give all"
    assert why in message


def test_refusals_of_requests_are_a_warning_and_do_not_flood_the_log(control: Control) -> None:
    assert [control.submit(f"req-over{number}", bound=1)[0] for number in range(5)] == ["full"] * 5
    labels, message = only_line(control.client)
    assert labels == ("warning", "web", GATEWAY, "", "req-over0")
    assert "limits.max_requests allows 1" in message


async def test_refusal_for_a_missing_worker_is_one_warning_and_hides_no_other(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(redis_url, "limits.max_requests=1", without="talker") as (fleet, client):
        first, *others = [fake_spec(fleet, seed=seed) for seed in range(3)]
        for spec in (first, *others):
            with pytest.raises(NoWorker):
                await client.requests.submit(spec, None)
        (warning,) = [record for record in caplog.records if "is refused" in record.getMessage()]
        fields = fields_of(warning, Labels("web", client.id))
        assert (fields["l"], fields["w"], fields["r"]) == ("warning", client.id, first.id)
        assert str(fields["m"]).startswith(
            f"request {first.id} is refused: no worker serves the role talker; start one"
        )
        text_specs = [msgspec.structs.replace(spec, outputs=(TEXT,)) for spec in others]
        await client.requests.submit(text_specs[0], None)
        with pytest.raises(Overloaded):
            await client.requests.submit(text_specs[1], None)
        (line,) = log_lines(fleet.clients[0])
        assert line.request == others[1].id and "limits.max_requests allows 1" in line.message


def test_lapsed_lead_is_a_warning_and_a_released_lead_is_not(control: Control) -> None:
    first, old = WorkerId("conductor@test"), control.leader
    assert control.run(scripts.lead(first, old, 1)) == old
    control.depose()
    assert not log_lines(control.client)
    control.client.delete(keys.CONDUCTOR)
    assert control.run(scripts.lead(first, "", 60_000))
    labels, message = only_line(control.client)
    assert labels == ("warning", "conductor", "conductor@other", "", "")
    assert "the lead of conductor conductor@other lapsed" in message
    assert f"{first} leads now" in message


async def test_log_of_a_request_contains_the_death_of_its_worker(redis_url: str) -> None:
    """With a live conductor and workers, a worker's death is one log line however many processes
    detect it, and the answers are complete.
    """
    async with open_fleet(redis_url, "graph=text", "edges.text.credits=2") as (fleet, client):
        specs = [fake_spec(fleet, seed=seed) for seed in (1, 2)]
        streams = [await client.requests.submit(spec, None) for spec in specs]
        first = [await asyncio.to_thread(fleet.owner, spec.id, STAGE) for spec in specs][0]
        other = await asyncio.to_thread(fleet.add_worker, ROLE)
        await asyncio.to_thread(fleet.kill, first)
        for stream, spec in zip(streams, specs, strict=True):
            await collected(stream, spec)
        for spec in specs:
            (line,) = (
                await client.telemetry.logs(LogQuery(level="warning", request=spec.id))
            ).lines
            assert line.worker == first.worker and f"{spec.id} ({STAGE})" in line.message
        assert not (
            await client.telemetry.logs(LogQuery(level="warning", worker=other.worker))
        ).lines
        assert not (await client.telemetry.logs(LogQuery(level="warning", request="req-0"))).lines
        (gone,) = [
            view
            for view in await client.telemetry.workers(with_gone=True)
            if view.id == first.worker
        ]
        assert gone.state == "died"
