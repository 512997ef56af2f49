"""Telemetry of real processes: log lines, a trace, a worker that is stopped, one that is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleets import FAKE, fleet_up
from tests.e2e.test_up import ROLES
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(4, "processes")

STAGE = ROLES[1]


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    settings = ("checkpoint=tiny", f"stages.{STAGE}.replicas=2", "lease.worker_ttl_s=10")
    with (
        fleet_up(tmp_path, *FAKE, *settings) as fleet,
        httpx.Client(base_url=fleet.url, timeout=30) as client,
    ):
        yield client


def workers(http: httpx.Client, of: str = "data") -> dict[str, str]:
    """Return the state of the stage's workers, by id."""
    return {
        view["id"]: view["state"]
        for view in http.get("/v1/fleet/workers").json()[of]
        if view["role"] == STAGE
    }


def test_traces_logs_and_worker_commands_of_a_fleet_of_processes(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": "hello"}]
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 8,
        "fleet": {STAGE: {"max_tokens": 12}},
    }
    answer = http.post(
        "/v1/chat/completions",
        json={**body, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}},
    )
    request = answer.headers["x-request-id"]
    wait_until(
        lambda: http.get(f"/v1/fleet/requests/{request}").json()["ended_us"],
        "the request to end",
        timeout_s=60,
    )
    trace = http.get(f"/v1/fleet/requests/{request}").json()
    assert trace["state"] == "finished" and trace["kind"] == "speech" and trace["model"] == model
    events = {(mark["what"], mark["stage"]) for mark in trace["events"]}
    assert {
        (what, stage) for what in ("granted", "claimed", "output", "finished") for stage in ROLES
    } <= events
    assert trace["audio_samples"] > 0 and http.get(
        f"/v1/fleet/requests/{request}/audio"
    ).content.startswith(b"RIFF")
    again = http.post(f"/v1/fleet/requests/{request}/retry").json()["id"]
    wait_until(
        lambda: http.get(f"/v1/fleet/requests/{again}").json()["state"] == "finished",
        "the same again",
        timeout_s=60,
    )
    listed = http.get("/v1/fleet/requests", params={"limit": 2}).json()
    assert [row["id"] for row in listed["data"]] == [again, request] and listed["counts"][
        "finished"
    ] == 2

    wait_until(
        lambda: len(workers(http)) == 2,
        "both workers of the stage: a fleet is ready with one",
        timeout_s=60,
    )
    first, second = workers(http)
    assert http.post(f"/v1/fleet/workers/{first}/stop").status_code == 200
    wait_until(
        lambda: workers(http, "gone") == {first: "left"}, "the worker to leave", timeout_s=30
    )
    assert workers(http) == {second: "ready"}
    os.kill(int(second.split(":")[1]), signal.SIGKILL)
    wait_until(
        lambda: workers(http, "gone").get(second) == "died", "its death to be seen", timeout_s=30
    )
    wait_until(lambda: len(workers(http)) == 1, "a replacement", timeout_s=60)

    def processes() -> set[str]:
        return {
            line["process"]
            for line in http.get("/v1/fleet/logs", params={"limit": 1000}).json()["data"]
        }

    wait_until(
        lambda: {"worker", "conductor", "jobs"} <= processes(), "lines of every kind of process"
    )
    lines = http.get("/v1/fleet/logs", params={"worker": first}).json()["data"]
    assert any("is ordered to stop" in line["message"] for line in lines) and {
        line["stage"] for line in lines
    } == {STAGE}
    (death,) = http.get("/v1/fleet/logs", params={"level": "warning", "worker": second}).json()[
        "data"
    ]
    assert f"worker {second} died (SIGKILL)" in death["message"] and death["stage"] == STAGE
