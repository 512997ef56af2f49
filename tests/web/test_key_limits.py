"""Limits of API keys at two real gateways over one Redis: requests, voice sessions and audio are
counted together, and a refusal names its limit.
"""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from fleet.config.api_keys import ApiKey, KeyLimits, KeysFile, digest_of, encode_keys_file
from fleet.config.schema import FleetConfig
from tests.harness import ThreadFleet, gateway_at, ready, thread_fleet
from tests.noises import wav
from tests.support import await_until
from tests.web.conftest import ASK, Loaded, bearer, bounded
from web.app import create_app
from web.serve import Server, uvicorn_config

CHAT, REALTIME = "/v1/chat/completions", "/v1/realtime"
PHONE, PAGE = "key-of-the-phone", "key-of-the-page"
LIMITS = KeyLimits(max_requests=2, max_sessions=2, audio_s_per_day=2)
LONG = {**ASK, "max_tokens": 500, "stream": True}
SHORT = {**ASK, "max_tokens": 3}


@pytest.fixture
def workers(redis_url: str) -> Iterator[ThreadFleet]:
    """A fleet whose answers of 500 tokens take half a minute."""
    with thread_fleet(
        redis_url, "stages.thinker.extra={step_ms: 60}", "stages.thinker.max_batch=16"
    ) as fleet:
        yield fleet


@asynccontextmanager
async def served(config: FleetConfig, loaded: Loaded, redis_url: str) -> AsyncIterator[str]:
    """Serve a gateway of the fleet; yield its URL."""
    async with gateway_at(redis_url, config) as client:
        await ready(client)
        await client.open_connections()
        app = create_app(config, client, loaded.frontend, None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Server(uvicorn_config(app, config), app)
            serving = asyncio.create_task(server.serve([listener]))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.stop()
            await serving


@pytest.fixture
async def gateways(
    loaded: Loaded, redis_url: str, workers: ThreadFleet, tmp_path: Path
) -> AsyncIterator[list[str]]:
    """URLs of two gateways with two keys of equal limits."""
    assert workers.loops
    path = tmp_path / "keys.json"
    keys = {
        name: ApiKey(sha256=digest_of(key.encode()), scopes=("talk",), limits=LIMITS)
        for name, key in (("phone", PHONE), ("page", PAGE))
    }
    path.write_text(encode_keys_file(KeysFile(keys=keys)))
    path.chmod(0o600)
    config = bounded(loaded, keys_file=path).config
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(served(config, loaded, redis_url)) for _ in range(2)]


@asynccontextmanager
async def client_of(key: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(headers=bearer(key), timeout=60) as http:
        yield http


async def status(http: httpx.AsyncClient, url: str, body: dict[str, Any] = SHORT) -> int:
    return (await http.post(url + CHAT, json=body)).status_code


def becomes(wanted: int, ask: Callable[[], Awaitable[int]]) -> Callable[[], Awaitable[bool]]:
    async def is_answered() -> bool:
        return await ask() == wanted

    return is_answered


async def test_requests_of_a_key_are_counted_over_all_gateways(gateways: list[str]) -> None:
    first, second = gateways
    async with client_of(PHONE) as phone, client_of(PAGE) as page, AsyncExitStack() as running:
        one = await phone.send(phone.build_request("POST", first + CHAT, json=LONG), stream=True)
        two = await phone.send(phone.build_request("POST", second + CHAT, json=LONG), stream=True)
        running.push_async_callback(two.aclose)
        assert one.status_code == two.status_code == 200
        for url in gateways:
            refused = await phone.post(url + CHAT, json=SHORT)
            error = refused.json()["error"]
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert (error["code"], error["param"]) == ("rate_limit_exceeded", "max_requests")
            assert "'phone'" in error["message"] and PHONE not in refused.text
            assert await status(page, url) == 200, "another key has its own limit"
        await one.aclose()
        await await_until(
            becomes(200, lambda: status(phone, second)), "the request that was left to be released"
        )


def sound(seconds: float) -> dict[str, Any]:
    samples = (np.sin(np.arange(int(seconds * 16_000)) / 10) / 2).astype(np.float32)
    data = base64.b64encode(wav(samples, 16_000)).decode()
    content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    return {**SHORT, "messages": [{"role": "user", "content": content}]}


async def test_audio_of_a_key_is_counted_over_all_gateways(gateways: list[str]) -> None:
    first, second = gateways
    async with client_of(PHONE) as phone, client_of(PAGE) as page:
        assert await status(phone, first, sound(1.5)) == await status(phone, second) == 200
        assert await status(phone, second, sound(1.5)) == 200, "1.5 s of 2 s are used"
        await await_until(
            becomes(429, lambda: status(phone, first)), "the second request's audio to be counted"
        )
        refused = await phone.post(second + CHAT, json=sound(1.0))
        assert refused.json()["error"]["param"] == "audio_s_per_day"
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        assert await status(page, first, sound(1.5)) == 200


async def opened(stack: AsyncExitStack, url: str, key: str) -> ClientConnection:
    """Open a voice socket, which is closed with the stack."""
    address = url.replace("http", "ws") + REALTIME
    return await stack.enter_async_context(connect(address, additional_headers=bearer(key)))


async def first_event(socket: ClientConnection) -> dict[str, Any]:
    return json.loads(await asyncio.wait_for(socket.recv(), 30))


async def test_sessions_of_a_key_and_its_secrets_are_counted_over_all_gateways(
    gateways: list[str],
) -> None:
    first, second = gateways
    async with client_of(PHONE) as phone, AsyncExitStack() as stack:
        created = await phone.post(f"{first}/v1/realtime/client_secrets", json={})
        secret = created.json()["value"]
        by_key = await opened(stack, first, PHONE)
        by_secret = await opened(stack, second, secret)
        for socket in (by_key, by_secret):
            assert (await first_event(socket))["type"] == "session.created"
        for url in gateways:
            refused = await opened(stack, url, PHONE)
            error = (await first_event(refused))["error"]
            assert (error["code"], error["param"]) == ("rate_limit_exceeded", "max_sessions")
            with pytest.raises(ConnectionClosed):
                await refused.recv()
            assert refused.close_code == 1013
        page = await opened(stack, first, PAGE)
        assert (await first_event(page))["type"] == "session.created"
        await by_secret.close(1000)

        async def opens_again() -> bool:
            async with AsyncExitStack() as tries:
                socket = await opened(tries, first, PHONE)
                return (await first_event(socket))["type"] == "session.created"

        await await_until(opens_again, "the place of the ended session to be free")
