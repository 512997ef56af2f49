"""Access of a client secret: only to its own sessions, one at a time, on several gateways over a
real Redis.
"""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256

import httpx
import pytest
import redis.asyncio
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from fleet.conductor.driver import Driver
from fleet.config.api_keys import ENVIRONMENT
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect as connect_to_redis
from fleet.control.connect import run_async
from fleet.core.ids import WorkerId
from tests.support import await_until
from tests.web.conftest import Loaded
from tests.web.realtime.socket_client import SocketClient, message
from web.app import create_app
from web.http.guard import LOGIN_PATH, OPEN_PATHS
from web.http.origins import CALLS_PATH
from web.realtime import session_records
from web.serve import Server, uvicorn_config

KEY = "the-api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpxGateway:
    url: str
    app: Starlette
    client: FleetClient
    http: httpx.AsyncClient
    redis: redis.asyncio.Redis

    async def secret(self) -> str:
        answer = await self.http.post(
            "/v1/realtime/client_secrets", json={"expires_after": {"seconds": 10}}
        )
        return answer.json()["value"]

    async def expire(self, secret: str) -> None:
        """Delete the client secret's key from Redis, as its time to live would."""
        assert secret.startswith("ek_")
        for name in [name async for name in self.redis.scan_iter(match=keys.secret("*"))]:
            await self.redis.delete(name)

    async def ids(self) -> set[str]:
        return {view["id"] for view in (await self.http.get("/v1/fleet/sessions")).json()["data"]}

    async def written(self, session: str) -> bool:
        """Return True once another gateway could continue the session."""
        return bool(await self.redis.hexists(keys.voice(session), "state"))


@asynccontextmanager
async def serving(loaded: Loaded, redis_url: str, **voice: object) -> AsyncIterator[HttpxGateway]:
    """Serve a gateway with the voice settings `voice`."""
    config = loaded.config.model_copy(
        update={"voice": loaded.config.voice.model_copy(update=voice)}
    )
    client = await FleetClient.connect(redis_url, config)
    app = create_app(config, client, loaded.frontend, KEY)
    await client.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = Server(uvicorn_config(app, config), app)
        serve = asyncio.create_task(server.serve([listener]))
        bearer = {"authorization": f"Bearer {KEY}"}
        async with (
            httpx.AsyncClient(base_url=url, headers=bearer) as http,
            redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as database,
        ):
            yield HttpxGateway(url=url, app=app, client=client, http=http, redis=database)
        server.stop()
        await serve
    await client.stop()


@pytest.fixture
async def first(loaded: Loaded, redis_url: str) -> AsyncIterator[HttpxGateway]:
    async with serving(loaded, redis_url) as gateway:
        yield gateway


second = first
"""A second gateway of the same fleet."""


@asynccontextmanager
async def opening(
    gateway: HttpxGateway, key: str, query: str = "", path: str = "/v1/realtime"
) -> AsyncIterator[SocketClient]:
    """Connect to a voice socket, and yield it with its first event, which may be a refusal."""
    headers = {"authorization": f"Bearer {key}"}
    async with connect(
        gateway.url.replace("http", "ws") + path + query, additional_headers=headers
    ) as socket:
        client = SocketClient(socket)
        await client.next()
        yield client


async def refused(
    gateway: HttpxGateway, key: str, query: str = "", path: str = "/v1/realtime"
) -> tuple[str, int | None, str]:
    """Connect and return the refusal: the error's code, the close code, and the error's message
    without the session's id.
    """
    async with opening(gateway, key, query, path) as client:
        assert client.kinds() == ["error"], f"admitted: {client.kinds()}"
        error, (code, _) = client.events[0]["error"], await client.closed()
        return error["code"], code, re.sub("sess_[0-9A-Za-z]+", "NAME", error["message"])


async def opens(gateway: HttpxGateway, key: str, query: str = "") -> str:
    """Open a session, end it, and return its id."""
    async with opening(gateway, key, query) as client:
        assert client.session, client.events
        await client.socket.close(1000)
        session = client.session
    await await_until(lambda: not_there(gateway, session), "the session to end")
    return session


async def not_there(gateway: HttpxGateway, session: str) -> bool:
    return not await gateway.redis.exists(keys.voice(session))


async def test_secret_does_not_continue_a_session_of_another_credential(
    first: HttpxGateway, second: HttpxGateway
) -> None:
    """A client secret cannot continue a session of another credential: on any gateway, the refusal
    equals the refusal for a session that never existed.
    """
    thief, victim = await first.secret(), await first.secret()
    async with opening(first, KEY) as by_key, opening(first, victim) as by_secret:
        for owned in (by_key, by_secret):
            await await_until(
                lambda name=owned.session: first.written(name), "the session to be written down"
            )
        for gateway in (first, second):
            unknown = await refused(gateway, thief, "?session=sess_never")
            assert unknown[:2] == ("not_found", 1008)
            assert await refused(gateway, thief, f"?session={by_key.session}") == unknown
            assert await refused(gateway, thief, f"?session={by_secret.session}") == unknown
            assert await refused(gateway, KEY, f"?session={by_secret.session}") == unknown
        for owned in (by_key, by_secret):
            await owned.send("input_audio_buffer.clear")
            await owned.until("input_audio_buffer.cleared")


async def test_operator_end_is_not_shown_to_another_credential(first: HttpxGateway) -> None:
    secret = await first.secret()
    async with opening(first, KEY) as client:
        assert (await first.http.delete(f"/v1/fleet/sessions/{client.session}")).status_code == 200
        assert (await client.closed())[0] == 1000
        assert (await refused(first, secret, f"?session={client.session}"))[:2] == (
            "not_found",
            1008,
        )
        assert (await refused(first, KEY, f"?session={client.session}"))[:2] == (
            "session_ended",
            1000,
        )


@pytest.fixture
def refused_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gateways refuse a second session at once, without waiting for the secret's former
    connection to end.
    """
    monkeypatch.setattr(session_records, "absence_tries", lambda _lease: 1)


@pytest.mark.usefixtures("refused_immediately")
async def test_secret_has_one_open_session_on_all_gateways_together(
    first: HttpxGateway, second: HttpxGateway
) -> None:
    secret, other = await first.secret(), await first.secret()
    async with opening(first, secret) as client:
        for gateway in (first, second):
            code, close, message = await refused(gateway, secret)
            assert (code, close) == (
                "secret_in_use",
                1013,
            ) and "voice.sessions_per_secret" in message
        async with opening(second, other), opening(second, KEY), opening(second, KEY) as third:
            assert third.session
        await client.socket.close(1000)
        await await_until(lambda: not_there(first, client.session), "the session to end")
    assert await opens(second, secret)


@pytest.mark.usefixtures("refused_immediately")
async def test_secret_bound_counts_queued_sessions(loaded: Loaded, redis_url: str) -> None:
    async with serving(loaded, redis_url, max_sessions=1) as gateway:
        secret = await gateway.secret()
        async with opening(gateway, KEY):
            async with opening(gateway, secret) as waiting:
                assert waiting.events[0]["error"]["code"] == "session_queued"
                assert (await refused(gateway, secret))[:2] == ("secret_in_use", 1013)
                waiting.socket.transport.abort()

            async def forgotten() -> bool:
                return not [
                    name async for name in gateway.redis.scan_iter(match=keys.voices_of("*/*"))
                ]

            await await_until(forgotten, "the place in line to be given up")
            async with opening(gateway, secret) as again:
                assert again.events[0]["error"]["code"] == "session_queued"


async def test_secrets_leave_places_for_the_api_key(loaded: Loaded, redis_url: str) -> None:
    """Client secrets leave places for the API key: a client with the API key enters before a secret
    that was queued earlier.
    """
    async with serving(loaded, redis_url, max_sessions=2, secret_share=0.5) as gateway:
        one, other = await gateway.secret(), await gateway.secret()
        async with (
            opening(gateway, one) as client,
            opening(gateway, other) as waiting,
            opening(gateway, KEY) as by_key,
        ):
            assert client.session and by_key.session
            assert waiting.events[0]["error"]["code"] == "session_queued"
            await client.socket.close(1000)
            await waiting.until("session.created")


async def test_reloaded_page_opens_another_session_with_its_secret(
    first: HttpxGateway, second: HttpxGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reloaded page opens another session with its secret, on any gateway; the lost session is
    replaced and cannot be resumed.
    """
    monkeypatch.setattr(session_records, "absence_tries", lambda _lease: 1000)
    secret, lost = await first.secret(), set[str]()
    for gateway in (first, first, second):
        async with opening(gateway, secret) as client:
            assert client.session
            assert not any([await first.redis.exists(keys.voice(name)) for name in lost])
            lost.add(client.session)
            await client.drop()
    async with opening(first, secret) as last:
        for name in lost:
            assert (await refused(second, secret, f"?session={name}"))[:2] == ("not_found", 1008)
        await await_until(lambda: only(first, last.session), "the replaced sessions to be gone")


@contextmanager
def conducting(loaded: Loaded, redis_url: str) -> Generator[None]:
    """Run a conductor, which fences gateways that stop renewing their lease."""
    with connect_to_redis(redis_url) as client:
        driver = Driver(loaded.config, client, WorkerId("conductor@test"))
        thread = threading.Thread(target=driver.run, daemon=True)
        thread.start()
        yield
        driver.stopping = True
        thread.join(timeout=10)
        assert not thread.is_alive()


async def test_secret_opens_another_session_after_the_lease_of_a_dead_gateway(
    loaded: Loaded, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret opens another session once the lease of a dead gateway has lapsed. The gateway was
    killed with open sessions, just after renewing its lease.
    """
    monkeypatch.setattr(session_records, "absence_tries", lambda _lease: 1000)
    async with (
        serving(loaded, redis_url) as gateway,
        redis.asyncio.Redis.from_url(redis_url) as database,
    ):
        secret = await gateway.secret()
        dead, owner = (
            WorkerId("dead-gateway"),
            f"{ENVIRONMENT}/{sha256(secret.encode()).hexdigest()}",
        )
        await run_async(
            database, scripts.hold_voice("sess_dead", dead, 60_000, owner, new=True, bound=1)
        )
        seconds, micros = await database.time()
        lease_us = int(loaded.config.lease.worker_ttl_s * 1e6)
        await database.hset(keys.worker(dead), "lease_us", lease_us)
        await database.zadd(keys.WORKERS, {dead: seconds * 1_000_000 + micros + lease_us})
        with conducting(loaded, redis_url):
            assert await opens(gateway, secret)
        assert await not_there(gateway, "sess_dead")


async def test_session_that_returns_before_the_next_write_is_continued(
    first: HttpxGateway, second: HttpxGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that returns to its first gateway before the next write is continued, with the
    items added at the other gateway meanwhile.
    """
    monkeypatch.setattr(session_records, "RENEW_S", 60.0)
    secret = await first.secret()
    async with opening(first, secret) as client:
        query = f"?session={client.session}"

        async def is_away() -> bool:
            return await first.redis.hexists(
                keys.voice(client.session), "away_us"
            ) and await first.written(client.session)

        await client.drop()
    await await_until(is_away, "the lost connection to be written down")
    async with opening(second, secret, query) as client:
        await client.send("conversation.item.create", item=message("hi", id="item_second"))
        await client.until("conversation.item.added")
        await client.drop()
    await await_until(is_away, "the lost connection to be written down")
    async with opening(first, secret, query) as client:
        assert client.session, client.events
        assert await client.retrieve("item_second") and "error" not in client.kinds()


async def only(gateway: HttpxGateway, session: str) -> bool:
    return await gateway.ids() == {session}


async def test_session_of_an_expired_secret_can_be_continued(
    first: HttpxGateway, second: HttpxGateway
) -> None:
    """A session of an expired secret can be continued: only opening a session needs a valid secret,
    so that a broken connection is not fatal.
    """
    secret = await first.secret()
    async with opening(first, secret) as client:
        await await_until(lambda: first.written(client.session), "the session to be written down")
        await first.expire(secret)
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.drop()
    for gateway in (first, second):
        async with opening(gateway, secret, f"?session={client.session}") as again:
            assert again.session == client.session
            await again.drop()
    unknown = await refused(first, secret, "?session=sess_never")
    assert unknown[:2] == ("invalid_api_key", 3000)
    assert await refused(first, "ek_made-up", f"?session={client.session}") == unknown
    assert await refused(first, "ek_made-up", f"?session={client.session}&model=gpt-9") == unknown
    assert (await refused(first, secret))[:2] == ("invalid_api_key", 3000)


async def test_session_age_continues_at_another_gateway(
    first: HttpxGateway, second: HttpxGateway
) -> None:
    async with opening(first, KEY) as client:
        await await_until(lambda: first.written(client.session), "the session to be written down")
        await first.redis.hincrby(keys.voice(client.session), "started_us", -3600 * 1_000_000)
        await client.drop()
    async with opening(second, KEY, f"?session={client.session}") as again:
        error = await again.error()
        assert error["code"] == "session_expired"
        assert error["message"].startswith("Your session hit the maximum duration of 60 minutes.")
        code, reason = await again.closed()
    assert code == 1001 and reason.startswith("invalid_request_error.session_expired: ")
    await await_until(lambda: not_there(second, client.session), "the session to end")


async def test_idle_session_ends_with_its_reason(
    loaded: Loaded, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_records, "RENEW_S", 0.01)
    async with serving(loaded, redis_url, idle_s=0.1) as gateway, opening(gateway, KEY) as client:
        error = await client.error()
        assert error["code"] == "session_idle" and "voice.idle_s" in error["message"]
        code, reason = await client.closed()
        assert code == 1000 and reason.startswith("invalid_request_error.session_idle: ")


def addresses(app: Starlette) -> set[tuple[str, str]]:
    """Return method and path of every route that requires a key, with sample values for path
    parameters.
    """

    def of(route: BaseRoute) -> list[tuple[str, str]]:
        if isinstance(route, WebSocketRoute):
            return [("WS", route.path)]
        assert isinstance(route, Route) or hasattr(route, "path"), route
        methods = getattr(route, "methods", None) or {"GET", "POST", "DELETE"}
        return [(method, getattr(route, "path", "")) for method in methods if method != "HEAD"]

    found = {pair for route in app.routes for pair in of(route)}
    named = {
        (method, "/".join("any" if part.startswith("{") else part for part in path.split("/")))
        for method, path in found
    }
    return {
        (method, path) for method, path in named if not path.startswith((*OPEN_PATHS, "/static"))
    }


async def test_secret_reaches_no_address_but_the_voice_socket_and_new_calls(
    first: HttpxGateway,
) -> None:
    secret = await first.secret()
    headers = {"authorization": f"Bearer {secret}"}
    tried = addresses(first.app) - {("POST", CALLS_PATH)}
    assert {
        ("POST", f"{CALLS_PATH}/any/hangup"),
        ("DELETE", "/v1/fleet/sessions/any"),
        ("GET", "/v1/fleet/requests/any"),
        ("WS", "/console/ws"),
    } <= tried
    sockets = {path for method, path in tried if method == "WS"} - {"/v1/realtime"}
    for path in sockets:
        assert (await refused(first, secret, path=path))[:2] == ("invalid_api_key", 3000), path

    async def check(method: str, path: str) -> None:
        answer = await first.http.request(method, path, headers=headers)
        login = answer.status_code == 303 and answer.headers["location"].startswith(LOGIN_PATH)
        assert answer.status_code in (401, 429) or login, f"{method} {path}: {answer.status_code}"

    await asyncio.gather(*(check(method, path) for method, path in tried if method != "WS"))


async def test_list_names_the_secret_that_opened_a_session(first: HttpxGateway) -> None:
    secret = await first.secret()
    async with opening(first, secret) as one, opening(first, KEY) as other:

        async def listed() -> dict[str, str | None]:
            views = (await first.http.get("/v1/fleet/sessions")).json()["data"]
            return {view["id"]: view["client_secret"] for view in views} if len(views) == 2 else {}

        opened_by = await await_until(listed, "both sessions to be listed")
        shown = opened_by[one.session]
        assert (
            shown is not None
            and len(shown) == 8
            and shown not in secret
            and opened_by[other.session] is None
        )


async def test_new_connection_closes_the_lost_one(first: HttpxGateway) -> None:
    """A new connection closes the lost one: the owner resumes the session while the former
    connection is still open.
    """
    secret = await first.secret()
    async with (
        opening(first, secret) as before,
        opening(first, secret, f"?session={before.session}") as after,
    ):
        assert after.session == before.session
        with pytest.raises(ConnectionClosed):
            while True:
                await before.next()
        assert before.socket.close_code == 1008
