"""Connections between span workers on real sockets: frames, backlog of unsent frames, ends."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from fleet.spans.net import connection as connection_module
from fleet.spans.net.addresses import address_text
from fleet.spans.net.connection import (
    CLOSED_BY_PEER,
    CLOSED_HERE,
    Arrival,
    ConnectionClosed,
    ConnectionOpened,
    FrameReceived,
    SpanArrivals,
)
from fleet.spans.net.dial import dial
from fleet.spans.net.frames import MAGIC, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PREFIX, ByteSource
from tests.span_peers import (
    KEY,
    WAIT_S,
    ListenerUnderTest,
    SpanPair,
    connected,
    dial_as,
    is_ended,
    serving,
    take_arrivals,
    take_closed,
    take_frames,
)
from tests.support import cli_env, wait_until


@pytest.fixture(params=["tcp", "unix"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ListenerUnderTest]:
    with serving(place="127.0.0.1" if request.param == "tcp" else tmp_path / "sockets") as served:
        yield served


@pytest.fixture
def pair(served: ListenerUnderTest) -> Iterator[SpanPair]:
    with connected(served) as pair:
        yield pair


# Frames


def test_opened_connection_names_its_peer_and_purpose(served: ListenerUnderTest) -> None:
    connection = dial(
        served.listener.address,
        key=KEY,
        own_name="stage@host:1",
        purpose="anchor",
        arrivals=SpanArrivals(),
        timeout_s=WAIT_S,
    )
    opened = served.opened()
    assert (connection.peer, opened.connection.peer, opened.purpose) == (
        "acceptor",
        "stage@host:1",
        "anchor",
    )
    connection.close()
    assert take_closed(served.arrivals) == CLOSED_BY_PEER


def test_frames_arrive_whole_and_in_order_in_both_directions(pair: SpanPair) -> None:
    sizes = [0, 1, 100, 16 * 1024, 0, 70_000, 20 * 2**20, 3, 5 * 2**20, 0]
    payloads = [np.random.default_rng(number).bytes(size) for number, size in enumerate(sizes)]
    headers = [b"%d" % number * (number % 3) for number in range(len(sizes))]
    for header, payload in zip(headers, payloads, strict=True):
        pair.dialer.send(header, payload)
        pair.acceptor.send(header, payload[::-1])
    assert take_frames(pair.acceptor_arrivals, len(sizes)) == list(
        zip(headers, payloads, strict=True)
    )
    assert take_frames(pair.dialer_arrivals, len(sizes)) == [
        (header, payload[::-1]) for header, payload in zip(headers, payloads, strict=True)
    ]
    num_bytes = sum(map(len, payloads)) + sum(map(len, headers)) + len(sizes) * PREFIX.size
    for connection in (pair.dialer, pair.acceptor):
        # The peer can have the last bytes before the call that sent them returns in the writer.
        wait_until(lambda end=connection: end.backlog_bytes == 0, "an empty backlog")
        assert connection.num_bytes_sent == connection.num_bytes_received == num_bytes


def test_frames_of_several_threads_arrive_whole(pair: SpanPair) -> None:
    def send_all(number: int) -> None:
        for size in range(50):
            pair.dialer.send(b"%d" % number, bytes([number]) * (size * 5000))

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    frames = take_frames(pair.acceptor_arrivals, 200)
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [payload for header, payload in frames if header == b"%d" % number] == [
            bytes([number]) * (size * 5000) for size in range(50)
        ]


ROWS = np.arange(5 * 6, dtype=np.float32).reshape(5, 6)
BUFFERS: dict[str, Sequence[np.ndarray]] = {
    "float32 matrix and its rows": [ROWS, ROWS[1:4], ROWS[2]],
    "float16": [np.linspace(-1, 1, 77, dtype=np.float16)],
    "integers, booleans and complex": [
        np.arange(9, dtype=np.int64),
        np.array([True, False]),
        np.ones(3, np.complex64),
    ],
    "other byte order": [np.arange(9, dtype=">u4")],
    "empty ones between": [np.empty((0, 4), np.float32), ROWS, np.empty(0, np.int8), ROWS[0]],
    "more than one call takes": [np.full(3, number, np.uint16) for number in range(3000)],
    "read-only": [np.frombuffer(b"fixed", np.uint8)],
}


@pytest.mark.parametrize("arrays", BUFFERS.values(), ids=list(BUFFERS))
def test_buffers_of_any_item_type_arrive_as_their_bytes(
    pair: SpanPair, arrays: Sequence[np.ndarray]
) -> None:
    pair.dialer.send(b"rows", *[array.data for array in arrays])
    pair.dialer.send(b"end")
    expected = b"".join(array.tobytes() for array in arrays)
    assert take_frames(pair.acceptor_arrivals, 2) == [(b"rows", expected), (b"end", b"")]


@pytest.mark.parametrize(
    "buffer",
    [ROWS[:, 1].data, ROWS.T.data, memoryview(b"bytes")[::2]],
    ids=["column", "transposed", "every second"],
)
def test_buffer_that_is_not_contiguous_is_refused_and_sends_nothing(
    pair: SpanPair, buffer: ByteSource
) -> None:
    with pytest.raises(TypeError, match="contiguous"):
        pair.dialer.send(b"rows", buffer)
    pair.dialer.send(b"end")
    assert take_frames(pair.acceptor_arrivals, 1) == [(b"end", b"")]


def test_received_payload_is_not_overwritten_by_later_frames(pair: SpanPair) -> None:
    for number in range(20):
        pair.dialer.send(b"", bytes([number]) * 1000)
    frames = [
        arrival.frame
        for arrival in take_arrivals(pair.acceptor_arrivals, 20)
        if isinstance(arrival, FrameReceived)
    ]
    assert [bytes(frame.payload) for frame in frames] == [
        bytes([number]) * 1000 for number in range(20)
    ]


# Backlog


def test_sender_does_not_wait_for_a_peer_that_does_not_read(served: ListenerUnderTest) -> None:
    sock, connection = served.connect_raw()
    payload = np.random.default_rng(0).bytes(4 * 2**20)
    for number in range(16):
        connection.send(b"%2d" % number, payload)
    num_bytes = 16 * (PREFIX.size + 2 + len(payload))
    assert 0 < connection.backlog_bytes < num_bytes
    with sock, sock.makefile("rb") as stream:
        expected = b"".join(
            PREFIX.pack(MAGIC, 2, len(payload)) + b"%2d" % number + payload for number in range(16)
        )
        assert stream.read(num_bytes) == expected
        wait_until(lambda: connection.backlog_bytes == 0, "an empty backlog")
        assert connection.num_bytes_sent == num_bytes
    assert take_closed(served.arrivals) == CLOSED_BY_PEER


def test_sent_buffers_are_free_once_the_backlog_is_empty(served: ListenerUnderTest) -> None:
    sock, connection = served.connect_raw()
    buffer = bytearray(32 * 2**20)
    connection.send(b"", buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    with sock, sock.makefile("rb") as stream:
        stream.read(PREFIX.size + len(buffer))
        wait_until(lambda: connection.backlog_bytes == 0, "an empty backlog")
    take_closed(served.arrivals)
    buffer.append(0)


def test_closing_with_a_backlog_drops_it(served: ListenerUnderTest) -> None:
    sock, connection = served.connect_raw()
    connection.send(b"", bytes(64 * 2**20))
    connection.close()
    assert connection.backlog_bytes == 0
    assert take_closed(served.arrivals) == CLOSED_HERE
    sock.close()


def test_end_of_sending_is_reported_once_for_each_frame_in_order(served: ListenerUnderTest) -> None:
    """The end of sending is reported once for each frame, in order: for a frame that the kernel
    takes immediately, and for frames of a backlog.
    """
    sock, connection = served.connect_raw()
    sizes, ended = (10, 8 * 2**20, 20, 8 * 2**20), list[int]()
    connection.send(b"", bytes(sizes[0]), when_sent=lambda: ended.append(0))
    assert ended == [0]
    for number in (1, 2, 3):
        connection.send(
            b"", bytes(sizes[number]), when_sent=lambda number=number: ended.append(number)
        )
    assert ended == [0] and connection.backlog_bytes
    with sock, sock.makefile("rb") as stream:
        stream.read(sum(sizes) + len(sizes) * PREFIX.size)
        wait_until(lambda: len(ended) == len(sizes), "the end of sending")
        assert ended == [0, 1, 2, 3] and connection.backlog_bytes == 0
    take_closed(served.arrivals)


def test_end_of_sending_is_not_reported_for_dropped_frames(served: ListenerUnderTest) -> None:
    sock, connection = served.connect_raw()
    ended = list[int]()
    connection.send(b"", bytes(64 * 2**20), when_sent=lambda: ended.append(0))
    connection.close()
    connection.send(b"late", when_sent=lambda: ended.append(1))
    assert not ended
    take_closed(served.arrivals)
    sock.close()


def test_arrivals_count_the_bytes_of_all_connections_closed_ones_included(
    served: ListenerUnderTest,
) -> None:
    arrivals = SpanArrivals()
    for number in range(3):
        connection = dial_as(f"dialer-{number}", served.listener.address, arrivals)
        accepted = served.opened().connection
        connection.send(b"there", bytes(100 * number))
        accepted.send(b"back", bytes(7))
        take_arrivals(arrivals, 1)
        take_arrivals(served.arrivals, 1)
        there, back = (
            sum(PREFIX.size + 5 + 100 * each for each in range(number + 1)),
            (number + 1) * (PREFIX.size + 11),
        )
        assert arrivals.num_bytes == (back, there) and served.arrivals.num_bytes == (there, back)
        connection.close()
        take_closed(served.arrivals)
        take_closed(arrivals)
        assert arrivals.num_bytes == (back, there) and served.arrivals.num_bytes == (there, back)


def test_frames_have_the_times_of_their_arrivals(pair: SpanPair) -> None:
    before_s = time.monotonic()
    pair.dialer.send(b"one")
    pair.dialer.send(b"two")
    taken = take_arrivals(pair.acceptor_arrivals, 2)
    times_s = [arrival.at_s for arrival in taken if isinstance(arrival, FrameReceived)]
    assert before_s <= times_s[0] <= times_s[1] <= time.monotonic()


# Ends


@pytest.mark.parametrize("side", ["dialer", "acceptor"])
def test_closing_either_side_ends_both_once(pair: SpanPair, side: str) -> None:
    closing = pair.dialer if side == "dialer" else pair.acceptor
    ends = {"dialer": pair.dialer_arrivals, "acceptor": pair.acceptor_arrivals}
    closing.send(b"last")
    closing.close()
    closing.close()
    other = next(name for name in ends if name != side)
    frame, closed = take_arrivals(ends[other], 2)
    assert isinstance(frame, FrameReceived) and frame.frame.header == b"last"
    assert isinstance(closed, ConnectionClosed) and closed.reason == CLOSED_BY_PEER
    assert take_closed(ends[side]) == CLOSED_HERE
    for connection in (pair.dialer, pair.acceptor):
        connection.send(b"late", bytes(100))
        assert connection.backlog_bytes == 0
    assert ends[other].take(0) == ends[side].take(0) == []


def test_accepted_connections_are_closed_together_before_anything_of_them_is_taken(
    served: ListenerUnderTest,
) -> None:
    dialers = [SpanArrivals() for _ in range(8)]
    connections = [
        dial_as(f"dialer-{number}", served.listener.address, each)
        for number, each in enumerate(dialers)
    ]
    for connection in connections:
        connection.send(b"first")
    # The listener verifies a handshake after the dialer has returned.
    num_bytes = sum(connection.num_bytes_sent for connection in connections)
    wait_until(lambda: served.arrivals.num_bytes[0] == num_bytes, "a frame of each connection")
    served.listener.close()
    served.arrivals.close_connections()
    assert [take_closed(arrivals) for arrivals in dialers] == [CLOSED_BY_PEER] * 8
    assert all(connection.is_closed for connection in connections)


def test_peer_that_resets_the_connection_ends_it_once_while_sending(
    served: ListenerUnderTest,
) -> None:
    sock, connection = served.connect_raw()
    connection.send(b"", bytes(32 * 2**20))
    sock.recv(100)
    sock.close()  # with unread data: the kernel resets the connection
    arrived: list[Arrival] = []

    def send_until_arrival() -> bool:
        connection.send(b"more", bytes(1000))
        arrived.extend(served.arrivals.take(0))
        return bool(arrived)

    wait_until(send_until_arrival, "the end of the connection")
    assert [type(arrival) for arrival in arrived + served.arrivals.take(0.05)] == [ConnectionClosed]


DIALER = f"""
import sys
from fleet.spans.net.addresses import parse_address
from fleet.spans.net.connection import SpanArrivals
from fleet.spans.net.dial import dial
arrivals = SpanArrivals()
dial(
    parse_address(sys.argv[1]),
    key={KEY!r}, own_name="child", purpose="neighbour", arrivals=arrivals, timeout_s=30,
)
arrivals.take(600)
"""


def test_killed_process_ends_its_connection(served: ListenerUnderTest) -> None:
    command = [sys.executable, "-c", DIALER, address_text(served.listener.address)]
    with subprocess.Popen(command, env=cli_env()) as process:
        try:
            assert served.opened().connection.peer == "child"
        finally:
            process.kill()
    assert take_closed(served.arrivals) == CLOSED_BY_PEER


BAD_STREAMS = {
    "header beyond the limit": (
        PREFIX.pack(MAGIC, MAX_HEADER_BYTES + 1, 0),
        f"{MAX_HEADER_BYTES + 1}.*limits",
    ),
    "payload beyond the limit": (
        PREFIX.pack(MAGIC, 0, MAX_PAYLOAD_BYTES + 1),
        f"{MAX_PAYLOAD_BYTES + 1}.*limits",
    ),
    "not a frame": (b"GET / HTTP/1.1\r\n\r\n", "in place of a frame.*one version"),
    "part of a prefix": (PREFIX.pack(MAGIC, 1, 0)[:7], "middle of a frame"),
    "part of a header": (PREFIX.pack(MAGIC, 9, 0) + b"head", "middle of a frame"),
    "part of a payload": (PREFIX.pack(MAGIC, 1, 9) + b"hpay", "middle of a frame"),
}


@pytest.mark.parametrize(("sent", "reason"), BAD_STREAMS.values(), ids=list(BAD_STREAMS))
def test_bad_frame_closes_the_connection_with_a_reason(
    served: ListenerUnderTest, sent: bytes, reason: str
) -> None:
    sock, _ = served.connect_raw()
    with sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        assert is_ended(sock)
    assert re.search(reason, take_closed(served.arrivals))


def test_announced_payload_costs_no_memory_before_it_arrives(served: ListenerUnderTest) -> None:
    sock, connection = served.connect_raw()
    before = psutil.Process().memory_info().rss
    with sock:
        sock.sendall(PREFIX.pack(MAGIC, 0, MAX_PAYLOAD_BYTES) + bytes(10**6))
        wait_until(
            lambda: psutil.Process().memory_info().vms - before > MAX_PAYLOAD_BYTES // 2,
            "the frame to be read",
        )
        assert psutil.Process().memory_info().rss - before < MAX_PAYLOAD_BYTES // 8
    assert "middle of a frame" in take_closed(served.arrivals)
    connection.close()


def test_peer_that_receives_nothing_is_given_up(
    served: ListenerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "STALLED_S", 0.1)
    sock, connection = served.connect_raw()
    with sock:
        connection.send(b"", bytes(64 << 20))
        assert "has received nothing for" in take_closed(served.arrivals)


# Arrivals


def test_wake_ends_the_take_of_another_thread() -> None:
    arrivals = SpanArrivals()
    taken: list[list[Arrival]] = []
    thread = threading.Thread(target=lambda: taken.append(arrivals.take(600)))
    thread.start()
    arrivals.wake()
    thread.join(WAIT_S)
    assert taken == [[]] and not thread.is_alive()


def test_take_without_time_returns_waiting_arrivals() -> None:
    arrivals = SpanArrivals()
    assert arrivals.take(0) == []
    arrivals.wake()
    assert arrivals.take(600) == [], "a wake before the take counts"
    assert arrivals.take(0) == []


def test_one_queue_serves_several_connections_in_their_order(served: ListenerUnderTest) -> None:
    dialers = [
        dial_as(f"dialer-{number}", served.listener.address, SpanArrivals()) for number in range(3)
    ]
    for number in range(30):
        for dialer in dialers:
            dialer.send(b"%d" % number)
    for dialer in dialers:
        dialer.close()
    arrived = take_arrivals(served.arrivals, 3 * 32)
    for dialer_number in range(3):
        own = [
            arrival for arrival in arrived if arrival.connection.peer == f"dialer-{dialer_number}"
        ]
        assert isinstance(own[0], ConnectionOpened) and isinstance(own[-1], ConnectionClosed)
        headers = [arrival.frame.header for arrival in own if isinstance(arrival, FrameReceived)]
        assert headers == [b"%d" % number for number in range(30)]
