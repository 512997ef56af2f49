"""HTTP request heads over real sockets: upgrade, Host, target, framing, and clients of HTTP/1.0."""

import json
import re
import socket
import subprocess
from collections.abc import Callable

import httpx
import pytest

from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import SPOKEN, AttackTarget, read_to_end, read_up_to
from tests.web.conftest import ASK, Loaded, ServedGateway, bounded, serving
from tests.web.fake_client import Script
from tests.web.test_disconnect import wait_for_abort

BODY = json.dumps(ASK).encode()
CHAT = attacks.HEAD
LENGTH = b"content-length: %d\r\n" % len(BODY)
WHOLE = LENGTH + b"\r\n" + BODY
CHUNKS = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n" + CHUNKS
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LAST = HEALTH + b"connection: close\r\n\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
UPGRADES = {
    "h2c": H2C,
    "tls": b"upgrade: TLS/1.2\r\nconnection: upgrade\r\n",
    "several": b"upgrade: h2c, TLS/1.2\r\nupgrade: IRC/6.9\r\nconnection: "
    b"keep-alive\r\nconnection: Upgrade\r\n",
    "websocket by POST": b"upgrade: websocket\r\nconnection: Upgrade\r\n",
}


def statuses(said: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]


def said_to(target: AttackTarget, sent: bytes) -> bytes:
    with target.connect() as wire:
        wire.sendall(sent)
        return read_to_end(wire)


@pytest.mark.parametrize("body", [WHOLE, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
def test_upgrade_that_is_not_served_is_ignored_and_the_body_is_read(
    gateway: ServedGateway, target: AttackTarget, upgrade: bytes, body: bytes
) -> None:
    asked = CHAT + upgrade + body
    said = said_to(target, asked + HEALTH + H2C + b"\r\n" + asked + LAST)
    assert statuses(said) == [200, 200, 200, 200], said[:400]
    assert len(gateway.client.submitted) == 2, "the connection stays in use"


def test_ignored_upgrade_in_many_reads_is_served(target: AttackTarget) -> None:
    with target.connect() as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in CHAT + H2C + CHUNKED:
            wire.sendall(bytes([byte]))
        read_up_to(wire, b'"usage"')
        wire.sendall(HEALTH + H2C + b"\r\n" + LAST)
        assert statuses(read_to_end(wire)) == [200, 200]


def test_ignored_upgrade_waits_for_100_continue(target: AttackTarget) -> None:
    with target.connect() as wire:
        wire.sendall(
            CHAT + H2C + b"expect: 100-continue\r\nconnection: close\r\n" + LENGTH + b"\r\n"
        )
        assert b"HTTP/1.1 100 Continue\r\n\r\n" in read_up_to(wire, b"\r\n\r\n")
        wire.sendall(BODY)
        assert statuses(read_to_end(wire)) == [200]


def test_disconnect_after_ignored_upgrade_aborts_request(
    gateway: ServedGateway, target: AttackTarget
) -> None:
    gateway.client.script = Script(stall_at=3)
    with target.connect() as wire:
        attacks.post(wire, {**ASK, "stream": True}, CHAT + H2C)
        read_up_to(wire, b"data:")
    wait_for_abort(gateway)


def test_ignored_upgrades_have_the_limits_of_any_request(
    loaded: Loaded, target: AttackTarget
) -> None:
    many = said_to(target, (HEALTH + H2C + b"\r\n") * 20 + LAST)
    assert statuses(many) == [200] * 21
    assert statuses(said_to(target, HEALTH + H2C + b"x: y\r\n" * 200 + b"\r\n")) == [431]
    with serving(bounded(loaded, body_timeout_s=0.3)) as quick:
        slow = said_to(AttackTarget.of(quick.url), CHAT + H2C + LENGTH + b"\r\n{")
        assert statuses(slow) == [408]


def test_realtime_path_with_an_upgrade_that_is_not_served_is_answered_426(
    target: AttackTarget,
) -> None:
    said = said_to(
        target, b"GET /v1/realtime HTTP/1.1\r\nhost: 127.0.0.1\r\n" + H2C + b"\r\n" + LAST
    )
    assert statuses(said) == [426, 200]
    old = b"GET /v1/realtime HTTP/1.0\r\n" + attacks.UPGRADE + b"\r\n"
    assert statuses(said_to(target, old)) == [426], "RFC 9110 section 7.8: HTTP/1.0 has no upgrade"


@pytest.mark.parametrize(
    "upgrade",
    [
        b"upgrade: h2c, websocket\r\nconnection: Upgrade, HTTP2-Settings\r\n",
        b"upgrade: WebSocket\r\nupgrade: h2c\r\nconnection: keep-alive\r\nconnection: Upgrade\r\n",
    ],
)
def test_websocket_is_chosen_among_several_protocols(target: AttackTarget, upgrade: bytes) -> None:
    fields = attacks.UPGRADE.replace(b"upgrade: websocket\r\nconnection: Upgrade\r\n", upgrade)
    with target.connect() as wire:
        wire.sendall(b"GET /v1/realtime HTTP/1.1\r\n" + fields + b"\r\n")
        said = read_up_to(wire, b"session.created")
    assert said.startswith(b"HTTP/1.1 101") and b"session.created" in said


def test_curl_with_http2_is_answered(gateway: ServedGateway) -> None:
    asking = ["curl", "-sS", "--http2", "-m", "20", "-H", "content-type: application/json"]
    url = f"{gateway.url}/v1/chat/completions"
    for more in ([], ["-H", "transfer-encoding: chunked"]):
        command = [
            *asking,
            *more,
            "--data-binary",
            "@-",
            url,
            "--next",
            "-sS",
            f"{gateway.url}/health",
        ]
        said = subprocess.run(command, input=BODY, capture_output=True, check=True).stdout
        assert b'"chat.completion"' in said and said.endswith(b'{"status":"ok"}'), said


GET = b"GET /health HTTP/1.1\r\n"
END = b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        GET + END,
        GET + b"host: 127.0.0.1\r\nhost: 127.0.0.1\r\n" + END,
        GET + b"host: 127.0.0.1\r\nHOST: other.example\r\n" + END,
        b"GET /health HTTP/1.0\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n",
        GET + b"host: 127.0.0.1 evil.example\r\n" + END,
        GET + b"host: 127.0.0.1/path\r\n" + END,
        GET + b"host: user@127.0.0.1\r\n" + END,
        GET + b"host: 127.0.0.1:http\r\n" + END,
        GET + b"host: 127.0.0.1:80:80\r\n" + END,
        GET + b"host: [::1\r\n" + END,
        GET + b"host: [1.2.3.4]\r\n" + END,
        GET + b"host: k\xc3\xa4se.example\r\n" + END,
        GET + b"host: a%zz.example\r\n" + END,
        b"GET /v1/realtime HTTP/1.1\r\n" + attacks.UPGRADE + b"host: 127.0.0.1\r\n\r\n",
    ],
)
def test_missing_repeated_or_invalid_host_is_answered_400(
    target: AttackTarget, sent: bytes
) -> None:
    """A missing, repeated or invalid Host field is answered by 400. Source: RFC 9112 section
    3.2.
    """
    said = said_to(target, sent + LAST)
    assert statuses(said) == [400] and b"Host field" in said, said


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:80", "127.0.0.1:", "[::1]:8000", "a.localhost"]
)
def test_host_with_port_or_ipv6_address_is_served(target: AttackTarget, host: str) -> None:
    assert statuses(said_to(target, GET + f"host: {host}\r\n".encode() + END)) == [200]


def test_empty_host_is_valid_and_no_name_of_the_gateway(target: AttackTarget) -> None:
    assert statuses(said_to(target, GET + b"host:\r\n" + END)) == [421]


@pytest.mark.parametrize(
    "line, expected",
    [
        (b"GET http://127.0.0.1/health HTTP/1.1", 200),
        (b"GET HTTP://localhost:81/health?a=b HTTP/1.1", 200),
        (b"GET https://[::1]/health HTTP/1.1", 200),
        (b"GET http://localhost HTTP/1.1", 200),
        (b"GET http://localhost?a=b HTTP/1.1", 200),
        (b"GET http://evil.example/health HTTP/1.1", 421),
        (b"GET http://localhost@evil.example/health HTTP/1.1", 400),
        (b"GET http:///health HTTP/1.1", 400),
        (b"GET ftp://localhost/health HTTP/1.1", 400),
        (b"GET //evil.example/health HTTP/1.1", 404),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"CONNECT localhost:443 HTTP/1.1", 400),
        (b"GET /health HTTP/2.0", 505),
        (b"GET /health HTTP/0.9", 505),
        (b"PRI * HTTP/2.0", 400),
    ],
)
def test_target_decides_host_and_path(
    serve_with: Callable[[str | None], ServedGateway], line: bytes, expected: int
) -> None:
    """An absolute request target decides host and path, and the Host field does not count. Source:
    RFC 9112 section 3.2.2.
    """
    said = said_to(AttackTarget.of(serve_with(None).url), line + b"\r\nhost: localhost\r\n" + END)
    assert statuses(said) == [expected], said


def test_websocket_with_absolute_target_is_opened(target: AttackTarget) -> None:
    with target.connect() as wire:
        wire.sendall(b"GET http://localhost/v1/realtime HTTP/1.1\r\n" + attacks.UPGRADE + b"\r\n")
        assert b"session.created" in read_up_to(wire, b"session.created")


@pytest.mark.parametrize(
    "sent, expected",
    [
        (LENGTH + CHUNKED, 400),
        (LENGTH + WHOLE, 400),
        (b"content-length: 5\r\n" + WHOLE, 400),
        (b"content-length: 4, 4\r\n\r\nabcd", 400),
        (b"content-length: +4\r\n\r\nabcd", 400),
        (b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS, 501),
        (b"transfer-encoding: gzip\r\n" + CHUNKED, 501),
        (b"transfer-encoding: chunked\r\n" + CHUNKED, 400),
        (b"transfer-encoding: identity\r\n\r\n", 501),
        (b"x: a\r\n b\r\n" + WHOLE, 400),
        (b"x: a\ny: b\r\n" + WHOLE, 400),
        (b"x: a\ry: b\r\n" + WHOLE, 400),
        (b"x: a\0b\r\n" + WHOLE, 400),
        (b"x : a\r\n" + WHOLE, 400),
        (b"transfer-encoding: chunked\r\n\r\n%x\n" % len(BODY) + BODY + b"\n0\n\n", 400),
    ],
)
def test_ambiguous_framing_is_refused(
    gateway: ServedGateway, target: AttackTarget, sent: bytes, expected: int
) -> None:
    """Ambiguous framing is refused; otherwise a proxy in front could see another request than the
    gateway. Source: RFC 9112 sections 2.2, 5 and 6.
    """
    for upgrade in (b"", H2C):
        said = said_to(target, CHAT + upgrade + sent + LAST)
        assert statuses(said) == [expected], said
    assert not gateway.client.submitted


def test_bare_line_feeds_are_no_line_ends(target: AttackTarget) -> None:
    assert statuses(said_to(target, LAST.replace(b"\r\n", b"\n"))) == [400]


OLD = CHAT.replace(b"HTTP/1.1\r\nhost: 127.0.0.1", b"HTTP/1.0")


def of_old_client(
    target: AttackTarget, body: dict[str, object], route: bytes = b"/v1/chat/completions"
) -> tuple[bytes, bytes]:
    """Send an HTTP/1.0 request; return head and body of the response, read until the connection
    ends.
    """
    with target.connect() as wire:
        attacks.post(
            wire, body, OLD.replace(b"/v1/chat/completions", route) + b"connection: keep-alive\r\n"
        )
        head, _, rest = read_to_end(wire).partition(b"\r\n\r\n")
    assert (
        head.startswith(b"HTTP/1.1 200")
        and b"transfer-encoding" not in head
        and b"connection: close" in head
    ), head
    return head, rest


def test_audio_for_http_1_0_client_has_no_chunk_sizes(
    gateway: ServedGateway, target: AttackTarget
) -> None:
    spoken: dict[str, object] = {
        "model": "omni",
        "voice": "ethan",
        "input": "hello",
        "response_format": "pcm",
    }
    _, audio = of_old_client(target, spoken, b"/v1/audio/speech")
    with gateway.http.stream("POST", "/v1/audio/speech", json=spoken) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert audio == b"".join(answer.iter_raw()) and len(audio) > 10_000


def test_events_for_http_1_0_client_have_no_chunk_sizes(target: AttackTarget) -> None:
    _, events = of_old_client(target, {**SPOKEN, "stream": True})
    assert events.endswith(b"data: [DONE]\n\n")
    assert all(
        line.startswith((b"data: ", b"id: ", b": ")) for line in events.splitlines() if line
    ), events[:300]


def test_whole_answer_for_http_1_0_client_has_its_length(target: AttackTarget) -> None:
    head, answer = of_old_client(target, ASK)
    assert (
        b"content-length: %d\r\n" % len(answer) in head + b"\r\n"
        and json.loads(answer)["object"] == "chat.completion"
    )


def test_file_and_head_request_of_http_1_0_client_are_answered(
    gateway: ServedGateway, target: AttackTarget
) -> None:
    path = "/static/console.css"
    said = said_to(target, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    assert said.partition(b"\r\n\r\n")[2] == httpx.get(gateway.url + path).content
    assert said_to(target, f"HEAD {path} HTTP/1.0\r\n\r\n".encode()).endswith(b"\r\n\r\n")


def test_http_1_0_client_gets_one_answer_and_no_100_continue(target: AttackTarget) -> None:
    said = said_to(target, OLD + b"expect: 100-continue\r\n" + WHOLE + OLD + WHOLE)
    assert statuses(said) == [200], "the connection ends with the answer"
    said = said_to(target, OLD + CHUNKED + LAST)
    assert statuses(said) == [200], "RFC 9112 section 6.1: after such framing nothing more is read"


def test_disconnected_http_1_0_client_aborts_its_request(
    gateway: ServedGateway, target: AttackTarget
) -> None:
    gateway.client.script = Script(stall_at=3)
    with target.connect() as wire:
        attacks.post(wire, {**ASK, "stream": True}, OLD)
        wait_until(lambda: b"data:" in wire.recv(65_536), "the first event")
    wait_for_abort(gateway)
