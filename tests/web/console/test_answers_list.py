"""The Answers page's search, order and counts; the page of kept answers; and what is told about a
request that was refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fleet.config.web_schema import HistoryConfig
from fleet.core.ids import RequestId, WorkerId, new_request_id
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.trace import STATES, RequestRow
from tests.web.build import build
from tests.web.conftest import Loaded, ServedGateway, bounded, serving
from tests.web.console import html_audit
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible import busy
from tests.web.plausible_answers import add_answers

WORDS = "The opposite of hot is cold."


@pytest.fixture
def gateway(loaded: Loaded, tmp_path: Path) -> Iterator[ServedGateway]:
    history = HistoryConfig(folder=tmp_path / "history")
    kept = replace(loaded, config=loaded.config.model_copy(update={"history": history}))
    with serving(kept) as gateway:
        yield gateway


@pytest.fixture
def fleet(gateway: ServedGateway) -> FakeTelemetry:
    reported = busy(gateway.client.graph)
    gateway.client.show(reported)
    return reported


def page_of(gateway: ServedGateway, path: str, status: int = 200) -> str:
    answer = gateway.http.get(path)
    assert answer.status_code == status, answer.text[:500]
    assert not (faults := html_audit.read(answer.text).faults), faults
    return answer.text


def shown(page: str) -> str:
    return " ".join(" ".join(html_audit.read(page).text).split())


def ids_on(page: str) -> list[str]:
    return re.findall(r'<tr id="[rk]-([^"]+)"', page)


def chips_of(page: str) -> dict[str, int]:
    found = re.findall(
        r'<li id="chips-(\w+)">.*?<span class="num">(\d+)\+?</span>', page, re.DOTALL
    )
    return {name: int(count) for name, count in found}


def with_texts(gateway: ServedGateway, fleet: FakeTelemetry) -> dict[str, str]:
    """Add answers whose text is `WORDS`; return their ids by name."""
    ids = gateway.client.tokenizer.encode(WORDS).ids
    return {name: trace.id for name, trace in add_answers(fleet, ids).items()}


def test_words_are_searched_in_stored_and_in_kept_answers(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    answers = with_texts(gateway, fleet)
    fine = RequestId(answers["fine"])
    body = json.dumps({"model": "omni"})
    fleet.traces[fine] = msgspec.structs.replace(fleet.traces[fine], body=body)
    found = page_of(gateway, "/requests?words=OPPOSITE+of++hot")
    assert sorted(ids_on(found)) == sorted(answers.values()) and "Searched" in found
    assert ids_on(page_of(gateway, "/requests?words=opposite&state=failed")) == [answers["failed"]]
    assert chips_of(found)["all"] == len(answers) and chips_of(found)["failed"] == 1
    assert not ids_on(page_of(gateway, "/requests?words=nobody+said+this"))
    assert gateway.http.post(f"/v1/fleet/requests/{fine}/pin").status_code == 200
    fleet.traces.clear()
    fleet.edge_logs.clear()
    fleet.rows.clear()
    assert ids_on(page_of(gateway, "/requests?words=opposite")) == [fine]
    assert not ids_on(page_of(gateway, "/requests?words=opposite&state=failed"))
    page_of(gateway, f"/requests?words={'x' * 201}", 400)


def test_slowest_answers_come_first(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    page = page_of(gateway, "/requests?order=slowest")
    waits = [
        float(wait.replace(" s", "e3").replace(" ms", ""))
        for wait in re.findall(r'"First output"[^>]*>.*?<span class="num">([^<–]+)<', page)
    ]
    assert waits and waits == sorted(waits, reverse=True) and 'rel="next"' not in page
    page_of(gateway, "/requests?order=random", 400)


def test_slow_answers_of_one_worker_are_told(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    slow = "talker@b:9:0badbad"
    assert "slow answers share" not in page_of(gateway, "/requests")

    def slowed(row: RequestRow, number: int) -> RequestRow:
        is_slow = number % 5 == 0
        tasks = tuple(
            msgspec.structs.replace(task, worker=slow if is_slow else task.worker)
            if task.stage == "talker"
            else task
            for task in row.tasks
        )
        first_us = row.created_us + (3_000_000 if is_slow else 200_000)
        return msgspec.structs.replace(row, tasks=tasks, first_us={"audio": first_us})

    fleet.rows = [slowed(row, number) for number, row in enumerate(fleet.rows)]
    text = shown(page_of(gateway, "/requests"))
    assert f"10 of 10 slow answers share worker {slow} ; 0 of 40 others do." in text


def test_counts_on_the_chips_are_those_of_the_filtered_list(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    everything = chips_of(page_of(gateway, "/requests"))
    assert everything["all"] == len(fleet.rows)
    for query in ("kind=voice", "kind=voice&state=failed"):
        chips = chips_of(page_of(gateway, f"/requests?{query}"))
        voice = [row for row in fleet.rows if row.kind == "voice"]
        assert 0 < len(voice) < len(fleet.rows)
        assert chips == {
            "all": len(voice),
            **{state: sum(row.state == state for row in voice) for state in STATES},
        }


def test_refused_request_is_told_with_its_reason(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    request, other = new_request_id(), new_request_id()
    entry = build(
        JournalEntry,
        id="1-0",
        at_us=1000 * int(request.removeprefix("req-")[:12], 16) + 3_000_000,
        what="refused",
        worker=WorkerId("gateway@a:1:0a"),
        code="overloaded",
        count=7,
        requests=(request,),
        message="all 8 places are taken; try again",
    )
    fleet.entries = [entry]
    page = shown(page_of(gateway, f"/requests/chatcmpl-{request.removeprefix('req-')}", 404))
    assert f"{request} was refused (overloaded): all 8 places are taken" in page
    assert "was refused" in gateway.http.get(f"/v1/fleet/requests/{request}").text
    assert "was refused" not in page_of(gateway, f"/requests/{other}", 404)


def test_kept_answers_are_listed_with_reason_and_verdict(
    gateway: ServedGateway, loaded: Loaded, fleet: FakeTelemetry
) -> None:
    assert "No answer is kept yet" in page_of(gateway, "/kept")
    answers = with_texts(gateway, fleet)
    for name in ("fine", "failed"):
        assert gateway.http.post(f"/v1/fleet/requests/{answers[name]}/pin").status_code == 200
    page = page_of(gateway, "/kept")
    assert ids_on(page) == [answers["failed"], answers["fine"]]
    assert "this server's host" in shown(page) and "Fine: first sound after 660 ms" in shown(page)
    assert chips_of(page) == {
        "all": 2,
        "failed": 0,
        "interrupted": 0,
        "slow": 0,
        "dropouts": 0,
        "pinned": 2,
    }
    path = f"/v1/fleet/requests/{answers['fine']}/pin"
    assert f'hx-delete="{path}"' in page
    assert gateway.http.delete(path).status_code == 200
    assert f'hx-post="{path}"' in page_of(gateway, "/kept")
    assert not ids_on(page_of(gateway, "/kept?why=failed"))
    page_of(gateway, "/kept?why=bored", 400)


def test_kept_answers_cannot_be_changed_from_a_read_only_page(
    gateway: ServedGateway, fleet: FakeTelemetry, loaded: Loaded
) -> None:
    answers = with_texts(gateway, fleet)
    gateway.http.post(f"/v1/fleet/requests/{answers['fine']}/pin").raise_for_status()
    config = gateway.config.model_copy(
        update={"web": gateway.config.web.model_copy(update={"read_only": True})}
    )
    with serving(replace(bounded(loaded), config=config), client=gateway.client) as second:
        page = page_of(second, "/kept")
        assert ids_on(page) == [answers["fine"]] and "Unpin" not in page
