"""A ring of processes that pass messages of given sizes around, over plain TCP. Measures the
network's own time. Knows nothing about models.
"""

import socket
import time

import msgspec

CONNECT_S = 20.0
RETRY_S = 0.05


class RingPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place of one process in the ring: its address, the address of the next process, and how many
    bytes it receives and sends in each round.

    `begins`: whether this process begins every round.
    """

    own: tuple[str, int]
    following: tuple[str, int]
    num_received: int
    num_sent: int
    num_rounds: int
    begins: bool = False


def run_rounds(place: RingPlace) -> list[float]:
    """Take part in every round, and return the duration of each, the wait for the message included.
    Raises: OSError if a process does not connect, or ends early.
    """
    message, buffer, times = bytes(place.num_sent), bytearray(place.num_received), list[float]()
    with socket.create_server(place.own) as server:
        server.settimeout(CONNECT_S)
        following = _connected(place.following)
        before, _ = server.accept()
        before.settimeout(CONNECT_S)
    with before, following:
        following.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(place.num_rounds):
            began_s = time.perf_counter()
            if place.begins:
                following.sendall(message)
            _receive(before, buffer)
            times.append(time.perf_counter() - began_s)
            if not place.begins:
                following.sendall(message)
    return times


def _connected(address: tuple[str, int]) -> socket.socket:
    """Connect to the next process of the ring; retry while it does not listen yet."""
    until_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address, timeout=CONNECT_S)
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(RETRY_S)


def _receive(connection: socket.socket, buffer: bytearray) -> None:
    missing = memoryview(buffer)
    while missing:
        num_received = connection.recv_into(missing)
        if not num_received:
            raise ConnectionError("the process before this one has ended")
        missing = missing[num_received:]
