"""HTTP routes for models, requests, health and metrics; API keys; and errors of the router."""

import asyncio
import json
from collections.abc import Callable

import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from fleet.config.schema import FleetConfig
from fleet.core.errors import ConfigError, RedisUnreachable
from fleet.core.ids import RoleName
from fleet.telemetry.views import RoleView
from tests.web.conftest import ASK, Loaded, ServedGateway, bounded, request_id_of, serving
from tests.web.fake_client import Script
from tests.web.test_transcription import sound
from web.gateway.sampling import stage_defaults


def get(gateway: ServedGateway, path: str, **options: object) -> httpx.Response:
    return gateway.http.get(path, **options)  # pyright: ignore[reportArgumentType]


def test_models_are_listed_and_readable(gateway: ServedGateway) -> None:
    client = gateway.openai()
    (model,) = client.models.list().data
    assert (
        model.id == "omni" and model.object == "model" and client.models.retrieve("omni") == model
    )
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("some/other")
    assert missing.value.code == "model_not_found"


CLIENTS_DEFAULTS = (
    "tts-1",
    "gpt-4o-mini-tts",
    "whisper-1",
    "gpt-4o-transcribe",
    "gpt-realtime",
    "gpt-realtime-2.1",
)


@pytest.mark.parametrize("name", CLIENTS_DEFAULTS)
def test_alias_selects_served_model(gateway: ServedGateway, name: str) -> None:
    client = gateway.openai()
    assert client.models.retrieve(name).id == "omni" and [
        model.id for model in client.models.list()
    ] == ["omni"]
    answer = gateway.create(model=name)
    assert answer.model == "omni" and gateway.client.submitted[0][0].model == "omni"
    assert {chunk.model for chunk in gateway.stream(model=name)} == {"omni"}
    assert client.audio.speech.create(model=name, input="Hello.", voice="alloy").content
    assert (
        client.audio.transcriptions.create(model=name, file=("a.wav", sound())).text
        == Script().text
    )
    assert client.realtime.client_secrets.create(
        session={"type": "realtime", "model": name}
    ).value.startswith("ek_")
    assert asyncio.run(session_model(gateway, name)) == "omni"


async def session_model(gateway: ServedGateway, name: str) -> str:
    async with connect(f"{gateway.url.replace('http', 'ws')}/v1/realtime?model={name}") as socket:
        return str(json.loads(await socket.recv())["session"]["model"])


@pytest.mark.parametrize("name", ["gpt-4o", "gpt-4o-audio-preview", "Omni", "tts-2", ""])
def test_unknown_model_is_refused_with_served_one(gateway: ServedGateway, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        gateway.create(model=name)
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    assert "'omni'" in refused.value.message and "web.model_aliases" in refused.value.message


def test_aliases_are_configurable(loaded: Loaded) -> None:
    for aliases, served, refused in (
        ((), ("omni",), "tts-1"),
        (("gpt-4o",), ("omni", "gpt-4o"), "tts-1"),
    ):
        with serving(bounded(loaded, model_aliases=aliases)) as gateway:
            assert {gateway.create(model=name).model for name in served} == {"omni"}
            answer = get(gateway, f"/v1/models/{refused}")
            assert answer.status_code == 404 and ("web.model_aliases lists" in answer.text) is bool(
                aliases
            )


def test_trailing_slash_of_models_is_ignored(gateway: ServedGateway) -> None:
    assert get(gateway, "/v1/models/").json() == get(gateway, "/v1/models").json()
    assert get(gateway, "/v1/models/omni/").json()["id"] == "omni"


def test_realtime_over_plain_http_is_answered_426(gateway: ServedGateway) -> None:
    answer = get(gateway, "/v1/realtime")
    assert answer.status_code == 426 and answer.headers["upgrade"] == "websocket"
    assert "ws://" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
    ],
)
def test_router_errors_have_openai_shape(
    gateway: ServedGateway, method: str, path: str, status: int
) -> None:
    answer = gateway.http.request(method, path)
    assert answer.status_code == status and answer.headers["x-request-id"].startswith("req-")
    assert (
        answer.json()["error"]["type"] == "invalid_request_error"
        and path in answer.json()["error"]["message"]
    )


def test_unexpected_error_is_answered_500(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(gateway.client.telemetry), "missing_roles", lambda _self: 1 / 0)
    answer = get(gateway, "/v1/fleet/workers")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "server_error"
    assert "division" not in answer.text and answer.headers["x-request-id"].startswith("req-")


def test_health_and_readiness_are_reported(gateway: ServedGateway) -> None:
    assert get(gateway, "/health").json() == {"status": "ok"}
    assert get(gateway, "/ready").json() == {
        "ready": True,
        "missing": [],
        "starting": [],
        "error": None,
    }
    gateway.client.missing = ["talker"]
    answer = get(gateway, "/ready")
    assert (
        answer.status_code == 503
        and answer.json()["missing"] == ["talker"]
        and "retry-after" in answer.headers
    )
    assert "start one with `fleet worker talker`" in answer.json()["error"]["message"]
    gateway.client.telemetry.role_list = [
        RoleView(role=RoleName("talker"), starting=1, loaded_percent=34)
    ]
    answer = get(gateway, "/ready").json()
    assert answer["missing"] == ["talker"] and answer["starting"] == [
        {"role": "talker", "loaded_percent": 34}
    ]
    assert (
        answer["error"]["message"]
        == "no live worker for: talker (starting, 34 % loaded); wait until it has loaded"
    )
    gateway.client.missing, gateway.client.telemetry.trouble = (
        [],
        "Redis refuses writes (OOM), since its memory is full",
    )
    answer = get(gateway, "/ready")
    assert (
        answer.status_code == 503
        and answer.json()["missing"] == []
        and "retry-after" in answer.headers
    )
    assert (
        answer.json()["error"]["message"] == "Redis refuses writes (OOM), since its memory is full"
    )
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    answer = get(gateway, "/ready")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "redis_unreachable"
    assert get(gateway, "/health").status_code == 200


def test_request_detail_is_served(gateway: ServedGateway) -> None:
    answer = gateway.create(modalities=["text", "audio"])
    trace = get(gateway, f"/v1/fleet/requests/{request_id_of(answer)}").json()
    assert trace["state"] == "finished" and trace["error"] is None
    assert [task["stage"] for task in trace["tasks"]] == ["thinker", "talker", "code2wav", "client"]
    audio = next(edge for edge in trace["edges"] if edge["name"] == "audio")
    assert audio["target"] == "client" and audio["produced"] == audio["consumed"] == 7
    answer = get(gateway, "/v1/fleet/requests/req-0")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "request_id"


def test_request_is_aborted_by_delete(gateway: ServedGateway) -> None:
    answer = gateway.create()
    path = f"/v1/fleet/requests/{request_id_of(answer)}"
    assert gateway.http.delete(path).json()["aborted"] is False
    assert gateway.http.delete("/v1/fleet/requests/req-0").status_code == 404
    gateway.client.script = Script(stall_at=1)
    with gateway.http.stream(
        "POST", "/v1/chat/completions", json={**ASK, "stream": True}
    ) as stream:
        request = stream.headers["x-request-id"]
        assert gateway.http.delete(f"/v1/fleet/requests/{request}").json() == {
            "id": request,
            "object": "fleet.request.aborted",
            "aborted": True,
        }
    assert gateway.client.streams[request].aborted == "cancelled through the API"


def test_workers_are_listed(gateway: ServedGateway) -> None:
    gateway.client.missing = ["talker"]
    body = get(gateway, "/v1/fleet/workers").json()
    assert [worker["role"] for worker in body["data"]] == ["thinker", "code2wav", "gateway"]
    assert body["missing_roles"] == ["talker"] and body["data"][0]["capacity"] == 16
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    assert get(gateway, "/v1/fleet/workers").status_code == 503


def test_metrics_count_requests_and_audio(gateway: ServedGateway) -> None:
    gateway.create(modalities=["text", "audio"])
    text = get(gateway, "/metrics").text
    for line in (
        'fleet_requests_total{outcome="stop"}',
        "fleet_requests_in_flight 0.0",
        "fleet_first_text_seconds_count",
        'fleet_audio_ttfp_seconds_count{model_name="omni"}',
        'fleet_audio_rtf_count{model_name="omni"}',
        'fleet_audio_duration_seconds_count{model_name="omni"}',
        'fleet_audio_frames_total{model_name="omni"}',
        'fleet_audio_continuity_ok_total{model_name="omni"}',
        'fleet_requests_success_total{finished_reason="stop",model_name="omni"}',
        "fleet_num_requests_running"
        '{model_name="omni",replica="thinker@host:1:a",stage="thinker"} 0.0',
        'fleet_edge_chunks_total{edge="audio"}',
        'fleet_workers{role="thinker"} 1.0',
        'fleet_http_responses_total{method="POST",route="/v1/chat/completions",status="200"}',
    ):
        assert line in text, line
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    assert get(gateway, "/metrics").status_code == 200


def test_metrics_have_queue_of_each_role(gateway: ServedGateway) -> None:
    gateway.client.telemetry.role_list = [
        RoleView(
            role=RoleName("thinker"),
            queue_depth=3,
            lag=2,
            oldest_s=1.5,
            running=16,
            capacity=16,
            draining=1,
            standby=2,
        )
    ]
    lines = get(gateway, "/metrics").text.splitlines()
    expected = {
        "queue_depth": 3,
        "queue_lag": 2,
        "queue_oldest_seconds": 1.5,
        "running": 16,
        "capacity": 16,
        "draining": 1,
    }
    for name, value in {**expected, "standby": 2}.items():
        assert f'fleet_role_{name}{{role="thinker"}} {float(value)}' in lines, name
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    assert 'role="thinker"' not in get(gateway, "/metrics").text, (
        "what cannot be read must not look current"
    )


def test_api_key_is_required_if_set(serve_with: Callable[[str | None], ServedGateway]) -> None:
    gateway = serve_with("sécret")
    with pytest.raises(openai.AuthenticationError) as refused:
        gateway.openai("wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    assert get(gateway, "/v1/models").headers["www-authenticate"] == "Bearer"
    headers = {"authorization": "Bearer sécret".encode()}
    assert get(gateway, "/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ready", "/static/console.css", "/console/login"):
        assert get(gateway, path).status_code == 200, path
    assert get(gateway, "/console/events").status_code == 401
    assert get(gateway, "/").headers["location"] == "/console/login"


def test_metrics_need_key_unless_open(loaded: Loaded, locked: ServedGateway) -> None:
    refused = get(locked, "/metrics")
    assert refused.status_code == 401 and "fleet_" not in refused.text
    for path in ("/metrics", "/metrics?name[]=fleet_workers"):
        scraped = get(locked, path, headers={"authorization": "Bearer secret"})
        assert scraped.status_code == 200 and "fleet_workers" in scraped.text
    with serving(bounded(loaded, open_metrics=True), "secret") as open_to_all:
        assert get(open_to_all, "/metrics").status_code == 200
        assert get(open_to_all, "/v1/models").status_code == 401


def test_readiness_without_key_has_no_roles(
    locked: ServedGateway,
) -> None:
    troubles = (
        (["talker"], None),
        ([], RedisUnreachable("no Redis answers (connecting to 10.1.2.3:6379)")),
    )
    for missing, unreachable in troubles:
        locked.client.missing, locked.client.unreachable = missing, unreachable
        answer = get(locked, "/ready")
        assert (
            answer.status_code == 503
            and answer.json()["ready"] is False
            and answer.json()["missing"] == []
        )
        assert (
            "talker" not in answer.text
            and "10.1.2.3" not in answer.text
            and "API key" in answer.json()["error"]["message"]
        )
        assert answer.headers["retry-after"] == "1"
        reported = get(locked, "/ready", headers={"authorization": "Bearer secret"})
        assert reported.status_code == 503 and (
            "talker" in reported.text or "10.1.2.3" in reported.text
        )


def test_content_security_policy_allows_own_scripts_only(gateway: ServedGateway) -> None:
    answer = get(gateway, "/")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert (
        "<script>" not in answer.text
        and "style=" not in answer.text
        and len(answer.content) < 100_000
    )


def test_gateway_serves_another_graph(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        answer = gateway.create(model="text", temperature=0.5)
        assert answer.choices[0].message.content == Script().text
        assert set(gateway.client.submitted[0][0].sampling) == {"lm"}
        with pytest.raises(openai.BadRequestError) as refused:
            gateway.create(model="text", modalities=["text", "audio"])
        assert refused.value.param == "modalities"
        page = get(gateway, "/").text
        assert "stage-lm" in page and "text only" in page and 'value="chelsie"' not in page


def test_invalid_sampling_of_deployment_is_refused_by_key() -> None:
    for sampling in ({"temperature": -1.0}, {"heat": 1}):
        config = FleetConfig.model_validate({"stages": {"talker": {"sampling": sampling}}})
        with pytest.raises(ConfigError, match=r"stages\.talker\.sampling"):
            stage_defaults(config, {})
