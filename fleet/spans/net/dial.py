"""Opening of a span connection. Knows no frames."""

import socket
import time

from fleet.core.errors import SpanUnreachable
from fleet.spans.net.addresses import SpanAddress, address_text, connect
from fleet.spans.net.connection import SpanArrivals, SpanConnection
from fleet.spans.net.handshake import (
    DialHandshake,
    HandshakeMessage,
    HandshakeRefused,
    MessageBuffer,
    ProvenPeer,
)

_ADVICE = "check that the worker runs, and that firewalls let its span port pass"


def dial(
    address: SpanAddress,
    *,
    key: bytes,
    own_name: str,
    purpose: str,
    arrivals: SpanArrivals,
    timeout_s: float,
) -> SpanConnection:
    """Open a connection to the `SpanListener` at `address`, with a handshake.

    `key`: key that both sides must have. `own_name`: name of this worker. `purpose`: text that the
    listener's process receives with the connection. The listener verifies the last message after
    this returns: if it refuses, `ConnectionClosed` arrives. A new worker may have the port of one
    that has ended: compare `peer` of the returned connection with the expected name.
    Raises: SpanUnreachable if the listener does not connect, or does not prove that it has the key,
    within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    handshake = DialHandshake(key, own_name, purpose)
    try:
        sock = connect(address, timeout_s)
        try:
            peer = prove(sock, handshake, deadline_s)
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise _unreachable(address, f"no answer within {timeout_s:g} s; {_ADVICE}") from error
    except OSError as error:
        raise _unreachable(address, f"{error.strerror or error}; {_ADVICE}") from error
    except HandshakeRefused as error:
        raise _unreachable(address, error.message) from error
    return SpanConnection(sock, peer.name, arrivals)


def _unreachable(address: SpanAddress, cause: str) -> SpanUnreachable:
    return SpanUnreachable(f"no span connection to {address_text(address)}: {cause}")


def prove(sock: socket.socket, handshake: DialHandshake, deadline_s: float) -> ProvenPeer:
    """Run the dialer's side of a handshake on a socket; return the listener's proven name.

    Raises: HandshakeRefused, OSError.
    """
    _send(sock, handshake.hello(), deadline_s)
    peer, proof = handshake.answer(_receive(sock, deadline_s))
    _send(sock, proof, deadline_s)
    return peer


def _send(sock: socket.socket, message: bytes, deadline_s: float) -> None:
    _limit(sock, deadline_s)
    sock.sendall(message)


def _receive(sock: socket.socket, deadline_s: float) -> HandshakeMessage:
    buffer = MessageBuffer()
    while True:
        _limit(sock, deadline_s)
        received = sock.recv(buffer.num_missing())
        if not received:
            raise HandshakeRefused(
                "the listener closed the connection during the handshake: it stops or is "
                "overloaded; try again"
            )
        if (message := buffer.append(received)) is not None:
            return message


def _limit(sock: socket.socket, deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    sock.settimeout(remaining_s)
