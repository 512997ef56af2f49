"""Handshakes of span connections on real sockets: clients and listeners that do not prove the key
are refused.
"""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import SpanUnreachable
from fleet.process.free_ports import free_port
from fleet.process.unix_sockets import listen_at
from fleet.spans.net.addresses import SpanAddress, address_text, connect, parse_address
from fleet.spans.net.connection import SpanArrivals
from fleet.spans.net.dial import dial
from fleet.spans.net.handshake import (
    CHALLENGE,
    ENVELOPE,
    HELLO,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF,
    VERSION,
    AcceptHandshake,
    DialHandshake,
    HandshakeMessage,
    HandshakeRefused,
    MessageBuffer,
    encode_message,
)
from fleet.spans.net.listener import MAX_HANDSHAKES, SpanListener
from tests.span_peers import (
    KEY,
    WAIT_S,
    ListenerUnderTest,
    connected,
    dial_as,
    is_ended,
    serving,
    span_threads,
    take_frames,
)
from tests.support import wait_until

OTHER_KEY = b"o" * 32


@pytest.fixture(params=["tcp", "unix"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ListenerUnderTest]:
    with serving(place="127.0.0.1" if request.param == "tcp" else tmp_path / "sockets") as served:
        yield served


def receive_message(sock: socket.socket) -> HandshakeMessage:
    """Receive one handshake message on a bare socket."""
    buffer = MessageBuffer()
    while received := sock.recv(buffer.num_missing()):
        if (message := buffer.append(received)) is not None:
            return message
    raise AssertionError("the connection ended before a message")


@contextmanager
def scripted_listener(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Serve one client on a bare socket, in a thread; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError), server.accept()[0] as sock:
                sock.settimeout(WAIT_S)
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


def refusal_of(address: SpanAddress, *, key: bytes = KEY, timeout_s: float = WAIT_S) -> str:
    """Dial an address that must refuse the connection, and return the error message."""
    with pytest.raises(SpanUnreachable) as caught:
        dial(
            address,
            key=key,
            own_name="dialer",
            purpose="neighbour",
            arrivals=SpanArrivals(),
            timeout_s=timeout_s,
        )
    assert caught.value.retryable and caught.value.code == "span_unreachable"
    assert address_text(address) in caught.value.message
    return caught.value.message


def test_dialer_with_another_key_is_refused(served: ListenerUnderTest) -> None:
    message = refusal_of(served.listener.address, key=OTHER_KEY)
    assert "another key" in message and "security.fleet_secret" in message
    assert served.accepts_another()


def test_proof_of_another_key_is_refused_by_the_listener(served: ListenerUnderTest) -> None:
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(DialHandshake(OTHER_KEY, "dialer", "anchor").hello())
        receive_message(sock)
        sock.sendall(encode_message(PROOF, bytes(MAC_BYTES)))
        assert is_ended(sock)
    assert served.accepts_another()


def test_listener_with_another_key_is_refused_by_the_dialer() -> None:
    def answer(sock: socket.socket) -> None:
        challenge = AcceptHandshake(OTHER_KEY, "acceptor").receive(receive_message(sock))
        assert isinstance(challenge, bytes)
        sock.sendall(challenge)
        assert is_ended(sock)

    with scripted_listener(answer) as address:
        assert "another key" in refusal_of(address)


def test_mac_of_the_listener_sent_back_to_it_is_refused(served: ListenerUnderTest) -> None:
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(DialHandshake(OTHER_KEY, "dialer", "anchor").hello())
        challenge = receive_message(sock)
        sock.sendall(encode_message(PROOF, challenge.body[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]))
        assert is_ended(sock)
    assert served.accepts_another()


def test_messages_of_the_dialer_sent_back_to_it_are_refused() -> None:
    def answer(sock: socket.socket) -> None:
        hello = receive_message(sock)
        sock.sendall(encode_message(hello.kind, hello.body))
        assert is_ended(sock)

    with scripted_listener(answer) as address:
        assert f"message {HELLO}" in refusal_of(address)


def test_proof_of_an_earlier_connection_is_refused(served: ListenerUnderTest) -> None:
    handshake = DialHandshake(KEY, "dialer", "anchor")
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(handshake.hello())
        _, proof = handshake.answer(receive_message(sock))
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(handshake.hello())
        receive_message(sock)
        sock.sendall(proof)
        assert is_ended(sock)
    assert served.accepts_another()


@pytest.mark.parametrize(("offered", "claimed"), [("anchor", "neighbour"), ("neighbour", "anchor")])
def test_purpose_changed_under_way_is_refused(
    served: ListenerUnderTest, offered: str, claimed: str
) -> None:
    handshake = DialHandshake(KEY, "dialer", offered)
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(
            encode_message(
                HELLO, receive_body(handshake.hello()).replace(offered.encode(), claimed.encode())
            )
        )
        challenge = receive_message(sock)
        with pytest.raises(HandshakeRefused, match="another key"):
            handshake.answer(challenge)


def receive_body(message: bytes) -> bytes:
    return message[ENVELOPE.size + len(VERSION) :]


def test_connection_back_to_the_same_process_is_refused(served: ListenerUnderTest) -> None:
    with pytest.raises(SpanUnreachable, match="leads back to this process"):
        dial_as("acceptor", served.listener.address, SpanArrivals())
    assert served.accepts_another()


def test_dialer_names_both_versions_if_the_listener_has_another() -> None:
    def answer(sock: socket.socket) -> None:
        receive_message(sock)
        sock.sendall(encode_message(CHALLENGE, b"", "fleet-span/99"))
        assert is_ended(sock)

    with scripted_listener(answer) as address:
        message = refusal_of(address)
    assert VERSION in message and "fleet-span/99" in message and "one version of Fleet" in message


def test_listener_names_both_versions_if_the_dialer_has_another(
    served: ListenerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(encode_message(HELLO, b"other fields", "fleet-span/99"))
        assert receive_message(sock).version == VERSION
        assert is_ended(sock)
    assert VERSION in caplog.text and "fleet-span/99" in caplog.text
    assert served.accepts_another()


BAD_CLIENTS = {
    "garbage": b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    "a huge length": ENVELOPE.pack(MAGIC, HELLO, len(VERSION), 0xFFFF) + VERSION.encode(),
    "the last message first": encode_message(PROOF, bytes(MAC_BYTES)),
    "an empty hello": encode_message(HELLO, b""),
    "a name longer than the message": encode_message(
        HELLO, bytes(NONCE_BYTES) + b"\xff\xff" + b"name"
    ),
}


@pytest.mark.parametrize("sent", BAD_CLIENTS.values(), ids=list(BAD_CLIENTS))
def test_client_that_sends_something_else_is_refused(
    served: ListenerUnderTest, sent: bytes
) -> None:
    with connect(served.listener.address, WAIT_S) as sock:
        sock.sendall(sent)
        assert is_ended(sock)
        assert served.accepts_another()


@pytest.mark.parametrize("num_bytes", [0, 4, None], ids=["nothing", "part of a hello", "a hello"])
def test_silent_client_is_refused_after_a_time_and_others_connect_meanwhile(
    num_bytes: int | None,
) -> None:
    sent = DialHandshake(KEY, "dialer", "anchor").hello()[:num_bytes]
    with (
        serving(handshake_timeout_s=1.0) as served,
        connect(served.listener.address, WAIT_S) as sock,
    ):
        sock.sendall(sent)
        assert served.accepts_another()
        while sock.recv(1000):
            pass  # the challenge


def test_silent_clients_in_any_number_leave_room_for_others(served: ListenerUnderTest) -> None:
    silent = [connect(served.listener.address, WAIT_S) for _ in range(MAX_HANDSHAKES + 5)]
    assert served.accepts_another()
    assert all(is_ended(sock) for sock in silent[:5])
    for sock in silent:
        sock.close()


def test_silent_clients_cost_no_threads_and_few_files(served: ListenerUnderTest) -> None:
    this, num_clients = psutil.Process(), 3 * MAX_HANDSHAKES
    num_threads, num_files = threading.active_count(), this.num_fds()
    silent: list[socket.socket] = []
    for _ in range(num_clients):
        silent.append(connect(served.listener.address, WAIT_S))
        assert threading.active_count() == num_threads
    wait_until(
        lambda: this.num_fds() <= num_files + num_clients + MAX_HANDSHAKES,
        "older clients to be dropped",
    )
    for sock in silent:
        sock.close()


@pytest.mark.parametrize("refused", ["span-writer", "span-reader"])
@pytest.mark.parametrize("end", ["dialer", "acceptor"])
def test_connection_that_cannot_start_its_threads_leaves_nothing_open(
    served: ListenerUnderTest, monkeypatch: pytest.MonkeyPatch, end: str, refused: str
) -> None:
    """A connection whose threads cannot be started, at the limit of threads, leaves nothing open,
    and the listener accepts the next one.
    """
    start, peer_of = threading.Thread.start, {"dialer": "acceptor", "acceptor": "dialer"}
    this, refusals = psutil.Process(), list[str]()
    num_files = this.num_fds()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"{refused}-{peer_of[end]}" and not refusals:
            refusals.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with suppress(SpanUnreachable):
        dial_as("dialer", served.listener.address, SpanArrivals()).close()
    wait_until(lambda: refusals and not span_threads_of_connections(), "the threads to end")
    wait_until(lambda: this.num_fds() <= num_files, "the sockets to be closed")
    served.arrivals.take(0)
    assert served.accepts_another()


def span_threads_of_connections() -> list[str]:
    return [name for name in span_threads() if not name.startswith("span-listener")]


@pytest.mark.parametrize(
    "length", [3, 300], ids=["a short folder", "a folder longer than an address"]
)
def test_unix_listener_is_reached_by_its_user_alone_and_leaves_nothing(
    tmp_path: Path, length: int
) -> None:
    folder = tmp_path / ("deep/" * (length // 5)) / "sockets"
    folder.mkdir(mode=0o700, parents=True)
    dead = listen_at(folder / "dead.sock", backlog=1)
    dead.close()
    os.utime(folder / "dead.sock", (0, 0))
    with serving(place=folder) as served:
        assert served.accepts_another()
        (path,) = folder.iterdir()
        assert path == served.listener.address and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == []


def test_unix_listener_names_a_folder_that_cannot_have_sockets(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SpanUnreachable,
        match=r"cannot listen .* at .*/file: .*; choose a folder .* --set data_dir=DIR",
    ):
        SpanListener(tmp_path / "file", arrivals=SpanArrivals(), key=KEY, own_name="acceptor")


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:port", "host:70000", "unix:", "unix:a/b", "unix:/a\0b"],
)
def test_unreadable_address_is_none(text: str) -> None:
    assert parse_address(text) is None


def messages_of(sent: bytes) -> Iterator[HandshakeMessage]:
    """Yield the messages that a listener reads from the bytes `sent`. Raises: HandshakeRefused."""
    buffer = MessageBuffer()
    while sent and (num := buffer.num_missing()):
        message = buffer.append(sent[:num])
        sent = sent[num:]
        if message is not None:
            yield message


@given(data=st.binary(max_size=700))
def test_listener_admits_no_arbitrary_bytes(data: bytes) -> None:
    accept = AcceptHandshake(KEY, "acceptor")
    with suppress(HandshakeRefused):
        for message in messages_of(data):
            assert isinstance(accept.receive(message), bytes), "admitted without a proof"


@given(at=st.integers(0, 10**3), byte=st.integers(1, 255), of_dialer=st.booleans())
def test_each_end_refuses_a_damaged_message(at: int, byte: int, of_dialer: bool) -> None:
    dialer, accept = DialHandshake(KEY, "dialer", "purpose"), AcceptHandshake(KEY, "acceptor")

    def damaged(sent: bytes, *, is_damaged: bool) -> HandshakeMessage:
        changed = bytearray(sent)
        changed[at % len(changed)] ^= byte if is_damaged else 0
        return next(messages_of(bytes(changed) + bytes(2**9)))

    with pytest.raises((HandshakeRefused, StopIteration)):
        challenge = accept.receive(damaged(dialer.hello(), is_damaged=of_dialer))
        assert isinstance(challenge, bytes)
        dialer.answer(damaged(challenge, is_damaged=not of_dialer))


def test_dialer_does_not_wait_longer_than_its_time_for_a_silent_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "no answer within 0.1 s" in refusal_of(server.getsockname(), timeout_s=0.1)


def test_dialer_names_address_cause_and_remedy_if_no_process_listens() -> None:
    message = refusal_of(("127.0.0.1", free_port()))
    assert "refused" in message.lower() and "check that the worker runs" in message


def test_closed_listener_accepts_no_more_and_keeps_its_connections(
    served: ListenerUnderTest,
) -> None:
    with connected(served) as pair:
        served.listener.close()
        served.listener.close()
        gone = "no such file" if isinstance(served.listener.address, Path) else "refused"
        assert gone in refusal_of(served.listener.address).lower()
        pair.dialer.send(b"still open")
        assert take_frames(pair.acceptor_arrivals, 1) == [(b"still open", b"")]


def test_listener_names_an_address_that_it_cannot_bind() -> None:
    with pytest.raises(
        SpanUnreachable,
        match=r"cannot listen .* at 192\.0\.2\.1:0: .*; choose an address of this host",
    ):
        SpanListener("192.0.2.1", arrivals=SpanArrivals(), key=KEY, own_name="acceptor")
