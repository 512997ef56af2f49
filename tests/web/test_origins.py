"""Cross-origin use of the API: allowed origins, headers, and the console, which is closed to other
origins.
"""

import asyncio
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.typing import Origin

from fleet.core.errors import ConfigError
from tests.web.conftest import ASK, Loaded, ServedGateway, allowing, serving
from tests.web.console.busy_gateway import fill
from tests.web.fake_client import FakeClient
from tests.web.realtime.refused_socket import refusal_of
from web.app import create_app
from web.http.guard import COOKIE, CSRF_HEADER
from web.http.origins import not_listed

APP, OTHER = "https://app.example.com", "https://other.example.com"
KEY = "secret"
CHAT = "/v1/chat/completions"
BODY = ASK
SDK_HEADERS = (
    "authorization,content-type,x-stainless-os,x-stainless-retry-count,last-event-id,"
    "openai-organization,openai-beta"
)


@pytest.fixture(scope="module")
def open_to_app(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(allowing(loaded, APP)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def locked(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(allowing(loaded, APP), KEY) as gateway:
        fill(gateway)
        yield gateway


def preflight(
    gateway: ServedGateway, origin: str, path: str = CHAT, method: str = "POST"
) -> httpx.Response:
    asked = {"access-control-request-method": method, "access-control-request-headers": SDK_HEADERS}
    return gateway.http.options(path, headers={"origin": origin, **asked})


def names(answer: httpx.Response, header: str) -> set[str]:
    return {name.strip().lower() for name in answer.headers.get(header, "").split(",")}


@pytest.mark.parametrize(
    ("path", "method"),
    [
        (CHAT, "POST"),
        ("/v1/models", "GET"),
        ("/v1/audio/speech", "POST"),
        ("/v1/fleet/requests/x", "DELETE"),
        ("/health", "GET"),
    ],
)
def test_preflight_of_an_allowed_origin_permits_sdk_headers(
    locked: ServedGateway, path: str, method: str
) -> None:
    answer = preflight(locked, APP, path, method)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == APP
    assert set(SDK_HEADERS.split(",")) <= names(answer, "access-control-allow-headers")
    assert method.lower() in names(answer, "access-control-allow-methods") and "origin" in names(
        answer, "vary"
    )
    assert "access-control-allow-credentials" not in answer.headers


def test_preflight_of_another_origin_is_refused_by_the_name_of_the_setting(
    gateway: ServedGateway, open_to_app: ServedGateway
) -> None:
    for asked, origin in (
        (gateway, APP),
        (open_to_app, OTHER),
        (open_to_app, f"{APP}.evil.example"),
        (open_to_app, "null"),
    ):
        answer = preflight(asked, origin)
        error = answer.json()["error"]
        assert (
            answer.status_code == 403
            and error["code"] == "cross_site_request"
            and error["param"] == "origin"
        )
        assert "web.allowed_origins" in error["message"] and origin in error["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_refused_origin_is_quoted_and_truncated() -> None:
    assert "'http://evil\\x1b[31m'" in not_listed("http://evil\x1b[31m")
    assert len(not_listed("x" * 5_000)) < 200


def test_refused_preflights_of_an_origin_are_logged_once(
    locked: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fleet.web"):
        for _ in range(20):
            assert preflight(locked, "https://many.example").status_code == 403
    assert len([line for line in caplog.messages if "many.example" in line]) == 1


@pytest.mark.parametrize("method", ["PUT", "PATCH", "put", "X" * 5_000])
def test_preflight_of_unknown_method_is_refused_in_api_shape(
    open_to_app: ServedGateway, method: str
) -> None:
    answer = preflight(open_to_app, APP, method=method)
    error = answer.json()["error"]
    assert (
        answer.status_code == 400
        and error["type"] == "invalid_request_error"
        and len(answer.content) < 500
    )
    assert (
        error["param"] == "access-control-request-method"
        and "use GET, HEAD, POST or DELETE" in error["message"]
    )


def test_answers_and_refusals_are_readable_by_the_allowed_origin(
    locked: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = {"origin": APP, "sec-fetch-site": "cross-site"}
    bearer = {**page, "authorization": f"Bearer {KEY}"}
    monkeypatch.setattr(type(locked.client.telemetry), "missing_roles", lambda _self: 1 / 0)
    answers = {
        200: locked.http.post(CHAT, json=BODY, headers=bearer),
        400: locked.http.post(CHAT, json={}, headers=bearer),
        401: locked.http.post(CHAT, json=BODY, headers=page),
        404: locked.http.get("/v1/nothing", headers=bearer),
        500: locked.http.get("/v1/fleet/workers", headers=bearer),
    }
    for status, answer in answers.items():
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == APP
        assert {"*", "x-request-id", "retry-after"} <= names(
            answer, "access-control-expose-headers"
        )
        assert (
            answer.headers["x-request-id"]
            and "access-control-allow-credentials" not in answer.headers
        )
    stream = locked.http.post(CHAT, json={**BODY, "stream": True}, headers=bearer)
    assert stream.headers["access-control-allow-origin"] == APP and stream.text.endswith(
        "data: [DONE]\n\n"
    )


def test_gateway_without_a_key_answers_pages_of_allowed_origins_only(
    open_to_app: ServedGateway,
) -> None:
    assert (
        open_to_app.http.post(
            CHAT, json=BODY, headers={"origin": APP, "sec-fetch-site": "cross-site"}
        ).status_code
        == 200
    )
    refused = open_to_app.http.post(CHAT, json=BODY, headers={"origin": OTHER})
    assert (
        refused.status_code == 403 and "web.allowed_origins" in refused.json()["error"]["message"]
    )
    assert "access-control-allow-origin" not in refused.headers
    assert (
        "access-control-allow-origin"
        not in open_to_app.http.get("/v1/models", headers={"origin": OTHER}).headers
    )


def test_console_cookie_is_ignored_from_allowed_origin(locked: ServedGateway) -> None:
    login = httpx.post(f"{locked.url}/console/login", data={"key": KEY}).cookies[COOKIE]
    own_page = locked.http.get("/now", headers={"cookie": f"{COOKIE}={login}"}).text
    cookie = {
        "cookie": f"{COOKIE}={login}",
        CSRF_HEADER: own_page.partition('data-csrf="')[2].partition('"')[0],
    }
    page = {**cookie, "origin": APP, "sec-fetch-site": "same-site"}
    order = f"/v1/fleet/workers/{locked.client.telemetry.worker_list[0].id}/drain"
    for answer in (
        locked.http.get("/v1/models", headers=page),
        locked.http.post(order, headers=page),
    ):
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert not locked.client.telemetry.orders
    assert (
        locked.http.get("/v1/models", headers={**cookie, "origin": locked.url}).status_code == 200
    )


@pytest.mark.parametrize("path", ["/", "/requests", "/static/console.css"])
def test_console_is_closed_to_allowed_origins(open_to_app: ServedGateway, path: str) -> None:
    assert (
        "access-control-allow-origin"
        not in open_to_app.http.get(path, headers={"origin": APP}).headers
    )
    assert preflight(open_to_app, APP, path).status_code in (404, 405)
    assert (
        open_to_app.http.post(
            "/console/login", data={"key": KEY}, headers={"origin": APP}
        ).status_code
        == 403
    )


async def first_event(gateway: ServedGateway, path: str, origin: str) -> str:
    async with connect(gateway.url.replace("http", "ws") + path, origin=Origin(origin)) as socket:
        return str(json.loads(await socket.recv())["type"])


def test_voice_websocket_opens_for_allowed_origin(open_to_app: ServedGateway) -> None:
    assert asyncio.run(first_event(open_to_app, "/v1/realtime", APP)) == "session.created"
    for path, origin in (("/v1/realtime", OTHER), ("/console/ws", APP)):
        refused = asyncio.run(refusal_of(open_to_app, path, origin=Origin(origin)))
        assert refused.close_code == 3000 and "web.allowed_origins" in refused.error["message"]


def test_rebound_host_is_refused_for_allowed_origins(open_to_app: ServedGateway) -> None:
    answer = open_to_app.http.post(
        CHAT, json=BODY, headers={"origin": APP, "host": "attacker.example"}
    )
    assert answer.status_code == 421 and "web.allowed_hosts" in answer.json()["error"]["message"]


def test_any_origin_is_allowed_only_with_a_key(loaded: Loaded, gateway: ServedGateway) -> None:
    any_origin = allowing(loaded, "*")
    with pytest.raises(ConfigError, match="FLEET_API_KEY") as refused:
        create_app(
            any_origin.config,
            FakeClient(gateway.client.graph, gateway.client.tokenizer),
            loaded.frontend,
            None,
        )
    assert refused.value.param == "web.allowed_origins"
    with serving(any_origin, KEY) as everywhere:
        answer = preflight(everywhere, OTHER)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers
        page = {"origin": OTHER, "authorization": f"Bearer {KEY}"}
        answer = everywhere.http.post(CHAT, json=BODY, headers=page)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        assert everywhere.http.post(CHAT, json=BODY, headers={"origin": OTHER}).status_code == 401
