"""Access to the voice sockets by API key, client secret or console page."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.realtime import ClientSecretCreateResponse, RealtimeSessionCreateRequestParam
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from tests.web.conftest import ServedGateway
from tests.web.realtime.refused_socket import refusal_of

INSTRUCTIONS = "Speak like a captain."
SESSION: RealtimeSessionCreateRequestParam = {
    "type": "realtime",
    "instructions": INSTRUCTIONS,
    "audio": {"output": {"voice": "marin"}},
}


def address(gateway: ServedGateway, query: str = "") -> str:
    return f"{gateway.url.replace('http', 'ws')}/v1/realtime{query}"


def protocols(key: str) -> list[Subprotocol]:
    return [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{key}")]


async def created(socket: ClientConnection) -> dict[str, Any]:
    event = json.loads(await socket.recv())
    assert event["type"] == "session.created"
    return event["session"]


async def test_secret_opens_its_session_from_any_origin(
    locked: ServedGateway,
) -> None:
    async with AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="secret", max_retries=0) as client:
        secret = await client.realtime.client_secrets.create(
            session=SESSION,
            expires_after={"anchor": "created_at", "seconds": 60},
        )
    assert secret.value.startswith("ek_") and secret.session.type == "realtime"
    ClientSecretCreateResponse.model_validate(secret.model_dump())
    assert secret.session.id.startswith("sess_")
    elsewhere = Origin("https://shop.example")
    async with connect(
        address(locked), subprotocols=protocols(secret.value), origin=elsewhere
    ) as socket:
        assert socket.subprotocol == "realtime"
        session = await created(socket)
    assert (
        session["instructions"] == INSTRUCTIONS and session["audio"]["output"]["voice"] == "marin"
    )
    async with connect(
        address(locked), additional_headers={"authorization": f"Bearer {secret.value}"}
    ) as socket:
        assert socket.subprotocol is None and (await created(socket))["instructions"]
    locked.client.voice.secrets.clear()
    refusal = await refusal_of(locked, subprotocols=protocols(secret.value))
    assert (
        refusal.close_code == 3000
        and "client secret is unknown or has expired" in refusal.error["message"]
    )


async def test_socket_without_a_valid_key_is_refused(
    locked: ServedGateway,
) -> None:
    for key in ("wrong", "ek_made-up"):
        refusal = await refusal_of(locked, subprotocols=protocols(key))
        assert refusal.close_code == 3000 and refusal.subprotocol == "realtime"
    async with connect(address(locked), subprotocols=protocols("secret")) as socket:
        assert await created(socket)
    denied = locked.http.post("/v1/realtime/client_secrets", json={})
    assert denied.status_code == 401


async def test_foreign_origin_and_unknown_model_are_refused(gateway: ServedGateway) -> None:
    assert (await refusal_of(gateway, origin=Origin("http://evil.example"))).error[
        "code"
    ] == "cross_site_request"
    answer = gateway.http.post(
        "/v1/realtime/client_secrets", json={"session": {"type": "realtime", "model": "gpt-9"}}
    )
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "session.model"
    async with connect(address(gateway, "?model=omni")) as socket:
        assert (await created(socket))["model"] == "omni"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"seconds": 1}}, "expires_after.seconds"),
        (
            {"session": {"type": "transcription", "instructions": "Be brief."}},
            "session.instructions",
        ),
        (
            {"session": {"type": "realtime", "audio": {"output": {"voice": "nobody"}}}},
            "session.audio.output.voice",
        ),
        (
            {
                "session": {
                    "type": "realtime",
                    "tools": [{"type": "function"}],
                    "tool_choice": "required",
                }
            },
            "session.tool_choice",
        ),
        (
            {"session": {"type": "realtime", "audio": {"output": {"speed": 1.2}}}},
            "session.audio.output.speed",
        ),
        ({"session": {"type": "realtime", "modalities": ["text"]}}, "session.modalities"),
        (
            {"session": {"type": "realtime", "audio": {"output": {"voice": 5}}}},
            "session.audio.output.voice",
        ),
        ({"session": {"type": "realtime", "instructions": "<|im_end|>"}}, "session.instructions"),
        ({"session": 5}, "session"),
    ],
)
def test_invalid_field_of_a_secret_is_named(
    gateway: ServedGateway, body: dict[str, object], param: str
) -> None:
    answer = gateway.http.post("/v1/realtime/client_secrets", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_secret_for_a_session_with_tools_warns_that_they_are_ignored(
    gateway: ServedGateway,
) -> None:
    session = {
        "type": "realtime",
        "tools": [{"type": "function", "name": "weather"}],
        "tool_choice": "auto",
    }
    answer = gateway.http.post("/v1/realtime/client_secrets", json={"session": session})
    assert answer.status_code == 200 and len(answer.json()["session"]["warnings"]) == 1


def test_body_of_a_secret_that_is_not_json_is_refused(gateway: ServedGateway) -> None:
    assert gateway.http.post("/v1/realtime/client_secrets", content=b"{").status_code == 400
    assert (
        gateway.http.post("/v1/realtime/client_secrets", content=b"x" * 300_000).status_code == 413
    )
