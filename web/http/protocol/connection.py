"""An open connection of a client, in HTTP or WebSocket, and the detection of a client that does not
read.
"""

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
"""Socket option of macOS for the number of bytes in a socket's send queue. Source: sys/socket.h."""


class ConnectionHandler(Protocol):
    """The protocol object that serves a connection, and writes to `transport`."""

    transport: asyncio.Transport

    def close_if_overdue(self, now: float) -> None:
        """Close the connection, or refuse its request, if a time-out has passed. `now` is the time
        in seconds of the event loop's clock.
        """
        ...


class Connection:
    """An open connection in the `ConnectionTable`. `raw` is the transport of the socket, below TLS.
    `busy` is True while a request or a WebSocket is served.

    `address` is the client address by which connections are counted; None for Unix sockets.
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
        """Return the number of written bytes that the peer's kernel has not acknowledged; 0 if no
        bytes are left in this process.

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
    """Detects a client that reads too slowly, from successive values of
    `Connection.num_unacknowledged`.

    Invariants: used only while the application writes nothing, and reset when the application
    writes again, so that a smaller value means that bytes were sent. Bytes written meanwhile by the
    protocol (a ping) do not count as progress.
    """

    __slots__ = ("_buffered", "_sent", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._buffered = self._sent = 0

    def reset(self) -> None:
        self._since = None

    def is_stalled(self, buffered: int, now: float, timeout_s: float) -> bool:
        """Return True if, at the end of a period of `timeout_s`, the client has read fewer than
        `MIN_BYTES_PER_S` on average in that period. `buffered` is the present number of
        unacknowledged bytes.
        """
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
