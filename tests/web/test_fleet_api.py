"""The fleet API: response shapes, filters and errors, with the invented fleet of `plausible`."""

import io
import wave
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.core.errors import RedisUnreachable
from fleet.core.ids import AUDIO, COMPLETION, REQUEST, RESPONSE, StageName, shown_id
from tests.web.conftest import ServedGateway
from tests.web.divided import ANCHOR, ANCHOR_WITH_GAP, GAP, SECOND, STANDS_BY, divided_workers
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible import busy
from tests.web.plausible_requests import HOSTILE, worker_id


@pytest.fixture
def fleet(gateway: ServedGateway) -> FakeTelemetry:
    """Fake telemetry of the gateway, with data in every part."""
    reported = busy(gateway.client.graph)
    gateway.client.show(reported)
    return reported


def refusal(gateway: ServedGateway, method: str, path: str) -> tuple[int, str, str | None]:
    """Return status, code and param of an error in OpenAI's format."""
    answer = gateway.http.request(method, path)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_request_pages_are_complete(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    seen: list[str] = []
    before = ""
    while True:
        page = gateway.http.get("/v1/fleet/requests", params={"limit": 50, "before": before}).json()
        seen += [row["id"] for row in page["data"]]
        before = page["next"]
        if before is None:
            break
    assert seen == sorted((row.id for row in fleet.rows), reverse=True)
    assert sum(page["counts"].values()) == len(fleet.rows)


def test_requests_are_filtered(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    failed = gateway.http.get(
        "/v1/fleet/requests", params={"state": "failed", "stage": "talker", "kind": "text"}
    ).json()
    assert failed["data"] and all(
        row["state"] == "failed" and row["kind"] == "text" for row in failed["data"]
    )
    one = gateway.http.get("/v1/fleet/requests", params={"q": fleet.rows[5].id[6:]}).json()
    assert [row["id"] for row in one["data"]] == [fleet.rows[5].id]
    slow = gateway.http.get(
        "/v1/fleet/requests", params={"min_ms": 1500, "state": "finished"}
    ).json()["data"]
    assert slow and all(row["ended_us"] - row["created_us"] >= 1_500_000 for row in slow)
    session = next(row.session for row in fleet.rows if row.session)
    told = gateway.http.get("/v1/fleet/requests", params={"session": session, "limit": 200}).json()
    wanted = {row.id for row in fleet.rows if row.session == session}
    assert {row["id"] for row in told["data"]} == wanted and len(wanted) < len(fleet.rows)


def test_requests_are_filtered_by_the_time_at_which_they_were_live(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    row = next(row for row in fleet.rows if row.state == "finished")
    at = datetime.fromtimestamp(row.ended_us / 1e6, UTC)

    def found(begin: datetime, end: datetime) -> list[str]:
        times = {"from": begin.isoformat(), "to": end.isoformat(), "limit": 200}
        data = gateway.http.get("/v1/fleet/requests", params=times).json()["data"]
        assert all(
            (one["ended_us"] or one["created_us"] + 10**12) >= begin.timestamp() * 1e6
            and one["created_us"] <= end.timestamp() * 1e6
            for one in data
        )
        return [one["id"] for one in data]

    second = timedelta(seconds=1)
    assert row.id in found(at - second, at + second)
    assert row.id not in found(at + second, at + 20 * second)
    assert row.id not in found(at - 3600 * second, at - 1800 * second)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=yesterday", "from"),
        ("to=2026-11-30T18:13:00", "to"),
        ("to=9", "to"),
        ("from=0001-01-01T00:00:00Z", "from"),
        ("from=2026-11-30T18:13:00Z&to=2026-11-30T18:12:00Z", "from"),
    ],
)
def test_time_without_meaning_is_refused_by_name(
    gateway: ServedGateway, query: str, param: str
) -> None:
    code, _, named = refusal(gateway, "GET", f"/v1/fleet/requests?{query}")
    assert (code, named) == (400, param)


def test_time_may_have_another_zone(gateway: ServedGateway) -> None:
    for query in ("from=2026-11-30T18:13:00+01:00", "from=2026-11-30T18:13:00%2B01:00"):
        assert gateway.http.get(f"/v1/fleet/requests?{query}").status_code == 200


def test_request_detail_has_texts_and_audio(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    request = fleet.rows[-1].id
    trace = gateway.http.get(f"/v1/fleet/requests/{request}").json()
    assert (
        trace["prompt"]
        and trace["answer"]
        and trace["events"][0]["what"] == "submitted"
        and trace["playback"]["underruns"] == 1
    )
    sound = gateway.http.get(f"/v1/fleet/requests/{request}/audio")
    with wave.open(io.BytesIO(sound.content)) as file:
        assert (
            sound.headers["content-type"] == "audio/wav"
            and file.getnframes() == 48_000
            and file.getframerate() == 24_000
        )
    trace = gateway.http.get(f"/v1/fleet/requests/{request}/trace").json()
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert spans and all(span["dur"] >= 0 and span["tid"] > 0 for span in spans)
    assert {"thinker", "talker", "code2wav"} <= {
        e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
    }


@pytest.mark.parametrize("prefix", [REQUEST, COMPLETION, AUDIO, RESPONSE])
def test_request_is_known_by_every_id_that_clients_see(
    gateway: ServedGateway, fleet: FakeTelemetry, prefix: str
) -> None:
    request = fleet.rows[-1].id
    shown = shown_id(request, prefix)
    assert gateway.http.get(f"/v1/fleet/requests/{shown}").json()["id"] == request
    assert [
        row["id"]
        for row in gateway.http.get("/v1/fleet/requests", params={"q": shown}).json()["data"]
    ] == [request]
    lines = gateway.http.get("/v1/fleet/logs", params={"request": shown}).json()
    assert (
        lines["data"]
        == gateway.http.get("/v1/fleet/logs", params={"request": request}).json()["data"]
    )
    page = gateway.http.get(f"/requests/{shown}")
    assert (
        page.status_code == 200
        and f'<h1 class="mono">{request}</h1>' in page.text
        and "unknown" not in page.text
    )
    for neighbour in ("newer", "older"):
        found = gateway.http.get(f"/requests/{shown}/{neighbour}", follow_redirects=False)
        assert (
            found.headers["location"]
            == gateway.http.get(f"/requests/{request}/{neighbour}", follow_redirects=False).headers[
                "location"
            ]
        )


def test_retry_submits_request_under_new_id(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    request = fleet.rows[-1].id
    answer = gateway.http.post(f"/v1/fleet/requests/{request}/retry")
    assert answer.status_code == 201 and answer.json()["retry_of"] == request != answer.json()["id"]
    assert fleet.retried == [request]


def test_worker_order_is_sent(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    worker = fleet.worker_list[0].id
    for order, state in (
        ("drain", "draining"),
        ("drain", "draining"),
        ("resume", "ready"),
        ("stop", "leaving"),
    ):
        assert gateway.http.post(f"/v1/fleet/workers/{worker}/{order}").json()["order"] == order
        listed = gateway.http.get("/v1/fleet/workers").json()
        assert next(view for view in listed["data"] if view["id"] == worker)["state"] == state
    assert refusal(gateway, "POST", f"/v1/fleet/workers/{worker}/resume") == (
        409,
        "conflict",
        "worker_id",
    )
    assert refusal(gateway, "POST", f"/v1/fleet/workers/{worker}/dance") == (
        404,
        "not_found",
        "order",
    )
    assert refusal(gateway, "POST", "/v1/fleet/workers/nobody/drain") == (
        404,
        "not_found",
        "worker_id",
    )
    assert [view["state"] for view in gateway.http.get("/v1/fleet/workers").json()["gone"]] == [
        "died"
    ]


def test_drafter_is_chosen_and_shown(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    chosen = gateway.http.post("/v1/fleet/drafters/thinker/ngram").json()
    assert chosen == {"stage": "thinker", "object": "fleet.drafter", "drafter": "ngram"}
    (stage,) = gateway.http.get("/v1/fleet/drafters").json()["data"]
    assert (stage["stage"], stage["configured"], stage["chosen"]) == ("thinker", "off", "ngram")
    first = stage["workers"][0]
    assert first["acceptance_length"] == 2.24 and first["figures"]["accepted"] == [630, 400, 210]
    assert refusal(gateway, "POST", "/v1/fleet/drafters/talker/ngram") == (
        404,
        "not_found",
        "stage",
    )
    assert refusal(gateway, "POST", "/v1/fleet/drafters/thinker/eagle") == (
        400,
        "invalid_value",
        "drafter",
    )
    page = gateway.http.get(f"/workers/{first['worker']}").text
    assert "2.24" in page and "70 % 50 % 30 %" in page


def test_dump_order_logs_stack_traces(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    worker = fleet.worker_list[0]
    assert gateway.http.post(f"/v1/fleet/workers/{worker.id}/dump").json()["order"] == "dump"
    assert fleet.orders == [(worker.id, "dump")] and fleet.worker_list[0].state == worker.state
    assert refusal(gateway, "POST", "/v1/fleet/workers/nobody/dump") == (
        404,
        "not_found",
        "worker_id",
    )


def test_redeliver_with_other_epoch_is_refused(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    trace = next(trace for trace in fleet.traces.values() if trace.state == "running")
    task = trace.tasks[0]
    path = f"/v1/fleet/requests/{trace.id}/tasks/{task.stage}/redeliver"
    answer = gateway.http.post(path, params={"epoch": task.epoch})
    assert answer.json() == {"id": trace.id, "object": "fleet.task.redelivery", "stage": task.stage}
    assert fleet.redelivered == [(trace.id, task.stage, task.epoch)]
    assert refusal(gateway, "POST", f"{path}?epoch={task.epoch - 1}") == (409, "conflict", "epoch")
    assert refusal(gateway, "POST", f"{path}?epoch=x")[2] == "epoch"
    assert refusal(gateway, "POST", f"/v1/fleet/requests/{trace.id}/tasks/nothing/redeliver") == (
        404,
        "not_found",
        "stage",
    )
    assert refusal(gateway, "POST", f"/v1/fleet/requests/req-0/tasks/{task.stage}/redeliver") == (
        404,
        "not_found",
        "request_id",
    )


def test_queues_transfers_and_series_are_listed(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    queues = gateway.http.get("/v1/fleet/queues").json()["data"]
    assert [queue["role"] for queue in queues] == ["thinker", "talker", "code2wav"] and queues[0][
        "pending"
    ][0]["age_s"] == 1.7
    transfers = gateway.http.get("/v1/fleet/transfers").json()
    assert transfers["edges"][0]["p95_ms"] == 6.2 and transfers["workers"][0]["backend"] == "nixl"
    points = gateway.http.get("/v1/fleet/series").json()["data"]
    assert len(points) == 720 and {b["at_us"] - a["at_us"] for a, b in pairwise(points)} == {
        5_000_000
    }


def test_dead_letter_is_retried_or_deleted(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    (letter,) = gateway.http.get("/v1/fleet/dead-letters").json()["data"]
    assert HOSTILE in letter["why"]
    assert gateway.http.post(f"/v1/fleet/dead-letters/{letter['id']}/retry").status_code == 201
    assert refusal(gateway, "DELETE", f"/v1/fleet/dead-letters/{letter['id']}") == (
        404,
        "not_found",
        "request_id",
    )


def test_logs_are_filtered(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    page = gateway.http.get(
        "/v1/fleet/logs", params={"level": "warning", "q": "LINE", "limit": 5}
    ).json()
    assert len(page["data"]) == 5 and page["dropped"] == 7
    assert all(
        line["level"] in ("warning", "error") and "line" in line["message"] for line in page["data"]
    )
    more = gateway.http.get(
        "/v1/fleet/logs", params={"level": "warning", "q": "LINE", "before": page["next"]}
    ).json()
    assert more["data"][0]["id"] < page["data"][-1]["id"]


def test_jobs_are_submitted_retried_stopped_and_deleted(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    answer = gateway.http.post(
        "/v1/fleet/jobs", json={"kind": "bench", "arguments": {"measure": "scale"}}
    )
    job = answer.json()["id"]
    assert answer.status_code == 201 and answer.json()["state"] == "queued"
    assert refusal(gateway, "POST", f"/v1/fleet/jobs/{job}/retry") == (409, "conflict", "job_id")
    assert gateway.http.post(f"/v1/fleet/jobs/{job}/stop").json()["state"] == "canceled"
    assert gateway.http.post(f"/v1/fleet/jobs/{job}/retry").json()["arguments"] == {
        "measure": "scale"
    }
    assert gateway.http.delete(f"/v1/fleet/jobs/{job}").json()["deleted"] is True
    assert refusal(gateway, "GET", f"/v1/fleet/jobs/{job}") == (404, "not_found", "job_id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": 1}, "kind"),
        ({"kind": "no"}, "kind"),
        ({}, "kind"),
        ({"kind": "bench", "more": 1}, "more"),
        ({"kind": "bench", "arguments": ["--json", "/tmp/x"]}, "arguments"),
        ({"kind": "bench", "arguments": None}, "arguments"),
        ({"kind": "bench", "arguments": "--requests 2"}, "arguments"),
        *(
            ({"kind": "bench", "arguments": {name: "x"}}, f"arguments.{name}")
            for name in ("json", "png", "url", "set", "config")
        ),
        ({"kind": "bench", "arguments": {"requests": 0}}, "arguments.requests"),
        ({"kind": "bench", "arguments": {"requests": "2"}}, "arguments.requests"),
        ({"kind": "bench", "arguments": {"measure": "../x"}}, "arguments.measure"),
        (
            {"kind": "bench", "arguments": {"measure": "scale", "streams": [1, 10**9]}},
            "arguments.streams",
        ),
        ({"kind": "bench", "arguments": {"measure": "voice", "hops": 5}}, "arguments.hops"),
        ([], None),
        (None, None),
    ],
)
def test_job_with_wrong_body_is_refused_by_field(
    gateway: ServedGateway, fleet: FakeTelemetry, body: object, param: str | None
) -> None:
    num_jobs = len(fleet.job_list)
    refused = gateway.http.post("/v1/fleet/jobs", json=body)
    error = refused.json()["error"]
    assert (
        refused.status_code == 400
        and error["type"] == "invalid_request_error"
        and error["param"] == param
    )
    assert len(fleet.job_list) == num_jobs


@pytest.mark.parametrize(
    "path", ["fleet/jobs", "chat/completions", "audio/speech", "realtime/client_secrets"]
)
def test_body_nested_too_deeply_is_refused(gateway: ServedGateway, path: str) -> None:
    for num in (990, 30_000):
        job = b'{"kind":"bench","arguments":' + b"[" * num + b"]" * num + b"}"
        for body in (b"[" * num, b"[" * num + b"]" * num, b'{"":' * (num // 2), job):
            answer = gateway.http.post(
                f"/v1/{path}", content=body, headers={"content-type": "application/json"}
            )
            assert (
                answer.status_code == 400
                and answer.json()["error"]["type"] == "invalid_request_error"
            ), answer.text


def test_job_arguments_as_list_are_refused_with_example(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    refused = gateway.http.post(
        "/v1/fleet/jobs", json={"kind": "bench", "arguments": ["--requests", "20"]}
    )
    assert '"arguments": {"measure": "scale"' in refused.json()["error"]["message"]


def test_job_file_is_served_by_known_name_only(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    served = gateway.http.get("/v1/fleet/jobs/job-1/files/report.json")
    assert served.status_code == 200 and served.headers["content-type"] == "application/json"
    assert (
        gateway.http.get("/v1/fleet/jobs/job-1/files/report.png").headers["content-type"]
        == "image/png"
    )
    for path in (
        "job-1/files/tmp",
        "job-1/files/..%2freport.json",
        "job-3/files/report.json",
        "no/files/report.json",
    ):
        assert gateway.http.get(f"/v1/fleet/jobs/{path}").status_code == 404


PATHS = (
    "requests",
    "requests/req-1",
    "workers",
    "queues",
    "dead-letters",
    "transfers",
    "series",
    "journal",
    "logs",
    "jobs",
    "jobs/1",
    "requests/req-1/audio",
    "requests/req-1/trace",
)


@pytest.mark.parametrize("path", PATHS)
def test_unreachable_redis_is_answered_503(
    gateway: ServedGateway, fleet: FakeTelemetry, path: str
) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    assert refusal(gateway, "GET", f"/v1/fleet/{path}")[:2] == (503, "redis_unreachable")


NAMES = st.sampled_from(
    [
        "state",
        "stage",
        "worker",
        "kind",
        "model",
        "min_ms",
        "from",
        "to",
        "q",
        "before",
        "limit",
        "level",
        "request",
        "process",
        "since",
        "until",
        "what",
    ]
)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    st.sampled_from(["requests", "logs", "journal"]), st.dictionaries(NAMES, st.text(max_size=30))
)
def test_arbitrary_query_is_answered_or_refused_by_parameter(
    gateway: ServedGateway, fleet: FakeTelemetry, path: str, query: dict[str, str]
) -> None:
    answer = gateway.http.get(f"/v1/fleet/{path}", params=query)
    assert answer.status_code in (200, 400)
    assert answer.status_code == 200 or answer.json()["error"]["param"] in query


def test_routes_of_divided_models_are_listed(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    assert gateway.http.get("/v1/fleet/routes").json() == {"routes": [], "unused": []}
    fleet.worker_list += divided_workers(StageName("thinker"))
    listed = gateway.http.get("/v1/fleet/routes").json()
    assert [route["anchor"] for route in listed["routes"]] == [
        worker_id("thinker", n) for n in (ANCHOR, ANCHOR_WITH_GAP)
    ]
    assert [(hop["span"], hop["share"]) for hop in listed["routes"][0]["hops"]] == [
        ("0:3", 12.2),
        ("4:11", 25.6),
        ("12:output", 56.7),
    ]
    slowest = listed["routes"][0]["hops"][2]
    assert slowest["worker"] == worker_id("thinker.span", SECOND) and slowest["computes_most"]
    assert listed["routes"][1]["gap"] == GAP and listed["unused"][0]["worker"] == worker_id(
        "thinker.span", STANDS_BY
    )
