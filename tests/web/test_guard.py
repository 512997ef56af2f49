"""Access rules: API key, cookie with CSRF token, origin, host; and the read-only gateway."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.typing import Origin

from fleet.config.schema import WebConfig
from tests.web.conftest import ASK, Loaded, ServedGateway, bounded, serving
from tests.web.console.busy_gateway import fill
from tests.web.realtime.refused_socket import refusal_of
from web.console.login import keep_local_path
from web.http.guard import COOKIE, CSRF_HEADER
from web.http.hosts import AllowedHosts

KEY = "secret"
ORDER = "/v1/fleet/workers/{}/drain"


@pytest.fixture
def locked(serve_with: Callable[[str | None], ServedGateway]) -> ServedGateway:
    gateway = serve_with(KEY)
    fill(gateway)
    return gateway


@pytest.fixture
def browser(locked: ServedGateway) -> Iterator[httpx.Client]:
    """An HTTP client with the cookie of a logged-in browser."""
    with httpx.Client(base_url=locked.url, headers={"origin": locked.url}) as client:
        assert client.post("/console/login", data={"key": KEY}).status_code == 303
        yield client


def csrf_of(browser: httpx.Client) -> str:
    found = re.search(r'data-csrf="([0-9a-f]+)"', browser.get("/now").text)
    assert found is not None
    return found.group(1)


def order(gateway: ServedGateway) -> str:
    return ORDER.format(gateway.client.telemetry.worker_list[0].id)


def test_change_by_logged_in_page_needs_csrf_token(
    locked: ServedGateway, browser: httpx.Client
) -> None:
    assert browser.get("/v1/fleet/workers").status_code == 200
    for headers in ({}, {CSRF_HEADER: "wrong"}, {CSRF_HEADER: browser.cookies[COOKIE]}):
        answer = browser.post(order(locked), headers=headers)
        assert answer.status_code == 403 and CSRF_HEADER in answer.json()["error"]["message"]
    assert not locked.client.telemetry.orders
    assert browser.post(order(locked), headers={CSRF_HEADER: csrf_of(browser)}).status_code == 200
    assert [given for _, given in locked.client.telemetry.orders] == ["drain"]


def test_cross_site_change_is_refused_despite_cookie_and_token(
    locked: ServedGateway, browser: httpx.Client
) -> None:
    token = {CSRF_HEADER: csrf_of(browser)}
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ):
        answer = browser.post(order(locked), headers={**token, **headers})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "cross_site_request"
    assert not locked.client.telemetry.orders


def test_program_with_key_needs_no_origin_or_token(locked: ServedGateway) -> None:
    for headers in ({}, {"origin": "http://elsewhere.example"}):
        answer = locked.http.post(
            order(locked), headers={"authorization": f"Bearer {KEY}", **headers}
        )
        assert answer.status_code == 200


def test_change_without_key_depends_on_origin(gateway: ServedGateway) -> None:
    fill(gateway)
    refused = gateway.http.post(order(gateway), headers={"origin": "http://evil.example"})
    assert refused.status_code == 403 and not gateway.client.telemetry.orders
    for headers in ({}, {"origin": gateway.url, "sec-fetch-site": "same-origin"}):
        assert gateway.http.post(order(gateway), headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/console/ws", "/v1/realtime"])
def test_cross_site_websocket_is_refused_despite_cookie(
    locked: ServedGateway, browser: httpx.Client, path: str
) -> None:
    cookie = {"cookie": f"{COOKIE}={browser.cookies[COOKIE]}"}

    async def open_socket(origin: str) -> None:
        async with connect(
            locked.url.replace("http", "ws") + path,
            origin=Origin(origin),
            additional_headers=cookie,
        ):
            pass

    asyncio.run(open_socket(locked.url))
    refusal = asyncio.run(
        refusal_of(locked, path, origin=Origin("http://evil.example"), additional_headers=cookie)
    )
    assert refusal.close_code == 3000 and refusal.error["code"] == "cross_site_request"


def test_read_only_gateway_refuses_changes_and_answers_requests(loaded: Loaded) -> None:
    with serving(bounded(loaded, read_only=True)) as gateway:
        fill(gateway)
        request = gateway.client.telemetry.rows[0].id
        orders = {
            "POST": [
                order(gateway),
                "/v1/fleet/jobs",
                f"/v1/fleet/requests/{request}/retry",
                f"/v1/fleet/dead-letters/{request}/retry",
            ],
            "DELETE": [
                f"/v1/fleet/requests/{request}",
                "/v1/fleet/jobs/job-1",
                "/v1/fleet/sessions/sess_x",
            ],
        }
        for method, path in ((method, path) for method, given in orders.items() for path in given):
            answer = gateway.http.request(method, path)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "read_only", path
            assert "web.read_only" in answer.json()["error"]["message"]
        assert not gateway.client.telemetry.orders and not gateway.client.telemetry.retried
        assert gateway.http.get("/v1/fleet/workers").status_code == 200
        body = ASK
        assert gateway.http.post("/v1/chat/completions", json=body).status_code == 200


def test_login_redirects_to_requested_page(locked: ServedGateway) -> None:
    html = {"accept": "text/html"}
    answer = locked.http.get("/requests/req-1", headers=html)
    assert (
        answer.status_code == 303
        and answer.headers["location"] == "/console/login?next=/requests/req-1"
    )
    assert 'action="/console/login?next=/requests/req-1"' in locked.http.get(
        answer.headers["location"]
    ).text.replace("%2F", "/")
    entered = locked.http.post(answer.headers["location"], data={"key": KEY})
    assert entered.status_code == 303 and entered.headers["location"] == "/requests/req-1"
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    for path in ("/v1/fleet/workers", "/console/live/now"):
        assert locked.http.get(path, headers={**html, "cookie": ""}).status_code == 401, path


def test_logout_deletes_cookie(browser: httpx.Client) -> None:
    assert browser.get("/now").status_code == 200
    assert browser.post("/console/logout").headers["location"] == "/console/login"
    assert not browser.cookies and browser.get("/v1/fleet/workers").status_code == 401


@given(st.text(max_size=30))
def test_login_never_redirects_to_another_site(given_next: str) -> None:
    path = keep_local_path(given_next)
    assert path in ("", given_next)
    if path:
        assert (
            path[0] == "/"
            and path[1:2] not in ("/", "\\")
            and "\n" not in path
            and "\r" not in path
        )


@pytest.mark.parametrize(
    "given_next",
    ["//evil.example", "/\\evil.example", "http://evil.example", "javascript:alert(1)", "/\t/evil"],
)
def test_known_open_redirects_are_refused(given_next: str) -> None:
    assert keep_local_path(given_next) == ""


REBOUND = "attacker.example:8000"


@pytest.mark.parametrize("path", ["/v1/models", "/", "/health", "/v1/fleet/requests"])
def test_rebound_host_is_refused(gateway: ServedGateway, path: str) -> None:
    answer = gateway.http.get(path, headers={"host": REBOUND, "origin": f"http://{REBOUND}"})
    error = answer.json()["error"]
    assert answer.status_code == 421 and error["code"] == "host_not_allowed"
    assert "web.allowed_hosts" in error["message"] and "FLEET_API_KEY" in error["message"]


@pytest.mark.parametrize("path", ["/console/ws", "/v1/realtime"])
def test_websocket_of_rebound_host_is_refused(gateway: ServedGateway, path: str) -> None:
    host, port = "127.0.0.1", int(gateway.url.rpartition(":")[2])
    rebound = replace(gateway, url=f"http://{REBOUND}")
    refusal = asyncio.run(refusal_of(rebound, path, host=host, port=port))
    assert refusal.close_code == 3000 and refusal.error["code"] == "host_not_allowed"
    assert "web.allowed_hosts" in refusal.error["message"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "127.9.9.9",
        "fleet.localhost",
        "LOCALHOST.",
    ],
)
def test_all_names_of_loopback_are_accepted(gateway: ServedGateway, host: str) -> None:
    assert gateway.http.get("/health", headers={"host": host}).status_code == 200


def test_any_host_is_accepted_with_key(locked: ServedGateway) -> None:
    answer = locked.http.get(
        "/v1/models", headers={"host": REBOUND, "authorization": f"Bearer {KEY}"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("web", "has_key", "host", "allowed"),
    [
        (WebConfig(host="0.0.0.0"), False, "fleet.example", True),
        (
            WebConfig(host="0.0.0.0", allowed_hosts=("fleet.example",)),
            False,
            "other.example",
            False,
        ),
        (
            WebConfig(host="0.0.0.0", allowed_hosts=("fleet.example",)),
            True,
            "Fleet.example:443",
            True,
        ),
        (
            WebConfig(host="fleet.local", allowed_hosts=("proxy.example",)),
            False,
            "fleet.local:8000",
            True,
        ),
        (WebConfig(), False, "127.0.0.1.attacker.example", False),
        (WebConfig(), False, "", False),
        (WebConfig(), False, "[::1", False),
        (WebConfig(), False, None, True),
    ],
)
def test_host_is_checked_by_configuration(
    web: WebConfig, has_key: bool, host: str | None, allowed: bool
) -> None:
    assert (AllowedHosts(web, has_key=has_key).find_refusal(host) is None) is allowed
