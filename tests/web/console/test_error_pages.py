"""Errors in a browser are console pages with links to continue; programs and buttons receive
JSON.
"""

import httpx
import pytest

from fleet.control.voice import HeldVoice
from fleet.core.errors import RedisUnreachable
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.console import html_audit

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def error_page(answer: httpx.Response, status: int) -> str:
    assert (
        answer.status_code == status
        and answer.headers["content-type"] == "text/html; charset=utf-8"
    ), answer.text[:300]
    assert (
        answer.headers["content-length"] == str(answer.num_bytes_downloaded)
        and answer.headers["cache-control"] == "no-store"
    )
    assert answer.headers["content-security-policy"] and answer.headers["x-request-id"]
    assert not (faults := html_audit.read(answer.text).faults), faults
    assert '<nav aria-label="Pages">' in answer.text and 'class="trouble"' in answer.text
    return answer.text


@pytest.mark.parametrize(
    "path", ["/nothing", "/requests/a/b/c", "/console/nothing", "/static/nothing.js"]
)
def test_unknown_page_is_shown_in_the_console(gateway: ServedGateway, path: str) -> None:
    page = error_page(gateway.http.get(path, headers=BROWSER), 404)
    assert 'href="/now"' in page and "Page not found" in page


def test_wrong_method_is_shown_in_the_console(gateway: ServedGateway) -> None:
    answer = gateway.http.post("/now", headers=BROWSER)
    page = error_page(answer, 405)
    assert "POST /now" in page and "GET" in answer.headers["allow"] and "Try again" not in page


def test_error_page_of_unreachable_redis_offers_retry(gateway: ServedGateway) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    answer = gateway.http.get("/requests/req-1/older?a=%22b", headers=BROWSER)
    page = error_page(answer, 503)
    assert (
        "no Redis answers" in page
        and 'href="/requests/req-1/older?a=%22b"' in page
        and answer.headers["retry-after"]
    )


def test_error_page_of_internal_error_names_the_request(gateway: ServedGateway) -> None:
    gateway.client.voice.held["broken"] = HeldVoice(epoch=1, fields={"view": b"no view"})
    answer = gateway.http.get("/sessions", headers=BROWSER)
    json = gateway.http.get("/sessions").json()
    del gateway.client.voice.held["broken"]
    page = error_page(answer, 500)
    assert answer.headers["x-request-id"] in page and "Decode" not in page
    assert json["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/nothing", {}),
        ("GET", "/nothing", {"accept": "application/json"}),
        ("GET", "/v1/nothing", BROWSER),
        ("DELETE", "/v1/models", BROWSER),
        (
            "GET",
            "/console/nothing",
            {"accept": "text/html, text/event-stream", "hx-request": "true"},
        ),
    ],
)
def test_programs_and_buttons_receive_json_errors(
    gateway: ServedGateway, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = gateway.http.request(method, path, headers=headers)
    assert answer.status_code in (404, 405) and answer.json()["error"]["message"].startswith(
        f"{method} {path}"
    )


def test_json_response_without_error_is_unchanged(gateway: ServedGateway) -> None:
    gateway.client.missing = ["talker"]
    answer = gateway.http.get("/ready", headers=BROWSER)
    assert answer.status_code == 503 and answer.json()["missing"] == ["talker"]
    assert answer.headers["content-length"] == str(len(answer.content))


def test_error_page_has_no_token_and_is_not_sent_to_other_hosts(
    gateway: ServedGateway, loaded: Loaded
) -> None:
    with serving(loaded, api_key="secret") as locked:
        assert 'data-csrf=""' in error_page(
            locked.http.get("/static/nothing", headers=BROWSER), 404
        )
    foreign = gateway.http.get("/nothing", headers={**BROWSER, "host": "attacker.example"})
    assert foreign.status_code == 421 and foreign.json()["error"]["code"] == "host_not_allowed"
