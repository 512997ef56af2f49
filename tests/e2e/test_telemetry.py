"""Telemetry of real processes: log lines, a trace, a worker that is stopped, and one that is
killed.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleets import FAKE, fleet_up
from tests.e2e.test_up import ROLES
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

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
    """Return the state of each worker of the stage, by worker id."""
    return {
        view["id"]: view["state"]
        for view in http.get("/v1/fleet/workers").json()[of]
        if view["role"] == STAGE
    }


def test_traces_logs_and_worker_commands_of_a_fleet_of_processes(http: httpx.Client) -> None:
    request = ask_for_speech(http)
    check_trace(http, request)
    retry(http, request)
    description = "both workers of the stage: a fleet is ready with one"
    wait_until(lambda: len(workers(http)) == 2, description, timeout_s=60)
    first, second = workers(http)
    stop_and_kill(http, first, second)
    check_log(http, first, second)


def ask_for_speech(http: httpx.Client) -> str:
    """Ask for a spoken answer; return the request's id once it has ended."""
    body = {
        "model": http.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "fleet": {STAGE: {"max_tokens": 12}},
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
    }
    request = http.post("/v1/chat/completions", json=body).headers["x-request-id"]
    path = f"/v1/fleet/requests/{request}"
    wait_until(lambda: http.get(path).json()["ended_us"], "the request to end", timeout_s=60)
    return request


def check_trace(http: httpx.Client, request: str) -> None:
    trace = http.get(f"/v1/fleet/requests/{request}").json()
    model = http.get("/v1/models").json()["data"][0]["id"]
    assert trace["state"] == "finished" and trace["kind"] == "speech" and trace["model"] == model
    events = {(mark["what"], mark["stage"]) for mark in trace["events"]}
    wanted = ("granted", "claimed", "output", "finished")
    assert {(what, stage) for what in wanted for stage in ROLES} <= events
    assert trace["audio_samples"] > 0
    assert http.get(f"/v1/fleet/requests/{request}/audio").content.startswith(b"RIFF")


def retry(http: httpx.Client, request: str) -> None:
    again = http.post(f"/v1/fleet/requests/{request}/retry").json()["id"]
    path = f"/v1/fleet/requests/{again}"
    wait_until(lambda: http.get(path).json()["state"] == "finished", "the same again", timeout_s=60)
    listed = http.get("/v1/fleet/requests", params={"limit": 2}).json()
    assert [row["id"] for row in listed["data"]] == [again, request]
    assert listed["counts"]["finished"] == 2


def stop_and_kill(http: httpx.Client, first: str, second: str) -> None:
    """Stop the worker `first` by an operator command and kill the worker `second`; wait until it is
    replaced.
    """
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


def log_lines(http: httpx.Client, **wanted: str | int) -> list[dict[str, str]]:
    return http.get("/v1/fleet/logs", params=wanted).json()["data"]


def check_log(http: httpx.Client, stopped: str, killed: str) -> None:
    wait_until(
        lambda: (
            {"worker", "conductor", "jobs"}
            <= {line["process"] for line in log_lines(http, limit=1000)}
        ),
        "lines of every kind of process",
    )
    lines = log_lines(http, worker=stopped)
    assert any("is ordered to stop" in line["message"] for line in lines)
    assert {line["stage"] for line in lines} == {STAGE}
    (death,) = log_lines(http, level="warning", worker=killed)
    assert f"worker {killed} died (SIGKILL)" in death["message"] and death["stage"] == STAGE
