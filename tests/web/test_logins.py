"""Console logins: random tokens, logout, other keys, unreachable Redis."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from fleet.config.api_keys import ENVIRONMENT
from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable
from tests.support import await_until
from tests.web.conftest import Loaded, ServedGateway, bounded, serving
from tests.web.console.busy_gateway import fill
from tests.web.fake_stores import FakeLogins
from tests.web.realtime.refused_socket import refusal_of
from web.http.guard import COOKIE, CSRF_HEADER, SECURE_COOKIE
from web.http.key_ring import KeyRing
from web.http.logins import CACHE_S, KEEP_S, MAX_CACHED, RENEW_S, Logins

KEY = "a-right-key"
BROWSER = {"accept": "text/html"}
FLEET = "/v1/fleet/workers"


@pytest.fixture(scope="module")
def locked(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(bounded(loaded, trusted_proxies=("127.0.0.1",)), KEY) as gateway:
        fill(gateway)
        yield gateway


@pytest.fixture
def gateway(locked: ServedGateway) -> Iterator[ServedGateway]:
    """A gateway with an API key; after the test its control plane is reachable again."""
    yield locked
    locked.client.unreachable = None
    locked.client.telemetry.orders.clear()


def log_in(gateway: ServedGateway, key: str = KEY, cookie: str = "") -> str:
    """Log in to the console; return the value of the login cookie."""
    headers = {"cookie": f"{COOKIE}={cookie}"} if cookie else {}
    with httpx.Client(base_url=gateway.url, headers=headers) as client:
        answer = client.post("/console/login", data={"key": key})
        assert answer.status_code == 303
        return str(client.cookies[COOKIE])


def get(gateway: ServedGateway, path: str, cookie: str, **headers: str) -> httpx.Response:
    return httpx.get(gateway.url + path, headers={"cookie": f"{COOKIE}={cookie}", **headers})


def csrf_of(gateway: ServedGateway, cookie: str) -> str:
    found = re.search(r'data-csrf="([^"]*)"', get(gateway, "/now", cookie).text)
    assert found is not None
    return found.group(1)


def log_out(gateway: ServedGateway, cookie: str) -> httpx.Response:
    return httpx.post(
        f"{gateway.url}/console/logout", headers={"cookie": f"{COOKIE}={cookie}", **BROWSER}
    )


def test_each_login_has_new_cookie_until_logout(gateway: ServedGateway) -> None:
    first, second = log_in(gateway), log_in(gateway)
    assert first != second and len(first) >= 43
    assert get(gateway, FLEET, first).status_code == get(gateway, FLEET, second).status_code == 200
    assert log_out(gateway, first).headers["location"] == "/console/login"
    assert get(gateway, FLEET, first).status_code == 401
    assert get(gateway, FLEET, second).status_code == 200, "the other login stays"


@pytest.mark.parametrize("path", ["/console/live/now", "/console/events", "/console/live/logs"])
def test_page_stream_ends_with_login(
    gateway: ServedGateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.http.sse.PING_S", 0.05)
    login, other = log_in(gateway), log_in(gateway)
    with httpx.stream("GET", gateway.url + path, headers={"cookie": f"{COOKIE}={login}"}) as stream:
        pieces = stream.iter_raw()
        assert stream.status_code == 200 and next(pieces)
        log_out(gateway, other)
        assert next(pieces) and next(pieces), "another login is another's"
        gateway.client.unreachable = RedisUnreachable("Redis does not answer")
        assert next(pieces), "an open page shows that Redis is away"
        gateway.client.unreachable = None
        log_out(gateway, login)
        assert b"".join(pieces) is not None


def test_cookie_made_from_the_key_is_refused(gateway: ServedGateway) -> None:
    for purpose in (b"fleet console", b"fleet csrf"):
        made = hmac.new(KEY.encode(), purpose, hashlib.sha256).hexdigest()
        assert get(gateway, FLEET, made).status_code == 401


def test_control_plane_never_holds_a_cookie(gateway: ServedGateway) -> None:
    cookie = log_in(gateway)
    kept = gateway.client.logins.ends
    assert kept and cookie not in kept


def test_login_replaces_previous_login_and_ignores_sent_cookie(gateway: ServedGateway) -> None:
    planted = "x" * 43
    assert (
        log_in(gateway, cookie=planted) != planted
        and get(gateway, FLEET, planted).status_code == 401
    )
    former = log_in(gateway)
    log_in(gateway, cookie=former)
    assert get(gateway, FLEET, former).status_code == 401


def test_login_is_valid_at_gateways_with_same_key_only(
    gateway: ServedGateway, loaded: Loaded
) -> None:
    cookie = log_in(gateway)
    with ExitStack() as gateways:
        second = gateways.enter_context(serving(loaded, KEY, gateway.client))
        other_key = gateways.enter_context(serving(loaded, "another-key", gateway.client))
        assert get(second, FLEET, cookie).status_code == 200
        assert get(other_key, FLEET, cookie).status_code == 401
        log_out(second, cookie)
        assert get(second, FLEET, cookie).status_code == 401


def test_csrf_token_of_another_login_is_refused(gateway: ServedGateway) -> None:
    first, second = log_in(gateway), log_in(gateway)
    order = f"/v1/fleet/workers/{gateway.client.telemetry.worker_list[0].id}/drain"
    for token, status in (
        (csrf_of(gateway, second), 403),
        ("", 403),
        (first, 403),
        (csrf_of(gateway, first), 200),
    ):
        headers = {"cookie": f"{COOKIE}={first}", CSRF_HEADER: token, "origin": gateway.url}
        assert httpx.post(gateway.url + order, headers=headers).status_code == status
    assert len(gateway.client.telemetry.orders) == 1


def test_page_without_redis_is_refused_and_not_redirected_to_login(gateway: ServedGateway) -> None:
    cookie = log_in(gateway)
    gateway.client.unreachable = RedisUnreachable(
        "Redis does not answer (connecting to 10.1.2.3:6379)"
    )
    page = get(gateway, "/now", cookie, **BROWSER)
    assert (
        page.status_code == 503 and "<title>" in page.text and "Redis does not answer" in page.text
    )
    program = get(gateway, FLEET, cookie)
    assert program.status_code == 503 and program.json()["error"]["code"] == "redis_unreachable"
    assert program.headers["retry-after"]
    form = httpx.post(f"{gateway.url}/console/login", data={"key": KEY}, headers=BROWSER)
    assert (
        form.status_code == 503
        and "Redis does not answer" in form.text
        and "set-cookie" not in form.headers
    )
    assert log_out(gateway, cookie).status_code == 503
    assert not any("10.1.2.3" in answer.text for answer in (page, program, form)), (
        "a stranger learns no address"
    )
    refusal = asyncio.run(
        refusal_of(gateway, "/console/ws", additional_headers={"cookie": f"{COOKIE}={cookie}"})
    )
    assert refusal.close_code == 1013
    bearer = httpx.get(f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
    assert bearer.status_code == 200, "the key itself needs no Redis"
    gateway.client.unreachable = None
    assert get(gateway, "/now", cookie, **BROWSER).status_code == 200


def test_cookie_is_host_only_and_http_only(gateway: ServedGateway) -> None:
    def flags_of(answer: httpx.Response) -> set[str]:
        return {flag.strip().lower() for flag in answer.headers["set-cookie"].split(";")[1:]}

    login = f"{gateway.url}/console/login"
    assert flags_of(httpx.post(login, data={"key": KEY})) == {
        "httponly",
        "samesite=strict",
        "path=/",
    }
    behind_https = {"x-forwarded-proto": "https"}
    answer = httpx.post(login, data={"key": KEY}, headers=behind_https)
    assert flags_of(answer) == {"httponly", "samesite=strict", "path=/", "secure"}
    name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
    assert name == SECURE_COOKIE and name.startswith("__Host-")
    for sent, status in ((SECURE_COOKIE, 200), (COOKIE, 401)):
        answer = httpx.get(
            gateway.url + FLEET, headers={"cookie": f"{sent}={value}", **behind_https}
        )
        assert answer.status_code == status, (
            "a page of plain http may have set a cookie without the prefix"
        )
    left = httpx.post(
        f"{gateway.url}/console/logout",
        headers={"cookie": f"{SECURE_COOKIE}={value}", **behind_https},
    )
    assert (
        left.headers["set-cookie"].startswith(f'{SECURE_COOKIE}=""')
        and "Secure" in left.headers["set-cookie"]
    )


def test_scheme_that_no_trusted_proxy_forwards_is_ignored(loaded: Loaded) -> None:
    with serving(loaded, KEY) as gateway:
        answer = httpx.post(
            f"{gateway.url}/console/login",
            data={"key": KEY},
            headers={"x-forwarded-proto": "https"},
        )
    assert "secure" not in answer.headers["set-cookie"].lower()


def test_login_form_is_bounded(gateway: ServedGateway) -> None:
    answer = httpx.post(f"{gateway.url}/console/login", data={"key": "x" * 1_000_000})
    assert answer.status_code == 413


def test_gateway_without_key_needs_no_login(loaded: Loaded) -> None:
    with serving(loaded) as keyless:
        assert keyless.http.get("/console/login").headers["location"] == "/"
        page = keyless.http.get("/now")
        assert (
            page.status_code == 200
            and "Log out" not in page.text
            and not keyless.client.logins.ends
        )


class LoginClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_valid_login_is_cached_until_logout() -> None:
    store, clock = FakeLogins(), LoginClock()
    here, there = Logins(store, KeyRing(KEY), clock), Logins(store, KeyRing(KEY), clock)
    token = await here.begin(ENVIRONMENT)
    assert await there.caller_of(token) and await there.caller_of(token) and store.num_asked == 1
    await here.end(token)
    assert not await here.caller_of(token)
    clock.now += CACHE_S
    assert CACHE_S <= 5 and not await there.caller_of(token)


async def test_lookup_concurrent_with_logout_is_not_cached() -> None:
    store = FakeLogins()
    logins = Logins(store, KeyRing(KEY))
    token = await logins.begin(ENVIRONMENT)
    store.gate = asyncio.Event()
    asking = asyncio.create_task(logins.caller_of(token))
    await await_until(lambda: _is(store.num_asked), "the lookup to be under way")
    await logins.end(token)
    store.gate.set()
    await asking
    assert not await logins.caller_of(token)


async def test_login_cache_is_bounded() -> None:
    store = FakeLogins()
    logins = Logins(store, KeyRing(KEY))
    tokens = [await logins.begin(ENVIRONMENT) for _ in range(MAX_CACHED + 1)]
    for token in [*tokens, tokens[0]]:
        assert await logins.caller_of(token)
    assert store.num_asked == MAX_CACHED + 2
    assert await logins.caller_of(tokens[-1]) and store.num_asked == MAX_CACHED + 2


async def test_login_in_use_is_renewed_at_most_once_an_hour_and_an_expired_one_ends() -> None:
    store, clock = FakeLogins(), LoginClock()
    logins = Logins(store, KeyRing(KEY), clock)
    token = await logins.begin(ENVIRONMENT)
    (name,) = store.ends
    assert abs(store.ends[name] - now_us() - KEEP_S * 1_000_000) < 60_000_000
    assert await logins.caller_of(token) and not store.num_renewed
    store.ends[name] -= (RENEW_S + 1) * 1_000_000
    clock.now += CACHE_S
    assert await logins.caller_of(token) and store.num_renewed == 1
    clock.now += CACHE_S
    assert await logins.caller_of(token) and store.num_renewed == 1
    store.ends[name] = now_us() - 1
    clock.now += CACHE_S
    assert not await logins.caller_of(token)


async def _is(value: object) -> bool:
    return bool(value)


@pytest.mark.parametrize("token", ["", "x", "é", "x" * 100_000])
async def test_invalid_token_is_refused(token: str) -> None:
    assert not await Logins(FakeLogins(), KeyRing(KEY)).caller_of(token)
