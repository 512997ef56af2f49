"""One connection of a client, whichever protocol it speaks now, and how its outgoing bytes progress."""

import asyncio
import fcntl
import ipaddress
import socket
import struct
import sys
import termios
from typing import Protocol

from web.http.protocol.bounds import MIN_BYTES_PER_S

IPV6_NETWORK_BITS = 64
"""One client has a whole network of IPv6 addresses: they count as one."""
SO_NWRITE = 0x1024
"""Option of a macOS socket: bytes in its send queue. Source: sys/socket.h."""


class Handler(Protocol):
    """The protocol object that serves a connection. `transport` is the one that it writes to."""

    transport: asyncio.Transport

    def check(self, now: float) -> None:
        """End the connection, or a part of it, if its time is over. `now`: seconds of the event loop's clock."""
        ...


class Connection:
    """`raw` is the transport of the socket itself, under TLS where there is any. `busy`: a request or a WebSocket is under way.

    `address`: the client address by which connections are counted; None for Unix sockets.
    """

    __slots__ = ("address", "busy", "handler", "raw")

    def __init__(self, raw: asyncio.Transport, peer: tuple[str, int] | None, handler: Handler) -> None:
        self.raw = raw
        self.address = address_of(peer)
        self.handler = handler
        self.busy = False

    def num_buffered(self) -> int:
        """Bytes that were written and have not left this process."""
        transport = self.handler.transport
        under_tls = 0 if transport is self.raw else self.raw.get_write_buffer_size()
        return transport.get_write_buffer_size() + under_tls

    def num_unacknowledged(self) -> int:
        """Bytes that were written and that the peer's kernel has not received; 0 once nothing is left in this process.

        Includes the kernel's send queue: it takes more from this process only once a large part of it (a third of up to 4 MiB
        on Linux) is free, which a slow reader takes minutes for. Costs a system call: for sweeps, not for every chunk.
        """
        buffered = self.num_buffered()
        return buffered + _num_queued(self.raw) if buffered else 0


def _num_queued(raw: asyncio.Transport) -> int:
    """Bytes in the kernel's send queue; 0 where the kernel does not say."""
    sock = raw.get_extra_info("socket")
    try:
        if sys.platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, SO_NWRITE)
        return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):  # closed, or a kind of socket without a queue
        return 0


class SendProgress:
    """Notices a reader that takes nothing, or next to nothing, by `Connection.num_unacknowledged`.

    Invariants: looked at only while the application writes nothing, and forgotten once it writes again, so that the buffer
    shrinks by what leaves. What is written all the same (a ping) counts for nothing.
    """

    __slots__ = ("_buffered", "_sent", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._buffered = self._sent = 0

    def forget(self) -> None:
        self._since = None

    def stalled(self, buffered: int, now: float, timeout_s: float) -> bool:
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
        self._since, self._buffered, self._sent = now, buffered, 0


def address_of(peer: tuple[str, int] | None) -> str | None:
    """Return the key by which a client's connections are counted: its IPv4 address, or the network of its IPv6 address."""
    if peer is None:
        return None
    host = peer[0].partition("%")[0]
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_loopback:
        return host
    return str(ipaddress.IPv6Network((address, IPV6_NETWORK_BITS), strict=False))
