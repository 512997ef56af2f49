"""Limits of connections in size, time and number: excess is refused with a reason, at little
cost.
"""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from fleet.config.schema import FleetConfig
from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import HEAD, AttackTarget, read_to_end, read_up_to
from tests.web.conftest import HELLO, Loaded, ServedGateway, bounded, serving, serving_app
from tests.web.fake_client import Script
from tests.web.test_disconnect import in_flight, wait_for_abort
from web.http.protocol import http
from web.http.protocol.http import BoundedHttp
from web.http.tls import TlsFiles, tls_files

GET = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
QUICK = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "send_timeout_s": 0.3}
MIB = 1024 * 1024
UNVERIFIED = ssl.create_default_context()
UNVERIFIED.check_hostname, UNVERIFIED.verify_mode = False, ssl.CERT_NONE
LONG_ANSWER = Script(num_samples=3_000_000, samples_per_chunk=24_000)
SPOKEN: dict[str, object] = {
    "model": "omni",
    "messages": HELLO,
    "modalities": ["text", "audio"],
    "audio": {"voice": "ethan", "format": "pcm16"},
    "stream_options": {"include_event_ids": True},
}


@pytest.fixture(scope="module")
def shared_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    """A gateway of this module only: delayed summary lines of its log must not appear in other
    tests.
    """
    with serving(loaded) as gateway:
        yield gateway


@pytest.fixture
def target(gateway: ServedGateway) -> AttackTarget:
    return AttackTarget.of(gateway.url)


@pytest.fixture
def quick(loaded: Loaded) -> Iterator[ServedGateway]:
    """A gateway with short time-outs."""
    with serving(bounded(loaded, **QUICK)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles | None:
    """A self-signed certificate."""
    folder = str(tmp_path_factory.mktemp("tls"))
    return tls_files(
        FleetConfig.model_validate({"data_dir": folder, "web": {"tls": "self-signed"}})
    )


def error_of(said: bytes) -> tuple[int, str]:
    """Return status and error code of a connection's last response."""
    head, _, body = said.rpartition(b"\r\n\r\n")
    assert b"application/json" in head, said[:300]
    return int(head.rpartition(b"HTTP/1.1 ")[2].split()[0]), json.loads(body)["error"]["code"]


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
    body = json.dumps({"model": "omni", "messages": HELLO}).encode()
    pieces = (body[at : at + 1] for at in range(len(body)))
    answer = gateway.http.post(
        "/v1/chat/completions", content=pieces, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


def test_trailer_field_is_not_header_field(loaded: Loaded) -> None:
    """Trailer fields arrive after the access check."""

    async def tell_headers(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            continue
        names = b" ".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": names})

    app = Starlette(routes=[Mount("/", tell_headers)])
    app.state.closing, app.state.detach_all, app.state.close = (
        asyncio.Event(),
        lambda: None,
        lambda: None,
    )
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


def drip_until_answered(wire: socket.socket, byte: bytes) -> bytes:
    """Send a byte every 20 ms until a response arrives; return it."""
    wire.settimeout(0.02)

    def answer() -> bytes:
        try:
            return wire.recv(65_536)
        except TimeoutError:
            wire.send(byte)
            return b""

    return wait_until(answer, "the answer to what came a byte at a time")


def test_unfinished_head_is_answered_408(quick: ServedGateway) -> None:
    with AttackTarget.of(quick.url).connect() as wire:
        wire.sendall(GET + b"x: ")
        assert error_of(drip_until_answered(wire, b"x")) == (408, "request_timeout")


def test_unfinished_second_head_of_a_connection_is_answered_408(quick: ServedGateway) -> None:
    with AttackTarget.of(quick.url).connect() as wire:
        wire.sendall(GET + b"\r\n" + GET)
        said = read_to_end(wire)
    assert said.startswith(b"HTTP/1.1 200") and error_of(said) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: "])
def test_half_open_connections_are_freed(
    quick: ServedGateway, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), ExitStack() as held:
        wires = [
            held.enter_context(wire)
            for wire in attacks.half_open(AttackTarget.of(quick.url), 300, sent)
        ]
        assert {error_of(read_to_end(wire))[0] for wire in wires} == {408}
    logged = [line for line in caplog.messages if "head did not arrive" in line]
    assert len(logged) == (1 if sent else 0), "a browser's spare connection is no abuse"


def test_unfinished_tls_handshake_is_aborted(loaded: Loaded, tls: TlsFiles) -> None:
    with serving(bounded(loaded, **QUICK), tls=tls) as gateway:
        target = AttackTarget.of(gateway.url)
        with target.connect() as silent, target.connect() as begun:
            begun.sendall(b"\x16\x03\x01")
            assert read_to_end(silent) == read_to_end(begun) == b""
        assert gateway.http.get("/health").status_code == 200
        with target.connect() as plain, UNVERIFIED.wrap_socket(plain) as secured:
            secured.sendall(GET)
            assert error_of(read_to_end(secured)) == (408, "request_timeout")


def test_unread_stream_over_tls_is_disconnected(loaded: Loaded, tls: TlsFiles) -> None:
    with serving(bounded(loaded, **QUICK), tls=tls) as gateway:
        gateway.client.script = LONG_ANSWER
        with (
            AttackTarget.of(gateway.url).connect(receive_buffer=4096) as plain,
            UNVERIFIED.wrap_socket(plain) as wire,
        ):
            attacks.post(wire, {**SPOKEN, "stream": True})
            wait_until(lambda: gateway.client.streams, "the request")
            (stream,) = gateway.client.streams.values()
            wait_until(lambda: stream.unheard, "the answer to run on without its client")


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
        attacks.post(
            reader,
            {
                "model": "omni",
                "messages": HELLO,
                "modalities": ["text", "audio"],
                "audio": {"voice": "ethan"},
            },
        )
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


def test_stopped_body_is_answered_408(quick: ServedGateway) -> None:
    with attacks.slow_body(AttackTarget.of(quick.url)) as wire:
        assert error_of(read_to_end(wire)) == (408, "request_timeout")
    assert quick.client.submitted == []


def test_slow_body_is_answered_408(quick: ServedGateway) -> None:
    with attacks.slow_body(AttackTarget.of(quick.url)) as wire:
        assert error_of(drip_until_answered(wire, b" ")) == (408, "request_timeout")


def test_rest_of_refused_body_is_dropped_up_to_limit(
    quick: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer precedes the body: the connection survives a short rest, and ends after a slow or
    long one.
    """
    target = AttackTarget.of(quick.url)
    head = b"POST /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    refused = head + b"content-length: %d\r\n\r\n"
    with target.connect() as short:
        short.sendall(refused % 5)
        assert b"404" in short.recv(65_536)
        short.sendall(b"12345" + GET + b"connection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in read_to_end(short)
    with target.connect() as slow:
        slow.sendall(refused % 5)
        assert read_to_end(slow).count(b"HTTP/1.1") == 1
    sent, _ = attacks.flood(
        target, head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % 10**10, b"a" * 1000, 64 * MIB
    )
    assert sent < 64 * MIB
    monkeypatch.setattr(http, "MAX_DROPPED_DECLARED_BYTES", 40 * MIB)
    sent, _ = attacks.flood(target, refused % 10**10, b"a" * 1000, 80 * MIB)
    assert 40 * MIB < sent < 80 * MIB


def test_refused_body_of_declared_length_is_dropped_to_its_end(target: AttackTarget) -> None:
    """Many clients read only after sending everything."""
    with target.connect() as wire:
        wire.sendall(HEAD + b"content-length: %d\r\n\r\n" % (40 * MIB))
        assert b" 413 " in wire.recv(65_536)
        wire.sendall(bytes(40 * MIB))
        wire.sendall(GET + b"connection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in read_to_end(wire)


def test_connection_answered_before_end_of_body_ends_when_idle(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = BoundedHttp.connection_made

    def make(protocol: BoundedHttp, transport: asyncio.Transport) -> None:
        protocol.timeout_keep_alive = 0.3  # pyright: ignore[reportAttributeAccessIssue]
        made(protocol, transport)

    monkeypatch.setattr(BoundedHttp, "connection_made", make)
    refused = b"POST /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\n"
    with serving(loaded) as gateway, AttackTarget.of(gateway.url).connect() as wire:
        wire.sendall(refused)
        assert b" 404 " in read_up_to(wire, b" 404 ")
        wire.sendall(b"1" + GET + b"\r\n")
        assert b" 200 OK" in read_up_to(wire, b" 200 OK"), "the connection stays usable"
        wire.sendall(refused)
        assert b" 404 " in read_up_to(wire, b" 404 ")
        wire.sendall(b"1")
        assert b"HTTP/1.1" not in read_to_end(wire), "no 408: nothing was wrong"


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


def test_memory_of_all_bodies_is_bounded(loaded: Loaded) -> None:
    padded = json.dumps({"model": "omni", "messages": HELLO}).encode().ljust(700_000)
    with serving(bounded(loaded, body_memory_mib=1)) as gateway:
        with attacks.slow_body(AttackTarget.of(gateway.url), 900_000) as slow:
            slow.sendall(b" " * 600_000)

            def refused() -> httpx.Response | None:
                answer = gateway.http.post("/v1/chat/completions", content=padded)
                return answer if answer.status_code != 200 else None

            answer = wait_until(refused, "the bodies to be too much together")
            assert answer is not None
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert "web.body_memory_mib" in answer.json()["error"]["message"]
        for _ in range(5):  # an answer may reach its client before its request has ended
            wait_until(
                lambda: (
                    gateway.http.post("/v1/chat/completions", content=padded).status_code == 200
                ),
                "memory to be freed",
            )


def test_body_memory_is_freed_when_answer_begins(loaded: Loaded) -> None:
    body = {"model": "omni", "messages": HELLO, "stream": True}
    padded = json.dumps(body).encode().ljust(700_000)
    with serving(bounded(loaded, body_memory_mib=1)) as gateway:
        gateway.client.script = Script(stall_at=1)
        with gateway.http.stream("POST", "/v1/chat/completions", content=padded) as first:
            assert first.status_code == 200
            with gateway.http.stream("POST", "/v1/chat/completions", content=padded) as second:
                assert second.status_code == 200, second.read()


def test_unread_stream_is_disconnected_and_resumable(
    quick: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    quick.client.script = LONG_ANSWER
    with (
        caplog.at_level(logging.WARNING),
        attacks.unread_stream(AttackTarget.of(quick.url), SPOKEN),
    ):
        wait_until(lambda: quick.client.streams, "the request")
        ((request, stream),) = quick.client.streams.items()
        wait_until(lambda: stream.unheard, "the answer to run on without its client")
        wait_until(lambda: in_flight(quick) == 0, "nothing in flight")
    assert stream.aborted is None
    assert any(request in line and "web.send_timeout_s" in line for line in caplog.messages)
    whole = quick.http.get(f"/v1/fleet/requests/{request}/stream").text
    assert whole.rstrip().endswith("data: [DONE]")


def test_unread_complete_answer_does_not_hold_connection(quick: ServedGateway) -> None:
    """The answer is written, and the rest in the buffer is too small for uvicorn's flow control."""
    target = AttackTarget.of(quick.url)
    quick.client.script = Script(num_samples=1_500_000)
    body = {"model": "omni", "input": "hello", "voice": "ethan", "response_format": "wav"}
    with target.connect(receive_buffer=4096) as wire:
        attacks.post(wire, body, HEAD.replace(b"chat/completions", b"audio/speech"))
        wait_until(lambda: quick.client.streams, "the request")
        wait_until(lambda: in_flight(quick) == 0, "nothing in flight")


def test_slow_reader_is_not_disconnected(loaded: Loaded) -> None:
    with serving(bounded(loaded, send_timeout_s=0.3)) as gateway:
        gateway.client.script = Script(num_samples=100_000)
        with AttackTarget.of(gateway.url).connect(receive_buffer=4096) as wire:
            attacks.post(wire, {**SPOKEN, "stream": True}, HEAD + b"connection: close\r\n")
            said = bytearray()

            def ended() -> bool:
                piece = wire.recv(4096)
                said.extend(piece)
                return not piece

            wait_until(ended, "the whole answer, a little at a time", timeout_s=60)
        assert b"data: [DONE]" in said
        (stream,) = gateway.client.streams.values()
        assert stream.finished and not stream.unheard


def test_websocket_of_unreading_client_is_aborted(
    quick: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    text = json.dumps(
        {"type": "session.update", "session": {"type": "realtime", "instructions": "a" * 1500}}
    ).encode()
    frame = b"\x81\xfe" + len(text).to_bytes(2, "big") + b"\0\0\0\0" + text
    with (
        caplog.at_level(logging.WARNING),
        attacks.open_websocket(AttackTarget.of(quick.url), receive_buffer=4096) as wire,
    ):
        assert b"101" in wire.recv(4096)
        assert attacks.send_unread(wire, frame, 64 * MIB) < 64 * MIB
    assert any("a WebSocket read too little" in line for line in caplog.messages)
    assert len(quick.client.held) == 1, "the session waits for its client"


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
    """Otherwise the answer would be mixed with frames, and would not see the disconnect."""
    gateway.client.script = Script(stall_at=3)
    with target.connect() as wire:
        attacks.post(wire, {"model": "omni", "messages": HELLO, "stream": True})
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
