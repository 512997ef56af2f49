"""What an API key has made does not exist for other keys: neither by its id, nor by ids made from
it, nor in a list. Keys have the scope `talk`, as clients have.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any, NamedTuple

import httpx
import pytest
from websockets.sync.client import connect

from fleet.config.api_keys import ApiKey, KeysFile, digest_of, encode_keys_file
from tests.web.conftest import HELLO, Loaded, ServedGateway, bearer, bounded, serving
from tests.web.fake_client import Script

OWNER, OTHER, WATCHER = "key of the owner", "key of another", "key of a watcher"
NAMES = {OWNER: "owner", OTHER: "other", WATCHER: "watcher"}
LINE = json.dumps(
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "omni", "messages": HELLO},
    }
)


class Made(NamedTuple):
    """What the owner has made, by id. `audio`: a spoken answer. `voice`: a voice session."""

    response: str
    file: str
    batch: str
    request: str
    audio: str
    voice: str


@pytest.fixture(scope="module")
def gateway(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    folder = tmp_path_factory.mktemp("keys")
    path = folder / "keys.json"
    path.write_text(encode_keys_file(KeysFile(keys=_entries())))
    path.chmod(0o600)
    own = bounded(loaded, keys_file=path)
    config = own.config.model_copy(update={"data_dir": Path(folder / "data")})
    with serving(Loaded(checkpoint=own.checkpoint, config=config, frontend=own.frontend)) as served:
        yield served


def _entries() -> dict[str, ApiKey]:
    return {
        name: ApiKey(
            sha256=digest_of(key.encode()), scopes=("watch",) if key == WATCHER else ("talk",)
        )
        for key, name in NAMES.items()
    }


def ask(gateway: ServedGateway, key: str, method: str, path: str, **options: Any) -> httpx.Response:
    return gateway.http.request(method, path, headers=bearer(key), follow_redirects=True, **options)


def spoken(gateway: ServedGateway, key: str, messages: list[Any]) -> httpx.Response:
    fields = {
        "model": "omni",
        "messages": messages,
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "wav"},
    }
    return ask(gateway, key, "POST", "/v1/chat/completions", json=fields)


@pytest.fixture(scope="module")
def made(gateway: ServedGateway) -> Made:
    gateway.client.script = Script(num_samples=2_400)
    body = {"model": "omni", "input": "hello"}
    response = ask(gateway, OWNER, "POST", "/v1/responses", json=body).json()["id"]
    file = ask(
        gateway,
        OWNER,
        "POST",
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": LINE.encode()},
    ).json()["id"]
    batch = ask(
        gateway,
        OWNER,
        "POST",
        "/v1/batches",
        json={
            "input_file_id": file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    ).json()["id"]
    answer = spoken(gateway, OWNER, HELLO)
    audio = answer.json()["choices"][0]["message"]["audio"]["id"]
    with voice_socket(gateway, OWNER) as socket:
        voice = json.loads(socket.recv())["session"]["id"]
        socket.socket.shutdown(SHUT_RDWR)  # a lost connection, after which a session goes on
    return Made(response, file, batch, answer.headers["x-request-id"], audio, voice)


def voice_socket(gateway: ServedGateway, key: str, query: str = "") -> Any:
    url = f"{gateway.url.replace('http', 'ws')}/v1/realtime{query}"
    return connect(url, additional_headers=bearer(key))


ROUTES = [
    ("GET", "/v1/responses/{}", "response"),
    ("DELETE", "/v1/responses/{}", "response"),
    ("GET", "/v1/responses/{}/input_items", "response"),
    ("GET", "/v1/files/{}", "file"),
    ("GET", "/v1/files/{}/content", "file"),
    ("DELETE", "/v1/files/{}", "file"),
    ("GET", "/v1/batches/{}", "batch"),
    ("POST", "/v1/batches/{}/cancel", "batch"),
    ("GET", "/v1/fleet/requests/{}/stream", "request"),
    ("DELETE", "/v1/fleet/requests/{}", "request"),
]


def variants(found: str) -> list[str]:
    """Return ids that a client may make from one that it has learned."""
    return [
        found,
        found.upper(),
        f"{found}%00",
        f"{found}%2f",
        f"{found}%0a",
        f"x%2f..%2f{found}",
        f"%2e%2e%2f{found}",
        f"{found}-output",
        f"{found}-errors",
        found[:-1] + "%30",
        found[:-8] + "0" * 8,
        f"{found}%ed%a0%80",
        f"{found}\N{FULLWIDTH DIGIT ONE}",
        "*",
    ]


@pytest.mark.parametrize(("method", "path", "kind"), ROUTES)
def test_no_route_finds_it_under_any_id(
    gateway: ServedGateway, made: Made, method: str, path: str, kind: str
) -> None:
    found: str = getattr(made, kind)
    unknown = ask(gateway, OTHER, method, path.format("x"))
    assert unknown.status_code == 404, unknown.text
    for each in variants(found):
        answer = ask(gateway, OTHER, method, path.format(each))
        is_route = "no such route" not in answer.text
        assert answer.status_code == 404 or not is_route, f"{each}: {answer.text}"
    refused = ask(gateway, OTHER, method, path.format(found))
    assert refused.json()["error"]["code"] == unknown.json()["error"]["code"]
    assert refused.text.replace(found, "x") == unknown.text, "it looks like one that never was"


def test_nothing_continues_or_reads_it(gateway: ServedGateway, made: Made) -> None:
    reference = [*HELLO, {"role": "assistant", "audio": {"id": made.audio}}, *HELLO]
    continued = {"model": "omni", "input": "and?", "previous_response_id": made.response}
    batch = {
        "input_file_id": made.file,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    for key, status in ((OTHER, (400, 404)), (WATCHER, (403,)), (OWNER, (200,))):
        assert spoken(gateway, key, reference).status_code in status
        for path, body in (("/v1/responses", continued), ("/v1/batches", batch)):
            answer = ask(gateway, key, "POST", path, json=body)
            assert answer.status_code in status, answer.text
    for audio in (f"{made.audio}:owner", f"{made.audio}:owner:other", ""):
        reference[1] = {"role": "assistant", "audio": {"id": audio}}
        assert spoken(gateway, OTHER, reference).status_code == 400


def test_no_list_has_it(gateway: ServedGateway, made: Made) -> None:
    for path, found in (("/v1/files", made.file), ("/v1/batches", made.batch)):
        for query in ("", "?limit=1", f"?after={found}", "?order=asc", "?purpose=batch"):
            answer = ask(gateway, OTHER, "GET", path + query)
            assert found not in answer.text.replace(f"'{found}'", ""), answer.text
            assert answer.status_code == 400 or not answer.json()["data"]
        assert found in ask(gateway, OWNER, "GET", path).text


def test_no_other_key_continues_a_voice_session(gateway: ServedGateway, made: Made) -> None:
    with voice_socket(gateway, OTHER, f"?session={made.voice}") as socket:
        error = json.loads(socket.recv())["error"]
    with voice_socket(gateway, OTHER, "?session=sess_never") as socket:
        assert json.loads(socket.recv())["error"]["code"] == error["code"] == "not_found"
    secret = ask(gateway, OTHER, "POST", "/v1/realtime/client_secrets", json={}).json()["value"]
    with voice_socket(gateway, secret, f"?session={made.voice}") as socket:
        assert json.loads(socket.recv())["error"]["code"] == "not_found"
    with voice_socket(gateway, OWNER, f"?session={made.voice}") as socket:
        assert json.loads(socket.recv())["session"]["id"] == made.voice


def test_traces_and_operations_need_their_scopes(gateway: ServedGateway, made: Made) -> None:
    for path in ("", "/audio", "/trace"):
        assert (
            ask(gateway, OTHER, "GET", f"/v1/fleet/requests/{made.request}{path}").status_code
            == 403
        )
    for method, path in (
        ("GET", "/v1/fleet/requests"),
        ("GET", "/v1/fleet/sessions"),
        ("GET", "/v1/fleet/jobs"),
        ("DELETE", f"/v1/fleet/sessions/{made.voice}"),
        ("POST", f"/v1/fleet/requests/{made.request}/retry"),
    ):
        assert ask(gateway, OTHER, method, path).status_code == 403
    assert ask(gateway, WATCHER, "GET", f"/v1/files/{made.file}").status_code == 403
