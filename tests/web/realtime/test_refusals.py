"""When a WebSocket is refused, its client and the log receive the reason, and no session opens."""

import asyncio
import base64
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError
from websockets.typing import Origin, Subprotocol

from fleet.core.errors import BadInput, FleetError, RedisUnreachable
from tests.web.conftest import ServedGateway, bearer
from tests.web.realtime.refused_socket import refusal_of
from tests.web.realtime.socket_client import opened
from web.http.errors import Unauthorized
from web.http.protocol.abuse import PERIOD_S, TimedAbuseLog
from web.realtime.transport.refusal import (
    MAX_REASON_BYTES,
    clipped_reason,
    close_code,
    close_reason,
    log_refusal,
)

KEY = "the-right-key"
WRONG_KEY = "a-wrong-key"
EVIL = "http://evil.example"


@pytest.fixture
def locked(serve_with: Callable[[str | None], ServedGateway]) -> ServedGateway:
    return serve_with(KEY)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "refused the WebSocket" in record.getMessage()
    ]


@pytest.mark.parametrize("key", [None, WRONG_KEY, "ek_expired"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/realtime",
        "/v1/realtime?model=gpt-9",
        "/v1/realtime?intent=transcription",
        "/console/ws",
    ],
)
async def test_socket_without_the_right_key_is_refused_first(
    locked: ServedGateway, key: str | None, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket without the right key is refused before anything else is checked: its client learns
    nothing of the model, and no key is logged.
    """
    with caplog.at_level(logging.WARNING):
        refusal = await refusal_of(locked, path, additional_headers=bearer(key) if key else {})
    assert refusal.close_code == 3000 and refusal.close_reason.startswith(
        "invalid_request_error.invalid_api_key: "
    )
    error = refusal.error
    assert (error["type"], error["code"], error["event_id"]) == (
        "invalid_request_error",
        "invalid_api_key",
        None,
    )
    assert "omni" not in str(error)
    (line,) = logged(caplog)
    assert "127.0.0.1:" in line and "invalid_api_key" in line
    assert WRONG_KEY not in line and "ek_" not in line and KEY not in line
    assert not locked.client.voice.held


@pytest.mark.parametrize("path", ["/v1/realtime", "/console/ws"])
async def test_sockets_without_a_key_are_logged_once_an_address_and_minute(
    locked: ServedGateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert (await refusal_of(locked, path)).error["code"] == "invalid_api_key"
    assert len(logged(caplog)) == 1


def test_refusal_log_counts_further_refusals_by_address_and_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s, due = 0.0, list[Callable[[], None]]()
    lines = TimedAbuseLog(lambda: now_s, lambda _delay_s, call: due.append(call))

    def refuse(address: str, error: FleetError, number: int) -> None:
        for _ in range(number):
            log_refusal(
                lines, {"type": "websocket", "path": "/v1/realtime", "client": (address, 1)}, error
            )

    with caplog.at_level(logging.WARNING):
        refuse("10.0.0.1", Unauthorized("no key"), 300)
        refuse("10.0.0.1", BadInput("wrong query"), 1)
        refuse("10.0.0.2", Unauthorized("no key"), 1)
        now_s += PERIOD_S
        due.pop(0)()
        now_s += PERIOD_S
        due.pop(0)()
    assert not due, "without refusals there is nothing to count"
    starts = [line.partition(":")[0] for line in (record.getMessage() for record in caplog.records)]
    assert starts == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert "299 times" in caplog.messages[-1] and "invalid_api_key" in caplog.messages[-1]


async def test_openai_client_shows_why_its_key_is_refused(locked: ServedGateway) -> None:
    async with AsyncOpenAI(base_url=f"{locked.url}/v1", api_key=WRONG_KEY, max_retries=0) as client:
        async with client.realtime.connect(model="omni") as connection:
            event = await connection.recv()
            assert event.type == "error" and event.error.code == "invalid_api_key"
            assert "API key is missing or wrong" in event.error.message
            with pytest.raises(
                ConnectionClosedError, match=r"3000 .*invalid_request_error\.invalid_api_key"
            ):
                await connection.recv()


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("?model=gpt-9", "model_not_found", "model"),
        ("?intent=dictation&model=omni", "unsupported_value", "intent"),
        ("?samples=-1", "invalid_value", "samples"),
    ],
)
async def test_wrong_query_is_refused_by_name(
    gateway: ServedGateway, query: str, code: str, param: str
) -> None:
    refusal = await refusal_of(gateway, f"/v1/realtime{query}")
    assert refusal.close_code == 4000 and refusal.close_reason.startswith(
        f"invalid_request_error.{code}: {param}: "
    )
    assert (refusal.error["code"], refusal.error["param"]) == (code, param)


@pytest.mark.parametrize(
    "query", ["", "?model=", "?model=omni", "?intent=", "?intent=conversation"]
)
async def test_default_query_opens_a_session_with_the_beta_header_too(
    gateway: ServedGateway, query: str
) -> None:
    """A default query opens a session even with the header of the beta dialect, which many clients
    still send; fields of the dialect are refused by name.
    """
    address = f"{gateway.url.replace('http', 'ws')}/v1/realtime{query}"
    async with connect(address, additional_headers={"OpenAI-Beta": "realtime=v1"}) as client:
        assert json.loads(await client.recv())["type"] == "session.created"


@pytest.mark.parametrize(
    "path", ["/realtime", "/v1/realtime/", "/v1/realtime/calls", "/v1/responses"]
)
async def test_socket_at_an_unknown_path_names_the_right_one(
    gateway: ServedGateway, path: str
) -> None:
    refusal = await refusal_of(gateway, path)
    assert refusal.close_code == 4000 and refusal.error["code"] == "unknown_url"
    assert "/v1/realtime" in refusal.error["message"]


@pytest.mark.parametrize("path", ["/v1/realtime", "/console/ws"])
@pytest.mark.parametrize("offered", [None, [Subprotocol("realtime")]])
async def test_socket_of_another_site_is_refused_in_its_subprotocol(
    gateway: ServedGateway, path: str, offered: list[Subprotocol] | None
) -> None:
    """A socket of another site is refused with its offered subprotocol accepted: otherwise the
    browser would show the page neither the event nor the reason.
    """
    refusal = await refusal_of(gateway, path, origin=Origin(EVIL), subprotocols=offered)
    assert refusal.close_code == 3000 and refusal.error["code"] == "cross_site_request"
    assert refusal.subprotocol == ("realtime" if offered else None)


async def test_events_of_a_refused_socket_are_not_read(gateway: ServedGateway) -> None:
    """Frames sent right after the handshake open no session and are not read."""
    held = set(gateway.client.voice.held)
    async with connect(
        f"{gateway.url.replace('http', 'ws')}/v1/realtime", origin=Origin(EVIL)
    ) as client:
        with suppress(ConnectionClosedError):
            for _ in range(5):
                await client.send(
                    json.dumps({"type": "response.create", "response": {"instructions": "hello"}})
                )
        await client.wait_closed()
        assert client.close_code == 3000
    assert set(gateway.client.voice.held) <= held and not gateway.client.submitted


async def test_refused_peer_that_ignores_the_close_does_not_block_others(
    serve_with: Callable[[str | None], ServedGateway], caplog: pytest.LogCaptureFixture
) -> None:
    """A refused peer that ignores the close does not block others: another client is served
    meanwhile.
    """
    gateway = serve_with(None)
    host, port = gateway.url.removeprefix("http://").split(":")
    nonce = base64.b64encode(os.urandom(16)).decode()
    request = (
        f"GET /v1/realtime HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {EVIL}\r\nUpgrade: "
        "websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {nonce}\r\n\r\n"
    )
    with caplog.at_level(logging.WARNING), socket.create_connection((host, int(port))) as silent:
        await asyncio.to_thread(silent.sendall, request.encode())
        assert await asyncio.to_thread(silent.recv, 1)
        async with opened(gateway, "/v1/realtime") as page:
            assert page.session
    assert len(logged(caplog)) == 1


async def test_secret_that_cannot_be_looked_up_may_be_tried_again(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_client: object, _name: str) -> bytes | None:
        raise RedisUnreachable("Redis does not answer")

    monkeypatch.setattr(type(gateway.client.voice), "secret", away)
    refusal = await refusal_of(gateway, additional_headers=bearer("ek_any"))
    assert refusal.close_code == 1013 and refusal.error["code"] == "redis_unreachable"


async def test_session_that_cannot_be_held_may_be_tried_again(
    serve_with: Callable[[str | None], ServedGateway],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = serve_with(None)

    async def away(*_args: object, **_fields: object) -> None:
        raise RedisUnreachable("Redis does not answer")

    monkeypatch.setattr(type(gateway.client.voice), "hold", away)
    with caplog.at_level(logging.WARNING):
        refusal = await refusal_of(gateway)
    assert refusal.close_code == 1013 and refusal.close_reason.startswith(
        "server_error.redis_unreachable: "
    )
    assert "redis_unreachable" in logged(caplog)[0]


@pytest.mark.parametrize("message", ["x" * 200, "é" * 200, "日本" * 60, "a" + "🙂" * 60])
def test_close_reason_fits_its_frame_and_is_text(message: str) -> None:
    reason = clipped_reason(close_reason(BadInput(message)))
    assert MAX_REASON_BYTES - 4 < len(reason.encode()) <= MAX_REASON_BYTES
    assert close_reason(BadInput(message)).startswith(reason)


def test_server_failure_closes_with_an_internal_error() -> None:
    assert close_code(FleetError("it broke")) == 1011
