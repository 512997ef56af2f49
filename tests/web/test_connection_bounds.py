"""Limits of the size and number of connections: excess is refused with a reason, at little cost."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import GET, HEAD, SPOKEN, AttackTarget, error_of, read_to_end, read_up_to
from tests.web.conftest import ASK, Loaded, ServedGateway, bounded, serving, serving_app
from tests.web.fake_client import Script
from tests.web.test_disconnect import in_flight, wait_for_abort
from web.http.tls import TlsFiles

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def shared_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    """A gateway of this module alone, since delayed summary lines of its log must not appear in
    other tests.
    """
    with serving(loaded) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "attack",
    [
        attacks.header_flood,
        attacks.trailer_flood,
        attacks.chunk_extension_flood,
        attacks.pipeline_flood,
    ],
)
def test_endless_request_is_aborted(
    target: AttackTarget, attack: Callable[[AttackTarget, int], tuple[int, bytes]]
) -> None:
    sent, _ = attack(target, 64 * MIB)
    assert sent < 16 * MIB, "what the sockets of both sides hold, and not more"


@pytest.mark.parametrize(
    "sent, status, code",
    [
        (GET + b"x: " + b"a" * 70_000, 431, "header_too_large"),
        (GET + b"x: y\r\n" * 200 + b"\r\n", 431, "header_too_large"),
        (GET + (b"x: " + b"a" * 1000 + b"\r\n") * 70, 431, "header_too_large"),
        (GET + (b"x: " + b"a" * 1000 + b"\r\n") * 70 + b"\r\n", 431, "header_too_large"),
        (b"GET /" + b"a" * 17_000, 414, "url_too_long"),
        (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\n\r\n", 414, "url_too_long"),
        (b"\r\n" * 40_000, 431, "header_too_large"),
        (b"nonsense\r\n\r\n", 400, "bad_request"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"2;" + b"x" * 300_000, 400, "bad_request"),
        (
            HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"a" * 300_000,
            400,
            "bad_request",
        ),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"zz\r\n", 400, "bad_request"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400, "bad_request"),
        (b"GET http://[/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "bad_request"),
    ],
)
def test_invalid_request_is_refused_with_reason(
    target: AttackTarget, sent: bytes, status: int, code: str
) -> None:
    with target.connect() as wire:
        wire.sendall(sent)
        assert error_of(read_to_end(wire)) == (status, code)


@pytest.mark.parametrize("num_bytes", [1, 1000, 60_000])
def test_large_head_within_the_bounds_is_served(target: AttackTarget, num_bytes: int) -> None:
    with target.connect() as wire:
        wire.sendall(GET + b"x: " + b"a" * num_bytes + b"\r\nconnection: close\r\n\r\n")
        assert read_to_end(wire).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(target: AttackTarget) -> None:
    paths = [b"/health", b"/v1/models", b"/nowhere"] * 5
    with target.connect() as wire:
        wire.sendall(
            b"".join(b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" for path in paths)
        )
        wire.sendall(GET + b"connection: close\r\n\r\n")
        said = read_to_end(wire)
    statuses = [int(part.split()[0]) for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 404] * 5 + [200]


def test_chunked_upload_in_small_pieces_is_served(gateway: ServedGateway) -> None:
    body = json.dumps(ASK).encode()
    pieces = (body[at : at + 1] for at in range(len(body)))
    answer = gateway.http.post(
        "/v1/chat/completions", content=pieces, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


def test_trailer_field_is_not_header_field(loaded: Loaded) -> None:
    """A trailer field is not treated as a header field, since trailers arrive after the access
    check.
    """

    async def tell_headers(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            continue
        names = b" ".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": names})

    async def no_calls() -> None:
        return None

    app = Starlette(routes=[Mount("/", tell_headers)])
    app.state.closing = asyncio.Event()
    app.state.detach_all = app.state.close = lambda: None
    app.state.calls_left = no_calls
    with serving_app(app, loaded.config) as served, AttackTarget.of(served.url).connect() as wire:
        wire.sendall(
            b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ntransfer-encoding: "
            b"chunked\r\n\r\n"
        )
        wire.sendall(b"2\r\n{}\r\n0\r\nauthorization: Bearer key\r\n\r\n")
        said = read_to_end(wire)
    assert (
        said.startswith(b"HTTP/1.1 200")
        and b"transfer-encoding" in said
        and b"authorization" not in said
    )


def test_tls_handshakes_count_as_idle_connections(loaded: Loaded, tls: TlsFiles) -> None:
    with serving(bounded(loaded, max_connections=2), tls=tls) as gateway:
        target = AttackTarget.of(gateway.url)
        with target.connect() as first, target.connect():
            assert gateway.http.get("/health").status_code == 200
            assert read_to_end(first) == b""


@pytest.mark.parametrize("bound", ["max_connections", "max_connections_per_address"])
def test_connection_idle_for_longest_makes_room(loaded: Loaded, bound: str) -> None:
    with serving(bounded(loaded, **{bound: 3})) as gateway:
        target = AttackTarget.of(gateway.url)
        with target.connect() as kept, target.connect() as silent, target.connect() as begun:
            kept.sendall(GET + b"\r\n")
            assert b"200 OK" in read_up_to(kept, b"}")
            begun.sendall(GET)
            with target.connect() as fourth:
                assert read_to_end(silent) == b"", "the one that was idle for longest"
                fourth.sendall(GET + b"connection: close\r\n\r\n")
                assert read_to_end(fourth).startswith(b"HTTP/1.1 200")
            kept.sendall(GET + b"connection: close\r\n\r\n")
            assert read_to_end(kept).startswith(b"HTTP/1.1 200")


def test_connection_with_unsent_answer_is_kept_while_another_is_idle(loaded: Loaded) -> None:
    with serving(bounded(loaded, max_connections=4)) as gateway, ExitStack() as held:
        gateway.client.script = Script(num_samples=4_000_000, samples_per_chunk=240_000)
        target = AttackTarget.of(gateway.url)
        reader = held.enter_context(target.connect(receive_buffer=65_536))
        attacks.post(reader, {**SPOKEN, "audio": {"voice": "ethan"}, "stream_options": None})
        wait_until(lambda: gateway.client.streams, "the request")
        wait_until(lambda: in_flight(gateway) == 0, "all of the answer to be written")
        for silent in attacks.idle_sockets(target, 5):
            held.enter_context(silent)
        num_read = 0
        while num_read < 10_000_000 and (piece := reader.recv(65_536)):
            num_read += len(piece)
    assert num_read >= 10_000_000, "the whole answer"


@pytest.mark.parametrize("bound", ["max_connections", "max_connections_per_address"])
def test_connection_beyond_limit_is_refused_if_none_is_idle(loaded: Loaded, bound: str) -> None:
    with serving(bounded(loaded, **{bound: 2})) as gateway:
        target = AttackTarget.of(gateway.url)
        with target.connect() as stream, attacks.open_websocket(target) as voice:
            stream.sendall(b"GET /console/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            wait_until(lambda: b"id: 1" in stream.recv(65_536), "the stream to begin")
            wait_until(lambda: b"101" in voice.recv(65_536), "the WebSocket to open")
            with target.connect() as refused:
                assert error_of(read_to_end(refused)) == (503, "overloaded")
            stream.close()
            wait_until(lambda: _served(gateway), "room after a connection has ended")


def _served(gateway: ServedGateway) -> bool:
    try:
        return gateway.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_wrong_key_is_refused_before_the_body_is_read(
    serve_with: Callable[[str | None], ServedGateway],
) -> None:
    target = AttackTarget.of(serve_with("secret").url)
    with target.connect() as wire:
        wire.sendall(
            HEAD + b"authorization: Bearer wrong\r\nexpect: 100-continue\r\ncontent-length: "
            b"1000000\r\n\r\n"
        )
        said = wire.recv(65_536)
    assert said.startswith(b"HTTP/1.1 401") and b"100 Continue" not in said


@pytest.mark.parametrize("num_bytes", [8_200, 10_000, 15_000, 40_000])
def test_websocket_with_a_long_address_is_refused(target: AttackTarget, num_bytes: int) -> None:
    assert error_of(attacks.long_websocket_address(target, num_bytes)) == (414, "url_too_long")


@pytest.mark.parametrize(
    "fields, status",
    [
        (b"cookie: " + b"a" * 9000 + b"\r\n", 431),
        (b"content-length: 5\r\n", 400),
        (b"x: y\r\n" * 123, 101),
    ],
)
def test_websocket_handshake_is_always_answered(
    target: AttackTarget, fields: bytes, status: int
) -> None:
    with target.connect() as wire:
        wire.sendall(b"GET /v1/realtime HTTP/1.1\r\n" + attacks.UPGRADE + fields + b"\r\n")
        assert wire.recv(65_536).startswith(b"HTTP/1.1 %d" % status)


def test_websocket_upgrade_behind_unfinished_answer_is_refused(
    gateway: ServedGateway, target: AttackTarget
) -> None:
    """A WebSocket upgrade pipelined behind an unfinished answer is refused: its frames would mix
    with the answer, which would not see the disconnect.
    """
    gateway.client.script = Script(stall_at=3)
    with target.connect() as wire:
        attacks.post(wire, {**ASK, "stream": True})
        wire.sendall(b"GET /v1/realtime HTTP/1.1\r\n" + attacks.UPGRADE + b"\r\n")
        wait_until(lambda: b"data:" in wire.recv(65_536), "the first event")
    wait_for_abort(gateway)


def test_disconnect_aborts_request_before_pipelined_one(
    gateway: ServedGateway, target: AttackTarget, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.client.script = Script(gap_s=0.02, num_samples=3_000_000)
    with target.connect() as wire:
        attacks.post(wire, {**SPOKEN, "stream": True})
        wire.sendall(GET + b"\r\n")
        wait_until(lambda: b"data:" in wire.recv(65_536), "the first event")
    wait_for_abort(gateway)
    assert not any("failed" in line for line in caplog.messages), (
        "it does not write to a closed connection"
    )


def test_repeated_abuse_is_logged_once(
    quick: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    target = AttackTarget.of(quick.url)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            with target.connect() as wire:
                wire.sendall(b"nonsense\r\n\r\n")
                read_to_end(wire)
    about = [line for line in caplog.messages if "valid HTTP" in line or "Invalid HTTP" in line]
    assert len(about) == 1 and "127.0.0.1" in about[0], about
