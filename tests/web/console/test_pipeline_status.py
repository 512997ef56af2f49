"""The console's pipeline status counts workers that accept tasks as up, and counts draining and
standby workers separately.
"""

import asyncio

import pytest
from msgspec.structs import replace

from fleet.telemetry.views import WorkerView
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
    assert "No worker for" not in gateway.http.get("/").text


def test_draining_last_worker_of_a_stage_is_not_up(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    workers[1] = replace(workers[1], state="draining", running=3)
    gateway.client.missing = [workers[1].role]
    assert read_stage_lines(gateway)[1] == "0 workers up · 1 draining · 3 running"
    role = workers[1].role
    said = (
        f"No worker accepts new tasks for {role} (1 draining). Resume it, or start one: "
        f"fleet worker {role}"
    )
    assert said in gateway.http.get("/").text


def test_standby_worker_is_counted_separately(
    gateway: ServedGateway, workers: list[WorkerView]
) -> None:
    workers.append(worker_view("second", workers[2].role, state="standby"))
    assert read_stage_lines(gateway)[2] == "1 worker up · 1 standing by · 0/16 running"
