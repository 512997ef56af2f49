"""Large payloads of span connections by real NIXL: the same frames arrive in the same order as on
the connection alone, or the connection ends.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import TransferError
from fleet.spans.net import ring
from fleet.spans.net.connection import CLOSED_BY_PEER, CLOSED_HERE, FrameReceived, SpanArrivals
from fleet.spans.net.frames import BLOCK_AT, PREFIX
from fleet.spans.net.ring import BLOCK, BlockPort, BlockReads, RingSpace
from tests.contract.incomplete_entries import receive_queues, wait_until_spinning
from tests.span_peers import (
    KEY,
    WAIT_S,
    connected,
    dial_as,
    serving,
    take_arrivals,
    take_closed,
    take_frames,
)
from tests.support import cli_env, wait_until

pytestmark = pytest.mark.one_file_in(3, "transfers between processes")

SIZES = (0, 1, 999, 1000, 5000, 16_000, 16_001, 12_000, 3, 15_999, 70_000, 1000) * 6

PEER = """
import sys
from fleet.spans.net.connection import FrameReceived, SpanArrivals
from fleet.spans.net.listener import SpanListener
from fleet.spans.net.ring import BlockReads
arrivals = SpanArrivals(BlockReads(min_bytes=1000))
listener = SpanListener("127.0.0.1", arrivals=arrivals, key=b"%s", own_name="acceptor")
print(listener.address[1], flush=True)
while True:
    for arrival in arrivals.take(60):
        if isinstance(arrival, FrameReceived):
            arrival.connection.send(arrival.frame.header, arrival.frame.payload)
"""
"""Program of a process that sends back the frames it receives."""


def small_blocks() -> BlockReads:
    return BlockReads(min_bytes=1000, ring_bytes=64_000)


def payloads_of(sizes: tuple[int, ...]) -> list[tuple[bytes, bytes]]:
    return [
        (b"%d" % number, np.random.default_rng(number).bytes(size))
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("dials", "accepts"),
    [(True, True), (True, False), (False, True)],
    ids=["both", "dialer", "acceptor"],
)
def test_frames_of_all_sizes_arrive_whole_and_in_order(dials: bool, accepts: bool) -> None:
    """Frames of all sizes arrive whole and in order. Payloads travel on the connection if the ring
    is full, the payload too large, or the peer reads no blocks.
    """
    sent, dialer, acceptor = (
        payloads_of(SIZES),
        small_blocks() if dials else None,
        small_blocks() if accepts else None,
    )
    with serving(blocks=acceptor) as served, connected(served, dialer) as pair:
        pair.dialer.send(b"first", b"")
        pair.acceptor.send(b"first", b"")
        for arrivals in (pair.dialer_arrivals, pair.acceptor_arrivals):
            take_frames(arrivals, 1)  # each end knows then if the other one reads blocks
        for header, payload in sent:
            pair.dialer.send(header, payload[:100], payload[100:])
            pair.acceptor.send(header, payload)
        assert take_frames(pair.acceptor_arrivals, len(sent)) == sent
        assert take_frames(pair.dialer_arrivals, len(sent)) == sent
        uses = dials and accepts
        assert (
            all(0 < num < len(sent) for num in pair.dialer.num_blocks)
            if uses
            else pair.dialer.num_blocks == (0, 0)
        )
        wait_until(
            lambda: pair.dialer.num_bytes_sent == pair.acceptor.num_bytes_received,
            "equal counts of bytes",
        )


def test_block_that_changed_before_it_was_read_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = BlockPort.write

    def write_another(
        self: BlockPort, buffers: list[memoryview], num_bytes: int
    ) -> tuple[bytes, bytes | None] | None:
        written = write(self, buffers, num_bytes)
        assert written is not None
        address, length, stamp = BLOCK.unpack(written[0])
        return BLOCK.pack(address, length, stamp + 1), written[1]

    monkeypatch.setattr(BlockPort, "write", write_another)
    with serving(blocks=small_blocks()) as served, connected(served, small_blocks()) as pair:
        pair.acceptor.send(b"first")
        take_frames(pair.dialer_arrivals, 1)
        pair.dialer.send(b"", bytes(2000))
        assert (
            take_closed(pair.acceptor_arrivals) == "a block of the peer changed before it was read"
        )


def test_peer_that_lives_and_cannot_be_read_is_not_read_on_later_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live peer whose memory cannot be read is not read on later connections; otherwise its route
    would be set up again and again.
    """

    def refuse(self: BlockPort, block: bytes) -> bytearray:
        raise TransferError("the kernel permits no copies")

    monkeypatch.setattr(BlockPort, "read", refuse)
    blocks = small_blocks()
    with serving(blocks=blocks) as served:
        with connected(served, small_blocks()) as pair:
            pair.acceptor.send(b"first")
            take_frames(pair.dialer_arrivals, 1)
            pair.dialer.send(b"", bytes(2000))
            assert (
                take_closed(pair.acceptor_arrivals) == "the kernel permits no copies"
                and not blocks.is_usable
            )
        with connected(served, small_blocks()) as pair:
            pair.acceptor.send(b"first")
            take_frames(pair.dialer_arrivals, 1)
            pair.dialer.send(b"", bytes(2000))
            assert take_frames(pair.acceptor_arrivals, 1) == [
                (b"", bytes(2000))
            ] and pair.dialer.num_blocks == (0, 0)
            pair.dialer.close()
            assert take_closed(pair.acceptor_arrivals) == CLOSED_BY_PEER


def test_peer_that_has_ended_is_no_reason_to_do_without_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that has ended is no reason to stop using block reads. The end of its connection is
    behind data that was not read yet, more than the kernel shows at a time.
    """
    has_ended = threading.Event()

    def refuse(self: BlockPort, block: bytes) -> bytearray:
        assert has_ended.wait(WAIT_S)
        raise TransferError("its memory is gone")

    monkeypatch.setattr(BlockPort, "read", refuse)
    blocks = small_blocks()
    with serving(blocks=blocks) as served:
        sock, _ = served.connect_raw()
        # with unread bytes, the kernel would reset the connection
        sock.recv(PREFIX.size, socket.MSG_WAITALL)
        sock.sendall(PREFIX.pack(BLOCK_AT, 0, BLOCK.size) + bytes(BLOCK.size))
        sock.settimeout(0.2)
        with suppress(TimeoutError):
            while True:
                sock.sendall(bytes(1 << 20))
        sock.close()
        has_ended.set()
        assert take_closed(served.arrivals) == "its memory is gone" and blocks.is_usable


def test_closed_connection_ends_reads_and_takes_no_more_blocks() -> None:
    with serving(blocks=small_blocks()) as served, connected(served, small_blocks()) as pair:
        pair.acceptor.send(b"first")
        take_frames(pair.dialer_arrivals, 1)
        for _ in range(50):
            pair.dialer.send(b"", bytes(9000))
        pair.dialer.close()
        pair.dialer.send(b"", bytes(9000))
        assert take_closed(pair.dialer_arrivals) == CLOSED_HERE


@pytest.mark.parametrize("dies_while", ["it reads", "it is read"])
def test_killed_peer_ends_the_connection_and_not_this_process(dies_while: str) -> None:
    """A killed peer ends its connection but not this process. The kill comes while large blocks are
    transferred, in either direction; the next peer is then served normally.
    """
    for number in range(3):
        peer = subprocess.Popen(
            [sys.executable, "-c", PEER % KEY.decode()],
            stdout=subprocess.PIPE,
            text=True,
            env=cli_env(),
        )
        assert peer.stdout is not None
        address = "127.0.0.1", int(peer.stdout.readline())
        arrivals = SpanArrivals(BlockReads(min_bytes=1000))
        connection = dial_as("dialer", address, arrivals)
        connection.send(b"first", b"")
        assert isinstance(take_arrivals(arrivals, 1)[0], FrameReceived)
        payload = np.random.default_rng(number).bytes(8 << 20)
        for _ in range(6):
            connection.send(b"block", payload)
        received = arrivals.take(WAIT_S) if dies_while == "it is read" else []
        peer.kill()
        peer.wait()
        peer.stdout.close()
        wait_until(
            lambda connection=connection: connection.is_closed, "the end of the connection", WAIT_S
        )
        connection.close()
        received += arrivals.take(0)
        blocks = [
            bytes(arrival.frame.payload)
            for arrival in received
            if isinstance(arrival, FrameReceived)
        ]
        assert all(block == payload for block in blocks) and (blocks or dies_while == "it reads")
        assert connection.num_blocks[1] > 0


def test_agents_that_cannot_close_do_not_hold_up_the_end_of_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a connection is reported although the agents of both ends cannot close, since a
    message to each was begun and never completed.
    """
    monkeypatch.setattr(ring, "AGENT_CLOSE_S", 0.1)
    before = receive_queues(os.getpid())
    with serving(blocks=small_blocks()) as served, connected(served, small_blocks()) as pair:
        pair.acceptor.send(b"first")
        take_frames(pair.dialer_arrivals, 1)
        pair.dialer.send(b"", bytes(2000))
        take_frames(pair.acceptor_arrivals, 1)
        assert pair.acceptor.num_blocks == (1, 0)
        queues = receive_queues(os.getpid()) - before
        assert len(queues) == 2
        for queue in queues:
            queue.begin_entry()
        try:
            wait_until_spinning(len(queues))
            pair.dialer.close()
            assert take_closed(pair.dialer_arrivals) == CLOSED_HERE
            assert take_closed(pair.acceptor_arrivals) == CLOSED_BY_PEER
        finally:
            for queue in queues:
                queue.withdraw_entry()


@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60))
def test_space_of_a_ring_is_contiguous_and_never_given_twice(steps: list[int | None]) -> None:
    """Ranges reserved in a ring are contiguous, and never given twice. `steps`: number of bytes to
    reserve, or None to free the oldest range.
    """
    space, held = RingSpace(64), list[range]()
    for size in steps:
        if size is None:
            if held:
                space.free_first()
                held.pop(0)
            continue
        start = space.reserve(size)
        if start is None:
            assert held, "an empty ring has room"
            continue
        added = range(start, start + size)
        assert added.stop <= 64 and not any(set(added) & set(other) for other in held)
        held.append(added)
    assert space.num_reserved == len(held)
