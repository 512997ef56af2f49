"""Unfinished WebSocket messages are limited in memory and time, even while the connection continues
to send.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import AttackTarget, read_to_end, read_up_to
from tests.web.conftest import Loaded, bounded, serving

PONG = b"\x8a\x00"
TOO_MUCH = b"\x03\xf5unfinished messages"
"""Beginning of a close frame with code 1013."""
TOO_SLOW = b"\x03\xf0a message came too slowly"
"""Beginning of a close frame with code 1008."""


def fragment(num_bytes: int, *, missing: int = 0) -> bytes:
    """Return the first frame of a fragmented text message, masked with zeros, without its last
    `missing` bytes.
    """
    return b"\x01\xff" + (num_bytes + missing).to_bytes(8) + bytes(4) + b"a" * num_bytes


@contextmanager
def opened(target: AttackTarget) -> Iterator[socket.socket]:
    """Open a WebSocket; return its socket once the voice session is created."""
    with attacks.open_websocket(target) as wire:
        read_up_to(wire, b"session.created")
        yield wire


def test_unfinished_websocket_messages_are_bounded_together(loaded: Loaded) -> None:
    with serving(bounded(loaded, body_memory_mib=1)) as gateway:
        target = AttackTarget.of(gateway.url)
        with opened(target) as first, opened(target) as second, opened(target) as third:
            first.sendall(fragment(600_000) + attacks.PING)
            assert PONG in read_up_to(first, PONG)
            second.sendall(fragment(2_000_000))
            assert TOO_MUCH in read_to_end(second), (
                "what came after it does not reset the connection"
            )
            third.sendall(fragment(440_000) + attacks.PING)
            assert PONG in read_up_to(third, PONG), "the memory of a closed connection is free"
            with opened(target) as small:
                small.sendall(fragment(20_000) + attacks.PING)
                assert PONG in read_up_to(small, PONG), "a small message is always read"
                first.sendall(attacks.PING)
                assert PONG in read_up_to(first, PONG), "the others stay open"

        def fits() -> bool:
            with opened(target) as wire:
                wire.sendall(fragment(1_000_000) + attacks.PING)
                return PONG in read_up_to(wire, PONG)

        wait_until(fits, "the memory of connections that have ended to be free")


@pytest.mark.parametrize(
    "begun, dripped",
    [
        (fragment(1000), attacks.PING),
        (fragment(1000), b"\x00\x80\0\0\0\0"),
        (fragment(1000, missing=1), b""),
        (fragment(100_000, missing=10**6), b"a"),
    ],
)
def test_unfinished_websocket_message_without_progress_is_closed(
    loaded: Loaded, begun: bytes, dripped: bytes
) -> None:
    """An unfinished WebSocket message without progress is closed; pings, empty fragments and single
    bytes do not count as progress.
    """
    with (
        serving(bounded(loaded, body_timeout_s=0.3)) as gateway,
        opened(AttackTarget.of(gateway.url)) as wire,
    ):
        wire.sendall(begun)
        wire.settimeout(0.02)
        received = b""

        def ended() -> bool:
            nonlocal received
            try:
                piece = wire.recv(65_536)
            except TimeoutError:
                wire.send(dripped)
                return False
            received += piece
            return not piece or TOO_SLOW in received

        wait_until(ended, "the end of the connection")
    assert TOO_SLOW in received


def test_websocket_without_unfinished_message_stays_open(loaded: Loaded) -> None:
    with (
        serving(bounded(loaded, body_timeout_s=0.1)) as gateway,
        opened(AttackTarget.of(gateway.url)) as wire,
    ):
        with opened(AttackTarget.of(gateway.url)) as unfinished:
            unfinished.sendall(fragment(1000))
            assert TOO_SLOW in read_to_end(unfinished)
        wire.sendall(attacks.PING)
        assert PONG in read_up_to(wire, PONG)
