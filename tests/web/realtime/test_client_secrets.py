"""Who may open a voice socket: the key, a short-lived one, or a page of ours."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.realtime import ClientSecretCreateResponse, RealtimeSessionCreateRequestParam
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

from tests.web.conftest import Gateway

INSTRUCTIONS = "Speak like a captain."
SESSION: RealtimeSessionCreateRequestParam = {
    "type": "realtime",
    "instructions": INSTRUCTIONS,
    "audio": {"output": {"voice": "marin"}},
}


def address(gateway: Gateway, query: str = "") -> str:
    return f"{gateway.url.replace('http', 'ws')}/v1/realtime{query}"


def protocols(key: str) -> list[Subprotocol]:
    return [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{key}")]


async def created(socket: ClientConnection) -> dict[str, Any]:
    event = json.loads(await socket.recv())
    assert event["type"] == "session.created"
    return event["session"]


async def refused(gateway: Gateway, query: str = "", **options: Any) -> int:
    with pytest.raises(InvalidStatus) as error:
        async with connect(address(gateway, query), **options):
            pass
    return error.value.response.status_code


async def test_a_secret_opens_the_session_it_was_made_for_from_any_page(serve_with: Callable[[str | None], Gateway]) -> None:
    gateway = serve_with("secret")
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="secret", max_retries=0) as client:
        secret = await client.realtime.client_secrets.create(
            session=SESSION,
            expires_after={"anchor": "created_at", "seconds": 60},  # pyright: ignore[reportArgumentType]
        )
    assert secret.value.startswith("ek_") and secret.session.type == "realtime"
    ClientSecretCreateResponse.model_validate(secret.model_dump())
    assert secret.session.id.startswith("sess_")
    elsewhere = Origin("https://shop.example")
    async with connect(address(gateway), subprotocols=protocols(secret.value), origin=elsewhere) as socket:
        assert socket.subprotocol == "realtime"
        session = await created(socket)
    assert session["instructions"] == INSTRUCTIONS and session["audio"]["output"]["voice"] == "marin"
    async with connect(address(gateway), additional_headers={"authorization": f"Bearer {secret.value}"}) as socket:
        assert socket.subprotocol is None and (await created(socket))["instructions"]
    gateway.client.secrets.clear()
    assert await refused(gateway, subprotocols=protocols(secret.value)) == 401


async def test_without_a_key_nobody_gets_in(serve_with: Callable[[str | None], Gateway]) -> None:
    gateway = serve_with("secret")
    assert await refused(gateway) == 403
    assert await refused(gateway, subprotocols=protocols("wrong")) == 403
    assert await refused(gateway, subprotocols=protocols("ek_made-up")) == 401
    async with connect(address(gateway), subprotocols=protocols("secret")) as socket:
        assert await created(socket)
    denied = gateway.http.post("/v1/realtime/client_secrets", json={})
    assert denied.status_code == 401


async def test_other_sites_and_other_models_are_refused(gateway: Gateway) -> None:
    assert await refused(gateway, origin=Origin("http://evil.example")) == 403
    assert await refused(gateway, "?model=gpt-9") == 404
    assert await refused(gateway, "?intent=transcription") == 400
    answer = gateway.http.post("/v1/realtime/client_secrets", json={"session": {"type": "realtime", "model": "gpt-9"}})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "session.model"
    async with connect(address(gateway, "?model=omni")) as socket:
        assert (await created(socket))["model"] == "omni"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"seconds": 1}}, "expires_after.seconds"),
        ({"session": {"type": "transcription"}}, "session.type"),
        ({"session": {"type": "realtime", "audio": {"output": {"voice": "nobody"}}}}, "session.audio.output.voice"),
        ({"session": {"type": "realtime", "tools": [{"type": "function"}]}}, "session.tools"),
        ({"session": {"type": "realtime", "audio": {"output": {"voice": 5}}}}, "session.audio.output.voice"),
        ({"session": {"type": "realtime", "instructions": "<|im_end|>"}}, "session.instructions"),
        ({"session": 5}, "session"),
    ],
)
def test_a_wrong_wish_is_named(gateway: Gateway, body: dict[str, object], param: str) -> None:
    answer = gateway.http.post("/v1/realtime/client_secrets", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_body_that_is_no_json(gateway: Gateway) -> None:
    assert gateway.http.post("/v1/realtime/client_secrets", content=b"{").status_code == 400
    assert gateway.http.post("/v1/realtime/client_secrets", content=b"x" * 300_000).status_code == 413
