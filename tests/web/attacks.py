"""Attacks on a gateway's connections over plain sockets, singly or several in threads.

An attack returns its open sockets or what the gateway answered, and never waits longer than
`PATIENCE_S`.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

PATIENCE_S = 10.0
PIECE_BYTES = 64 * 1024
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
)
GET = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
UPGRADE = (
    b"host: 127.0.0.1\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PING = b"\x89\x80\x00\x00\x00\x00"
"""WebSocket ping: an empty masked frame, which the gateway answers."""


SPOKEN: dict[str, object] = {
    "model": "omni",
    "messages": [{"role": "user", "content": "hello"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "ethan", "format": "pcm16"},
    "stream_options": {"include_event_ids": True},
}
"""JSON body of a chat request for a spoken answer; a test adds whether to stream it."""


@dataclass(frozen=True, slots=True)
class AttackTarget:
    """Address of the attacked gateway. `key`: API key for attacks that need an answer."""

    host: str
    port: int
    key: str | None = None

    @staticmethod
    def of(url: str, key: str | None = None) -> "AttackTarget":
        host, _, port = url.partition("://")[2].rpartition(":")
        return AttackTarget(host, int(port), key)

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """Return a connected socket. With a small `receive_buffer`, a client that does not read
        blocks the gateway sooner.
        """
        wire = socket.socket()
        wire.settimeout(PATIENCE_S)
        if receive_buffer is not None:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            wire.connect((self.host, self.port))
        except OSError:
            wire.close()
            raise
        return wire

    @property
    def authorization(self) -> bytes:
        return f"authorization: Bearer {self.key}\r\n".encode() if self.key is not None else b""


def read_to_end(wire: socket.socket) -> bytes:
    """Read until the connection ends, by close or reset."""
    said = b""
    with suppress(ConnectionError):
        while piece := wire.recv(PIECE_BYTES):
            said += piece
    return said


def read_up_to(wire: socket.socket, wanted: bytes) -> bytes:
    """Read until `wanted` is received, or the connection ends."""
    received = b""
    while wanted not in received and (piece := wire.recv(PIECE_BYTES)):
        received += piece
    return received


def flood(
    target: AttackTarget, beginning: bytes, repeated: bytes, max_bytes: int = 8 * 1024 * 1024
) -> tuple[int, bytes]:
    """Send `beginning`, then `repeated` until the gateway ends the connection or `max_bytes` are
    sent.

    Return the number of bytes sent, and the response received meanwhile.
    """
    piece = repeated * max(1, PIECE_BYTES // len(repeated))
    sent, received, ended = 0, b"", False
    with target.connect() as wire, suppress(ConnectionError):
        wire.sendall(beginning)
        while sent < max_bytes and not ended:
            sent += wire.send(piece)
            wire.setblocking(False)
            with suppress(BlockingIOError):
                answer = wire.recv(PIECE_BYTES)
                received, ended = received + answer, not answer
            wire.settimeout(PATIENCE_S)
    return sent, received


def header_flood(target: AttackTarget, max_bytes: int = 8 * 1024 * 1024) -> tuple[int, bytes]:
    return flood(
        target, b"GET /health HTTP/1.1\r\n", b"x-filler: " + b"a" * 1000 + b"\r\n", max_bytes
    )


def trailer_flood(target: AttackTarget, max_bytes: int = 8 * 1024 * 1024) -> tuple[int, bytes]:
    beginning = HEAD + target.authorization + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    return flood(target, beginning, b"x-filler: " + b"a" * 1000 + b"\r\n", max_bytes)


def chunk_extension_flood(
    target: AttackTarget, max_bytes: int = 8 * 1024 * 1024
) -> tuple[int, bytes]:
    return flood(
        target,
        HEAD + target.authorization + b"transfer-encoding: chunked\r\n\r\n2;x=",
        b"a" * 1000,
        max_bytes,
    )


def pipeline_flood(target: AttackTarget, max_bytes: int = 8 * 1024 * 1024) -> tuple[int, bytes]:
    """Pipeline requests without end behind a first request whose answer is endless."""
    beginning = (
        b"GET /console/events HTTP/1.1\r\nhost: 127.0.0.1\r\n" + target.authorization + b"\r\n"
    )
    return flood(target, beginning, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", max_bytes)


def half_open(
    target: AttackTarget, count: int, sent: bytes = b"GET /health HTTP/1.1\r\nhost: "
) -> list[socket.socket]:
    """Open `count` connections with an unfinished request head; the caller closes them."""
    wires: list[socket.socket] = []
    for _ in range(count):
        wire = target.connect()
        wire.sendall(sent)
        wires.append(wire)
    return wires


def idle_sockets(target: AttackTarget, count: int) -> list[socket.socket]:
    """Open `count` connections that send nothing; the caller closes them."""
    return half_open(target, count, b"")


def slow_body(target: AttackTarget, declared: int = 100_000) -> socket.socket:
    """Send a request whose body stops after its first byte; the caller closes the socket."""
    wire = target.connect()
    wire.sendall(HEAD + target.authorization + b"content-length: %d\r\n\r\n{" % declared)
    return wire


def post(wire: socket.socket, body: object, head: bytes = HEAD) -> None:
    """Send a request with a JSON body; the response is not read."""
    raw = json.dumps(body).encode()
    wire.sendall(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)


def unread_stream(target: AttackTarget, body: dict[str, object]) -> socket.socket:
    """Request a streamed answer without reading it; the caller closes the socket."""
    wire = target.connect(receive_buffer=4096)
    post(wire, {**body, "stream": True}, HEAD + target.authorization)
    return wire


def open_websocket(
    target: AttackTarget, address: bytes = b"/v1/realtime", *, receive_buffer: int | None = None
) -> socket.socket:
    """Send a WebSocket handshake and nothing else; the caller closes the socket."""
    wire = target.connect(receive_buffer=receive_buffer)
    wire.sendall(b"GET " + address + b" HTTP/1.1\r\n" + UPGRADE + target.authorization + b"\r\n")
    return wire


def long_websocket_address(target: AttackTarget, num_bytes: int = 10_000) -> bytes:
    """Return the response to a WebSocket request whose URL is too long."""
    with open_websocket(target, b"/v1/realtime?model=" + b"a" * num_bytes) as wire:
        return read_to_end(wire)


def send_unread(wire: socket.socket, repeated: bytes, max_bytes: int) -> int:
    """Send up to `max_bytes` without reading, or until the connection ends. Return the number of
    bytes that the gateway accepted.
    """
    piece, sent = repeated * max(1, PIECE_BYTES // len(repeated)), 0
    with suppress(ConnectionError):
        while sent < max_bytes:
            wire.sendall(piece)
            sent += len(piece)
    return sent


@contextmanager
def attacking(*attacks: Callable[[], object]) -> Iterator[list[int]]:
    """Repeat each attack in a thread of its own until the block ends. Yield the number of
    repetitions per attack.

    Sockets that an attack returns are closed before its next repetition.
    """
    made = [0] * len(attacks)
    over = threading.Event()

    def repeat(number: int) -> None:
        while not over.is_set():
            with ExitStack() as held, suppress(OSError):
                result = attacks[number]()
                for wire in result if isinstance(result, list) else [result]:
                    if isinstance(wire, socket.socket):
                        held.enter_context(wire)
                made[number] += 1

    threads = [
        threading.Thread(target=repeat, args=(number,), daemon=True)
        for number in range(len(attacks))
    ]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=2 * PATIENCE_S)


def error_of(said: bytes) -> tuple[int, str]:
    """Return status and error code of the last response in the received bytes."""
    head, _, body = said.rpartition(b"\r\n\r\n")
    assert b"application/json" in head, said[:300]
    return int(head.rpartition(b"HTTP/1.1 ")[2].split()[0]), json.loads(body)["error"]["code"]
