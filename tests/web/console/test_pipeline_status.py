"""The console's pipeline status counts workers that accept tasks as up, and counts draining and
standby workers separately.
"""

import asyncio

import pytest
from msgspec.structs import replace

from fleet.core.ids import RoleName, StageName
from fleet.telemetry.views import RoleQueue, WorkerView
from tests.web.conftest import ServedGateway
from tests.web.console import html_audit
from tests.web.fake_client import worker_view


@pytest.fixture
def workers(gateway: ServedGateway) -> list[WorkerView]:
    """A worker of each stage, which the test changes."""
    telemetry = gateway.client.telemetry
    telemetry.worker_list = asyncio.run(telemetry.workers())
    return telemetry.worker_list


def read_stage_lines(gateway: ServedGateway) -> list[str]:
    text = "".join(html_audit.read(gateway.http.get("/").text).text)
    return [
        line.strip()
        for line in text.splitlines()
        if "worker" in line and "running" in line or line == "no worker"
    ]


def test_draining_worker_is_not_counted_as_up(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    workers.append(worker_view("second", workers[0].role, state="draining", running=2))
    assert read_stage_lines(gateway)[0] == "1 worker up · 1 draining · 2/16 running"
    assert "Speech is down" not in gateway.http.get("/").text


def test_draining_last_worker_of_a_stage_is_not_up(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    workers[1] = replace(workers[1], state="draining", running=3)
    gateway.client.missing = [workers[1].role]
    assert read_stage_lines(gateway)[1] == "0 workers up · 1 draining · 3 running"


def read_speech(gateway: ServedGateway) -> str:
    """Return what the page says above its folds, before anyone talks."""
    text = " ".join(" ".join(html_audit.read(gateway.http.get("/").text).text).split())
    return text.partition("Talk with omni ")[2].partition("Pipeline ")[0].strip()


def test_speech_is_down_by_the_rule_of_the_now_page(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    """The reason stands on the Now page too, and the command starts what is missing."""
    assert read_speech(gateway) == ""
    role = workers[1].role
    del workers[1]
    gateway.client.missing = [role]
    reason = f"no worker of {role} accepts tasks; requests that need it are refused"
    said = read_speech(gateway)
    assert said.startswith(f"Speech is down: {reason}.") and reason in gateway.http.get("/now").text
    assert said.endswith(f"Start a worker: fleet worker {role} Copy")


def test_draining_worker_of_a_missing_role_can_be_resumed(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    workers[1] = replace(workers[1], state="draining", running=3)
    gateway.client.missing = [workers[1].role]
    said = read_speech(gateway)
    assert "accepts tasks (1 draining)" in said
    assert said.endswith(f"Or resume {workers[1].id} on the page Now")


def test_answers_wait_for_a_starting_worker(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    role = workers[1].role
    del workers[1]
    gateway.client.missing = [role]
    starting = RoleQueue(role=RoleName(role), stage=StageName(role), starting=1, loaded_percent=40)
    gateway.client.telemetry.role_list = [starting]
    assert read_speech(gateway) == (
        f"Answers wait: {role} has no worker now (1 starting, 40 % loaded); requests wait for one."
    )


@pytest.mark.parametrize(("number", "works"), [(0, False), (1, True)])
def test_text_works_without_the_stages_of_speech(
    gateway: ServedGateway, workers: list[WorkerView], number: int, works: bool
) -> None:
    gateway.client.missing = [workers[number].role]
    del workers[number]
    assert ("Typed messages are answered as text" in read_speech(gateway)) is works


def test_outage_of_redis_is_shown(gateway: ServedGateway) -> None:
    gateway.client.telemetry.trouble = "Redis refuses writes (OOM), since its memory is full"
    assert read_speech(gateway) == f"Speech is down: {gateway.client.telemetry.trouble}"


def test_standby_worker_is_counted_separately(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    workers.append(worker_view("second", workers[2].role, state="standby"))
    assert read_stage_lines(gateway)[2] == "1 worker up · 1 standing by · 0/16 running"
