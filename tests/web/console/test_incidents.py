"""Incidents and orders in the console: the list, the page of one, and that it stays the same after
Redis has lost its journal.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fleet.core.clock import now_us
from fleet.core.ids import WorkerId
from fleet.telemetry.incidents import Alert, id_of
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import LogLine
from tests.support import await_until
from tests.web.build import build
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.console.busy_gateway import fill, incident_of
from tests.web.console.test_now import part_of
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible import busy
from tests.web.test_kept_answers import keeper_of, keeping
from web.fleet_api import answer_keeper
from web.gateway.gateway import Gateway

DAY_US = 86_400 * 1_000_000


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep incidents as soon as they are known."""
    for name in ("LOCK_POLL_S", "INCIDENT_POLL_S"):
        monkeypatch.setattr(answer_keeper, name, 0.01)


@pytest.fixture
def busy_gateway(gateway: ServedGateway) -> Iterator[ServedGateway]:
    fill(gateway)
    yield gateway
    gateway.client.show(FakeTelemetry())
    gateway.client.alerts.known.clear()


def shifted(entries: list[JournalEntry], by_us: int) -> list[JournalEntry]:
    """Return the entries at an earlier time, with ids of that time."""
    return [
        msgspec.structs.replace(
            entry, id=f"{(entry.at_us - by_us) // 1000}-{number}", at_us=entry.at_us - by_us
        )
        for number, entry in enumerate(entries)
    ]


def test_now_and_the_list_lead_to_the_incident_that_goes_on(busy_gateway: ServedGateway) -> None:
    path = f"/incidents/{incident_of(busy_gateway.client.telemetry.entries)}"
    assert f'href="{path}">Open incident' in busy_gateway.http.get("/now").text
    listed = busy_gateway.http.get("/incidents").text
    assert f'href="{path}"' in listed
    text = part_of(listed, "incidents")
    assert "degraded" in text and "goes on" in text and "talker died 4 times" in text
    assert busy_gateway.http.get(path).status_code == 200


def test_page_has_the_sentence_the_answers_the_deaths_and_the_log(
    busy_gateway: ServedGateway,
) -> None:
    telemetry = busy_gateway.client.telemetry
    page = busy_gateway.http.get(f"/incidents/{incident_of(telemetry.entries)}").text
    assert "talker died 4 times" in part_of(page, "sentence")
    answers = part_of(page, "answers")
    assert answers.count("continued") == 4 and "2100 ms" in answers and "engine_error" in answers
    died = [entry for entry in telemetry.entries if entry.what == "died"]
    assert all(f'href="/workers/{entry.worker}"' in page for entry in died)
    assert "line 187 of this worker" in part_of(page, "lines")
    for row in ("Deaths", "Refusals", "Actions, drains"):
        assert row in part_of(page, "hour")
    assert '<a class="button quiet" href="/requests?from=' in page
    assert f"{busy_gateway.url}/incidents/" in page, "its link can be copied"


def test_link_of_any_second_of_an_incident_leads_to_it(busy_gateway: ServedGateway) -> None:
    last = max(entry.at_us for entry in busy_gateway.client.telemetry.entries)
    page = busy_gateway.http.get(f"/incidents/{id_of(last)}")
    assert "talker died 4 times" in page.text


@pytest.mark.parametrize("name", ["20200101T000000Z", "yesterday", "%00"])
def test_unknown_incident_is_not_found_and_says_why(busy_gateway: ServedGateway, name: str) -> None:
    page = busy_gateway.http.get(f"/incidents/{name}")
    assert page.status_code == 404 and "No incident began at this time" in page.text


def test_bad_page_of_the_list_is_refused_by_name(busy_gateway: ServedGateway) -> None:
    page = busy_gateway.http.get("/incidents?before=x")
    assert page.status_code == 400 and "before:" in page.text


def test_alert_that_was_given_up_is_shown(busy_gateway: ServedGateway) -> None:
    name = incident_of(busy_gateway.client.telemetry.entries)
    alert = Alert(
        event="opened",
        level="degraded",
        gateway=WorkerId("gateway@b"),
        at_us=now_us(),
        state="failed",
        detail="host answered 500",
    )
    busy_gateway.client.alerts.known[name, "opened"] = alert
    sentence = part_of(busy_gateway.http.get(f"/incidents/{name}").text, "sentence")
    assert "was given up" in sentence and "host answered 500" in sentence


def old_fleet(loaded: Loaded) -> FakeTelemetry:
    """Return a fleet whose incident, with a warning in the log, was two days ago."""
    fleet = busy(loaded.config.graph_declaration())
    fleet.entries = shifted(fleet.entries, 2 * DAY_US)
    died = next(entry for entry in fleet.entries if entry.what == "died")
    fleet.lines = [
        build(
            LogLine,
            id=f"{died.at_us // 1000}-0",
            at_us=died.at_us,
            level="warning",
            message="the worker of that night died",
        )
    ]
    return fleet


async def is_kept(gateway: Gateway, name: str) -> None:
    async def has_it() -> bool:
        return await gateway.history.incident(name) is not None

    await await_until(has_it, f"incident {name} to be kept")


async def test_page_of_an_old_incident_is_the_same_without_journal_and_log(
    loaded: Loaded, tmp_path: Path
) -> None:
    loaded = keeping(loaded, tmp_path)
    fleet = old_fleet(loaded)
    name = incident_of(fleet.entries)
    async with keeper_of(loaded, fleet) as gateway:
        await is_kept(gateway, name)
        with serving(loaded) as served:
            served.client.show(fleet)
            with_journal = served.http.get(f"/incidents/{name}").text
        with serving(loaded) as served:
            served.client.show(FakeTelemetry())
            page = served.http.get(f"/incidents/{name}")
            listed = served.http.get("/incidents").text
    assert page.status_code == 200
    for part in ("sentence", "answers", "deaths", "lines", "hour"):
        assert part_of(page.text, part) == part_of(with_journal, part) != ""
    assert "the worker of that night died" in part_of(page.text, "lines")
    assert "talker died 4 times" in part_of(listed, "incidents")


async def test_incident_that_goes_on_is_kept_and_outlives_a_flushed_journal(
    loaded: Loaded, tmp_path: Path
) -> None:
    loaded = keeping(loaded, tmp_path)
    fleet = busy(loaded.config.graph_declaration())
    name = incident_of(fleet.entries)
    async with keeper_of(loaded, fleet) as gateway:
        await is_kept(gateway, name)
        fleet.entries = []
        record = await gateway.incidents.read(name)
    assert record is not None and len(record.incident.deaths) == 4 and record.incident.is_open


async def test_ended_incident_is_kept_with_its_last_trouble(loaded: Loaded, tmp_path: Path) -> None:
    loaded = keeping(loaded, tmp_path)
    fleet = busy(loaded.config.graph_declaration())
    client = loaded.fake_client()
    client.show(fleet)
    gateway = Gateway(loaded.config, client, loaded.frontend)
    (incident,) = await gateway.incidents.from_journal()
    await gateway.incidents.keep(incident)
    fleet.entries = shifted(fleet.entries, 0)
    fleet.entries.append(
        build(JournalEntry, id=f"{now_us() // 1000}-99", at_us=now_us(), what="failed")
    )
    (longer,) = await gateway.incidents.from_journal()
    await gateway.incidents.keep(longer)
    (kept,) = await gateway.incidents.newest(5)
    assert kept.last_us == longer.last_us > incident.last_us and kept.id == incident.id


async def test_new_journal_of_another_redis_replaces_the_one_that_was_followed(
    loaded: Loaded,
) -> None:
    client = loaded.fake_client()
    client.show(busy(loaded.config.graph_declaration()))
    gateway = Gateway(loaded.config, client, loaded.frontend)
    (before,) = await gateway.incidents.from_journal()
    client.telemetry.entries = shifted(client.telemetry.entries, DAY_US)
    (after,) = await gateway.incidents.from_journal()
    assert before.is_open and not after.is_open
    client.telemetry.entries = []
    assert await gateway.incidents.from_journal() == []


def test_orders_name_the_key_and_are_filtered_by_it(busy_gateway: ServedGateway) -> None:
    telemetry = busy_gateway.client.telemetry
    at_us = now_us()
    telemetry.entries += [
        build(JournalEntry, id=f"{at_us // 1000}-1{number}", at_us=at_us, what="ordered", **fields)
        for number, fields in enumerate(
            (
                {"detail": "cancel", "request": "req-1", "by": "day-shift"},
                {"detail": "stop", "worker": "talker@host:1:a"},
            )
        )
    ]
    everything = part_of(busy_gateway.http.get("/orders").text, "orders")
    assert "drain" in everything and "night-shift" in everything
    assert "cancel" in everything and "req-1" in everything and "no key" in everything
    day = part_of(busy_gateway.http.get("/orders?by=day-shift").text, "orders")
    assert "cancel" in day and "drain" not in day and "stop" not in day
    without = part_of(busy_gateway.http.get("/orders?by=-").text, "orders")
    assert "stop" in without and "cancel" not in without
    nobody = busy_gateway.http.get("/orders?by=nobody").text
    assert "No stored order is of this key" in nobody


def test_orders_on_answers_reach_the_journal_with_the_name_of_the_key(
    busy_gateway: ServedGateway,
) -> None:
    telemetry = busy_gateway.client.telemetry
    running = next(trace for trace in telemetry.traces.values() if trace.state == "running")
    path = f"/v1/fleet/requests/{running.id}"
    assert busy_gateway.http.post(f"{path}/retry").status_code == 201
    stage = next(task.stage for task in running.tasks if task.stage != "client")
    assert busy_gateway.http.post(f"{path}/tasks/{stage}/redeliver").status_code == 200
    assert telemetry.ordered_by == ["", ""], "a gateway without keys"
