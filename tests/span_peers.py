"""Listener, connections and bare sockets that serve as the two ends of span connections in
tests.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.spans.net.addresses import SpanAddress, connect
from fleet.spans.net.connection import (
    Arrival,
    ConnectionClosed,
    ConnectionOpened,
    FrameReceived,
    SpanArrivals,
    SpanConnection,
)
from fleet.spans.net.dial import dial, prove
from fleet.spans.net.handshake import DialHandshake
from fleet.spans.net.listener import SpanListener
from fleet.spans.net.ring import BlockReads
from tests.support import wait_until

KEY = b"k" * 32
WAIT_S = 30.0


@dataclass(slots=True)
class SpanPair:
    """The two ends of a span connection, with a queue of arrivals for each."""

    dialer: SpanConnection
    dialer_arrivals: SpanArrivals
    acceptor: SpanConnection
    acceptor_arrivals: SpanArrivals


@dataclass(slots=True)
class ListenerUnderTest:
    """A span listener with its queue of arrivals."""

    listener: SpanListener
    arrivals: SpanArrivals

    def opened(self) -> ConnectionOpened:
        arrival = take_arrivals(self.arrivals, 1)[0]
        assert isinstance(arrival, ConnectionOpened)
        return arrival

    def connect_raw(self, name: str = "raw") -> tuple[socket.socket, SpanConnection]:
        """Return the listener's connection to a peer that is a bare socket, and that socket, after
        the handshake.
        """
        sock = connect(self.listener.address, WAIT_S)
        prove(sock, DialHandshake(KEY, name, "raw"), time.monotonic() + WAIT_S)
        sock.settimeout(WAIT_S)
        return sock, self.opened().connection

    def accepts_another(self) -> bool:
        """Return True if the listener opens and closes a further connection. Arrivals of former
        connections, whose ends may be noticed late, are ignored.
        """
        connection = dial_as("another", self.listener.address, SpanArrivals())
        try:
            opened = self._arrival_of_another(ConnectionOpened)
        finally:
            connection.close()
        return opened and self._arrival_of_another(ConnectionClosed)

    def _arrival_of_another(self, kind: type[ConnectionOpened | ConnectionClosed]) -> bool:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for arrival in self.arrivals.take(deadline_s - time.monotonic()):
                if isinstance(arrival, kind) and arrival.connection.peer == "another":
                    return True
        return False


@contextmanager
def serving(
    handshake_timeout_s: float = 5.0,
    blocks: BlockReads | None = None,
    place: str | Path = "127.0.0.1",
) -> Iterator[ListenerUnderTest]:
    """Run a listener; at the end close the connections it accepted, and check that no thread is
    left.
    """
    arrivals = SpanArrivals(blocks)
    listener = SpanListener(
        place,
        arrivals=arrivals,
        key=KEY,
        own_name="acceptor",
        handshake_timeout_s=handshake_timeout_s,
    )
    try:
        yield ListenerUnderTest(listener, arrivals)
    finally:
        listener.close()
    wait_until(lambda: not span_threads(), f"the end of the threads {span_threads()}")


@contextmanager
def connected(served: ListenerUnderTest, blocks: BlockReads | None = None) -> Iterator[SpanPair]:
    """Connect to the listener, and close both ends afterwards."""
    arrivals = SpanArrivals(blocks)
    connection = dial_as("dialer", served.listener.address, arrivals)
    pair = SpanPair(connection, arrivals, served.opened().connection, served.arrivals)
    try:
        yield pair
    finally:
        pair.dialer.close()
        pair.acceptor.close()


def dial_as(
    name: str, address: SpanAddress, arrivals: SpanArrivals, *, key: bytes = KEY
) -> SpanConnection:
    return dial(
        address, key=key, own_name=name, purpose="neighbour", arrivals=arrivals, timeout_s=WAIT_S
    )


def take_arrivals(arrivals: SpanArrivals, num: int) -> list[Arrival]:
    """Take exactly `num` arrivals."""
    taken: list[Arrival] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(taken) < num and time.monotonic() < deadline_s:
        taken += arrivals.take(deadline_s - time.monotonic())
    assert len(taken) == num, taken
    return taken


def take_frames(arrivals: SpanArrivals, num: int) -> list[tuple[bytes, bytes]]:
    """Take exactly `num` frames, and return their headers and payloads."""
    taken = take_arrivals(arrivals, num)
    assert all(isinstance(arrival, FrameReceived) for arrival in taken), taken
    return [
        (arrival.frame.header, bytes(arrival.frame.payload))
        for arrival in taken
        if isinstance(arrival, FrameReceived)
    ]


def take_closed(arrivals: SpanArrivals) -> str:
    """Take the arrival that reports the end of a connection, and check that it comes once and last;
    return the reason.
    """
    closed = take_arrivals(arrivals, 1)[0]
    assert isinstance(closed, ConnectionClosed)
    assert arrivals.take(0.05) == []
    return closed.reason


def span_threads() -> list[str]:
    """Return the names of the running threads that belong to span connections and listeners."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("span-")]


def is_ended(sock: socket.socket) -> bool:
    """Return True once the peer has closed the connection without having sent more."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
