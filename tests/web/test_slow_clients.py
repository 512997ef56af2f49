"""Clients that send or read too slowly: timeouts, and limits of held and dropped bodies."""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import httpx
import pytest

from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import GET, HEAD, SPOKEN, AttackTarget, error_of, read_to_end, read_up_to
from tests.web.conftest import ASK, Loaded, ServedGateway, bounded, serving
from tests.web.fake_client import Script
from tests.web.test_disconnect import in_flight
from web.http.protocol import http
from web.http.protocol.http import BoundedHttp
from web.http.tls import TlsFiles

pytestmark = pytest.mark.one_file_in(3, "gateways under load")

MIB = 1024 * 1024
UNVERIFIED = ssl.create_default_context()
UNVERIFIED.check_hostname = False
UNVERIFIED.verify_mode = ssl.CERT_NONE
LONG_ANSWER = Script(num_samples=3_000_000, samples_per_chunk=24_000)


@pytest.fixture(scope="module")
def shared_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    """A gateway of this module alone, since delayed summary lines of its log must not appear in
    other tests.
    """
    with serving(loaded) as gateway:
        yield gateway


def drip_until_answered(wire: socket.socket, byte: bytes) -> bytes:
    """Send `byte` every 20 ms until a response arrives; return the response."""
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


@pytest.fixture
def quick_tls(
    loaded: Loaded, quick: ServedGateway, tls: TlsFiles
) -> Iterator[tuple[ServedGateway, AttackTarget]]:
    """A gateway under https with short timeouts."""
    with serving(replace(loaded, config=quick.config), tls=tls) as gateway:
        yield gateway, AttackTarget.of(gateway.url)


def test_unfinished_tls_handshake_is_aborted(
    quick_tls: tuple[ServedGateway, AttackTarget],
) -> None:
    gateway, target = quick_tls
    with target.connect() as silent, target.connect() as begun:
        begun.sendall(b"\x16\x03\x01")
        assert read_to_end(silent) == read_to_end(begun) == b""
    assert gateway.http.get("/health").status_code == 200
    with target.connect() as plain, UNVERIFIED.wrap_socket(plain) as secured:
        secured.sendall(GET)
        assert error_of(read_to_end(secured)) == (408, "request_timeout")


def test_unread_stream_over_tls_is_disconnected(
    quick_tls: tuple[ServedGateway, AttackTarget],
) -> None:
    gateway, target = quick_tls
    gateway.client.script = LONG_ANSWER
    with (
        target.connect(receive_buffer=4096) as plain,
        UNVERIFIED.wrap_socket(plain) as wire,
    ):
        attacks.post(wire, {**SPOKEN, "stream": True})
        wait_until(lambda: gateway.client.streams, "the request")
        (stream,) = gateway.client.streams.values()
        wait_until(lambda: stream.unheard, "the answer to run on without its client")


@pytest.mark.parametrize("read", [read_to_end, partial(drip_until_answered, byte=b" ")])
def test_stopped_or_slow_body_is_answered_408(
    quick: ServedGateway, read: Callable[[socket.socket], bytes]
) -> None:
    with attacks.slow_body(AttackTarget.of(quick.url)) as wire:
        assert error_of(read(wire)) == (408, "request_timeout")
    assert quick.client.submitted == []


def test_rest_of_refused_body_is_dropped_up_to_limit(
    quick: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a refused body is dropped up to a limit. The response precedes the body: the
    connection survives a short rest, and ends after a slow or long one.
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
    """A refused body of declared length is read and dropped to its end, since many clients read
    only after sending everything.
    """
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


def test_memory_of_all_bodies_is_bounded(loaded: Loaded) -> None:
    padded = json.dumps(ASK).encode().ljust(700_000)
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
    body = {**ASK, "stream": True}
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
    """A complete answer that its client does not read does not hold the connection: the rest in the
    buffer is too small for uvicorn's flow control.
    """
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
    assert len(quick.client.voice.held) == 1, "the session waits for its client"
