"""Scopes of API keys at a real gateway: every route with every set of scopes, logins, and what is
logged by the key's name.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest
from openai import OpenAI
from starlette.routing import Mount, Route, WebSocketRoute
from websockets.asyncio.client import connect

from fleet.batches.asking.batch_run import BatchRun
from fleet.batches.asking.gateway import LineGateway
from fleet.batches.store import BatchStore
from fleet.config.api_keys import (
    ACTING_FOR_HEADER,
    ENVIRONMENT,
    SCOPES,
    ApiKey,
    KeysFile,
    Scope,
    digest_of,
    encode_keys_file,
)
from tests.support import await_until
from tests.web.conftest import ASK, KEY, Loaded, ServedGateway, bearer, bounded, serving
from tests.web.console.busy_gateway import fill
from web.app import create_app
from web.http.guard import COOKIE, CSRF_HEADER
from web.http.scopes import SOCKET, TABLE
from web.openapi.operations import OPERATIONS

CHAT_PATH: Final = "/v1/chat/completions"
SETS: list[tuple[Scope, ...]] = [
    chosen for size in range(len(SCOPES) + 1) for chosen in combinations(SCOPES, size)
]


def name_of(scopes: Sequence[str]) -> str:
    return "-".join(scopes) or "none"


def key_of(scopes: Sequence[str]) -> str:
    return f"key of {name_of(scopes)}"


class KeyedGateway(NamedTuple):
    """A gateway with a key for each set of scopes, and its file of keys."""

    served: ServedGateway
    path: Path

    def write(self, keys: dict[str, ApiKey]) -> None:
        self.path.write_text(encode_keys_file(KeysFile(keys=keys)))

    def ask(self, method: str, path: str, key: str, **options: object) -> httpx.Response:
        with self.served.http.stream(
            method,
            path,
            headers=bearer(key),
            **options,  # pyright: ignore[reportArgumentType]
        ) as answer:
            if "event-stream" not in answer.headers.get("content-type", ""):
                answer.read()
            return answer


def entries() -> dict[str, ApiKey]:
    return {
        name_of(scopes): ApiKey(sha256=digest_of(key_of(scopes).encode()), scopes=scopes)
        for scopes in SETS
    }


@pytest.fixture(scope="module")
def module_gateway(
    loaded: Loaded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KeyedGateway]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(encode_keys_file(KeysFile(keys=entries())))
    path.chmod(0o600)
    with serving(bounded(loaded, keys_file=path), KEY) as served:
        yield KeyedGateway(served, path)


@pytest.fixture
def gateway(module_gateway: KeyedGateway) -> KeyedGateway:
    """The gateway of this file, with its keys and its fake control plane reset."""
    module_gateway.write(entries())
    module_gateway.served.client.reset()
    fill(module_gateway.served)
    return module_gateway


def test_table_has_a_row_for_each_route_and_no_other(loaded: Loaded) -> None:
    app = create_app(loaded.config, loaded.fake_client(), loaded.frontend, None)
    served = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    sockets = {
        (SOCKET, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, WebSocketRoute)
    }
    assert all(isinstance(route, Route | WebSocketRoute | Mount) for route in app.routes)
    assert set(TABLE) == served | sockets
    assert {(op.method, op.path) for op in OPERATIONS} <= served


HTTP_ROWS = [(method, path) for method, path in TABLE if method != SOCKET]


@pytest.mark.parametrize("scopes", SETS, ids=name_of)
def test_each_route_is_answered_as_its_row_says(
    gateway: KeyedGateway, scopes: tuple[Scope, ...]
) -> None:
    for method, path in HTTP_ROWS:
        required = TABLE[method, path]
        answer = gateway.ask(method, re.sub(r"{\w+}", "x", path), key_of(scopes))
        is_allowed = not required or not set(required).isdisjoint(scopes)
        what = f"{method} {path}: {answer.status_code}"
        if is_allowed:
            assert answer.status_code != 403 and (answer.status_code != 401 or not required), what
            continue
        assert answer.status_code == 403, what
        if "json" in answer.headers["content-type"]:
            error = answer.json()["error"]
            assert error["code"] == "missing_scope" and " or ".join(required) in error["message"]


def test_no_route_but_the_open_ones_is_answered_without_a_key(gateway: KeyedGateway) -> None:
    for method, path in HTTP_ROWS:
        answer = gateway.served.http.request(method, re.sub(r"{\w+}", "x", path))
        refused = answer.status_code == 401 or answer.headers.get("location") == "/console/login"
        assert refused or not TABLE[method, path], path


@pytest.mark.parametrize("scopes", SETS, ids=name_of)
@pytest.mark.parametrize("path", ["/v1/realtime", "/console/ws"])
async def test_voice_sockets_need_the_scope_talk(
    gateway: KeyedGateway, path: str, scopes: tuple[Scope, ...]
) -> None:
    kind, code = await first_event(gateway.served, path, key_of(scopes))
    wanted = ("error", "missing_scope") if "talk" not in scopes else ("session.created", "")
    assert (kind, code) == wanted


async def first_event(gateway: ServedGateway, path: str, key: str) -> tuple[str, str]:
    """Return the type of a voice socket's first event, and the code if that is an error."""
    address = gateway.url.replace("http", "ws") + path
    async with connect(address, additional_headers=bearer(key)) as socket:
        event = json.loads(await asyncio.wait_for(socket.recv(), 20))
        return event["type"], event.get("error", {}).get("code", "")


def test_key_of_the_environment_has_all_scopes(gateway: KeyedGateway) -> None:
    order = f"/v1/fleet/workers/{gateway.served.client.telemetry.worker_list[0].id}/drain"
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", order)):
        assert gateway.ask(method, path, KEY).status_code == 200


def test_changes_and_refusals_are_logged_by_name_and_never_by_key(
    gateway: KeyedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    order = f"/v1/fleet/workers/{gateway.served.client.telemetry.worker_list[0].id}/drain"
    with caplog.at_level(logging.INFO, "fleet.web"):
        for key in (key_of(("operate",)), KEY):
            assert gateway.ask("POST", order, key).status_code == 200
    changes = [line for line in caplog.messages if line.startswith("key ")]
    assert [line.split(":")[0] for line in changes] == ["key operate", f"key {ENVIRONMENT}"]
    assert all(f"POST {order!r}, from 127.0.0.1" in line for line in changes)
    assert not any(key_of(()) in line or KEY in line for line in caplog.messages)
    assert gateway.served.client.telemetry.ordered_by == ["operate", ENVIRONMENT], "in the journal"


def submit(gateway: KeyedGateway, key: str) -> str:
    answer = gateway.ask("POST", "/v1/chat/completions", key, json=ASK)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def test_key_takes_and_ends_its_own_answers_and_with_operate_those_of_others(
    gateway: KeyedGateway,
) -> None:
    mine, operator = key_of(("talk",)), key_of(("operate",))
    other, both = key_of(("talk", "watch")), key_of(("talk", "operate"))
    for method, path in (
        ("GET", "/v1/fleet/requests/{}/stream"),
        ("DELETE", "/v1/fleet/requests/{}"),
    ):
        request = submit(gateway, mine)
        unknown = gateway.ask(method, path.format("req-never"), other)
        refused = gateway.ask(method, path.format(request), other)
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace(request, "req-never") == unknown.text
        for key in (mine, operator, both):
            assert gateway.ask(method, path.format(request), key).status_code == 200, path
    detail = gateway.ask("GET", f"/v1/fleet/requests/{request}", key_of(("watch",)))
    assert detail.json()["key"] == "talk"


def test_removed_key_is_refused_at_once_and_its_session_goes_on(gateway: KeyedGateway) -> None:
    asyncio.run(_remove_during_session(gateway))


async def _remove_during_session(gateway: KeyedGateway) -> None:
    key, address = key_of(("talk",)), gateway.served.url.replace("http", "ws") + "/v1/realtime"
    async with httpx.AsyncClient(base_url=gateway.served.url, headers=bearer(key)) as http:
        secret = (await http.post("/v1/realtime/client_secrets", json={})).json()["value"]
        assert secret.startswith("ek_talk.")
        async with (
            connect(address, additional_headers=bearer(key)) as by_key,
            connect(address, additional_headers=bearer(secret)) as by_secret,
        ):
            for socket in (by_key, by_secret):
                assert "session.created" in str(await socket.recv())

            async def are_listed() -> bool:
                views = (await http.get("/v1/fleet/sessions", headers=bearer(KEY))).json()["data"]
                by = [(view["key"], bool(view["client_secret"])) for view in views if view["key"]]
                return sorted(by) == [("talk", False), ("talk", True)]

            await await_until(are_listed, "both sessions to be listed under their key")
            gateway.write({name: key for name, key in entries().items() if name != "talk"})
            assert (await http.get("/v1/models")).status_code == 401
            for credential in (key, secret):
                refused = await first_event(gateway.served, "/v1/realtime", credential)
                assert refused == ("error", "invalid_api_key")
            for socket in (by_key, by_secret):
                await socket.send('{"type": "input_audio_buffer.clear"}')
                assert "input_audio_buffer.cleared" in str(await socket.recv())


def test_secret_of_a_replaced_key_is_refused(gateway: KeyedGateway) -> None:
    created = gateway.ask("POST", "/v1/realtime/client_secrets", key_of(("talk",)), json={})
    secret = created.json()["value"]
    replaced = ApiKey(sha256=digest_of(b"another"), scopes=("talk",))
    gateway.write({**entries(), "talk": replaced})
    refused = asyncio.run(first_event(gateway.served, "/v1/realtime", secret))
    assert refused == ("error", "invalid_api_key")
    assert gateway.ask("GET", "/v1/models", "another").status_code == 200


@pytest.fixture
def browser(gateway: KeyedGateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.served.url) as client:
        client.headers["origin"] = gateway.served.url
        yield client


def log_in(browser: httpx.Client, scopes: Sequence[str]) -> httpx.Response:
    return browser.post("/console/login", data={"key": key_of(scopes)})


def test_console_login_takes_any_key_with_watch(browser: httpx.Client) -> None:
    for scopes in SETS:
        answer = log_in(browser, scopes)
        assert answer.status_code == (303 if "watch" in scopes else 403), scopes
        assert "watch" in scopes or "scope watch" in answer.text
    assert log_in(browser, ("no such",)).status_code == 401


def test_console_hides_and_refuses_what_needs_operate(
    gateway: KeyedGateway, browser: httpx.Client
) -> None:
    order = f"/v1/fleet/workers/{gateway.served.client.telemetry.worker_list[0].id}/drain"
    for scopes, status in ((("watch",), 403), (("watch", "operate"), 200)):
        assert log_in(browser, scopes).status_code == 303
        page = browser.get("/workers").text
        is_offered = "/drain" in page
        assert is_offered is (status == 200)
        assert is_offered or f"the key {name_of(scopes)} has no scope operate" in page
        token = re.search(r'data-csrf="([0-9a-f]+)"', page)
        assert token is not None
        answer = browser.post(order, headers={CSRF_HEADER: token[1]})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "missing_scope"


def test_login_ends_with_its_key(gateway: KeyedGateway, browser: httpx.Client) -> None:
    log_in(browser, ("watch",))
    assert browser.get("/v1/fleet/workers").status_code == 200
    forged = browser.cookies[COOKIE].replace("watch.", "operate.")
    cookie = {"cookie": f"{COOKIE}={forged}"}
    assert httpx.get(f"{gateway.served.url}/v1/fleet/workers", headers=cookie).status_code == 401
    gateway.write({name: key for name, key in entries().items() if name != "watch"})
    assert browser.get("/v1/fleet/workers").status_code == 401


def test_open_metrics_need_no_key(loaded: Loaded) -> None:
    with serving(bounded(loaded, open_metrics=True), KEY) as gateway:
        assert gateway.http.get("/metrics").status_code == 200
        assert gateway.http.get("/v1/models").status_code == 401


def test_key_that_may_operate_sends_requests_for_another_key(gateway: KeyedGateway) -> None:
    """A request for another key has that key's name and scopes; a key without the scope `operate`
    acts for none, and for a name that no key has nothing is sent.
    """

    def ask(key: str, name: str) -> tuple[int, str]:
        headers = {**bearer(key), ACTING_FOR_HEADER: name}
        answer = gateway.served.http.post(CHAT_PATH, json=ASK, headers=headers)
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    submitted = gateway.served.client.submitted
    before = len(submitted)
    for scopes in SETS:
        expected = (200, "") if "talk" in scopes else (403, "missing_scope")
        assert ask(KEY, name_of(scopes)) == expected
    sent = [spec.key for spec, _ in submitted[before:]]
    assert sent == [name_of(scopes) for scopes in SETS if "talk" in scopes]
    before = len(submitted)
    assert ask(KEY, "nobody") == (401, "invalid_api_key")
    for scopes in SETS:
        if "operate" not in scopes:
            assert ask(key_of(scopes), "talk") == (403, "missing_scope")
    assert len(submitted) == before


def test_lines_of_a_batch_stand_under_the_key_that_made_it(gateway: KeyedGateway) -> None:
    served, key = gateway.served, key_of(("talk",))
    line = {"custom_id": "a", "method": "POST", "url": CHAT_PATH, "body": ASK}
    with OpenAI(base_url=f"{served.url}/v1", api_key=key) as client:
        file = client.files.create(file=json.dumps(line).encode(), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
        )
    store = BatchStore(served.config)

    async def run() -> None:
        part = BatchRun(store, batch.id, lambda _: None, max_lines=10, concurrency=1, part_s=60)
        async with LineGateway(served.url, KEY, store.load(batch.id).key) as connection:
            await part.run(connection)

    asyncio.run(run())
    assert store.load(batch.id).batch.request_counts.completed == 1
    assert [spec.key for spec, _ in served.client.submitted] == ["talk"]
