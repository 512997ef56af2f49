"""A connection of a client, in HTTP or WebSocket, and the progress of its outgoing bytes."""

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from typing import Protocol

from web.http.addresses import client_address
from web.http.protocol.bounds import MIN_BYTES_PER_S

SO_NWRITE = 0x1024
"""Option of a macOS socket: bytes in its send queue. Source: sys/socket.h."""


class ConnectionHandler(Protocol):
    """The protocol object that serves a connection, and writes to `transport`."""

    transport: asyncio.Transport

    def close_if_overdue(self, now: float) -> None:
        """Close the connection, or refuse its request, if a time-out is over. `now`: seconds of the
        event loop's clock.
        """
        ...


class Connection:
    """An open connection. `raw` is the transport of the socket, below TLS. `busy`: it serves a
    request or a WebSocket.

    `address`: the client address by which connections are counted; None for Unix sockets.
    """

    __slots__ = ("address", "busy", "handler", "raw")

    def __init__(
        self, raw: asyncio.Transport, peer: tuple[str, int] | None, handler: ConnectionHandler
    ) -> None:
        self.raw = raw
        self.address = client_address(peer)
        self.handler = handler
        self.busy = False

    def num_buffered(self) -> int:
        """Return the written bytes that are still in this process."""
        transport = self.handler.transport
        under_tls = 0 if transport is self.raw else self.raw.get_write_buffer_size()
        return transport.get_write_buffer_size() + under_tls

    def num_unacknowledged(self) -> int:
        """Return the written bytes that the peer's kernel has not received; 0 once none is left in
        this process.

        Includes the kernel's send queue, which accepts more only once a large part of it is free (a
        third of up to 4 MiB on Linux): minutes for a slow reader. Costs a system call, so it is for
        sweeps and not for every chunk.
        """
        buffered = self.num_buffered()
        return buffered + _num_queued(self.raw) if buffered else 0


def _num_queued(raw: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send queue; 0 where the kernel does not report them."""
    sock = raw.get_extra_info("socket")
    try:
        if sys.platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, SO_NWRITE)
        return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):  # closed, or a kind of socket without a queue
        return 0


class SendProgress:
    """Detects a client that reads little or nothing, by `Connection.num_unacknowledged`.

    Invariants: checked only while the application writes nothing, and reset when it writes again,
    so that the buffer shrinks by the bytes that were sent. Bytes written meanwhile (a ping) are no
    progress.
    """

    __slots__ = ("_buffered", "_sent", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._buffered = self._sent = 0

    def reset(self) -> None:
        self._since = None

    def is_stalled(self, buffered: int, now: float, timeout_s: float) -> bool:
        """Return True if less than `MIN_BYTES_PER_S` left in the last `timeout_s`."""
        if self._since is None or not buffered:
            self._begin(buffered, now)
            return False
        self._sent += max(0, self._buffered - buffered)
        self._buffered = buffered
        if now - self._since < timeout_s:
            return False
        too_slow = self._sent < MIN_BYTES_PER_S * timeout_s
        self._begin(buffered, now)
        return too_slow

    def _begin(self, buffered: int, now: float) -> None:
        self._since = now
        self._buffered = buffered
        self._sent = 0
