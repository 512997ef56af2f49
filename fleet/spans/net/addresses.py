"""Addresses and sockets of span connections: a Unix socket for processes of one user on one host,
TCP across hosts.
"""

import secrets
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

from fleet.core.errors import SpanUnreachable
from fleet.process.private import make_private_folder
from fleet.process.unix_sockets import SUFFIX, connect_to, listen_at, remove_dead_sockets

SpanAddress = tuple[str, int] | Path
"""Address of a span listener: TCP host and port, or the path of a Unix socket."""
UNIX = "unix:"
SOCKET_BUFFER_BYTES = 4 * 2**20
PEER_SILENT_S = 30
"""Time after which the kernel closes a connection whose peer answers neither data nor probes (its
host or network is gone), or takes no data (its process is frozen).
"""


def address_text(address: SpanAddress) -> str:
    """Return an address as text, as a worker's record in Redis stores it."""
    return f"{UNIX}{address}" if isinstance(address, Path) else f"{address[0]}:{address[1]}"


def parse_address(text: str) -> SpanAddress | None:
    """Parse the text that `address_text` returned; None if it is not an address."""
    if text.startswith(UNIX):
        path = Path(text.removeprefix(UNIX))
        return path if path.is_absolute() and "\0" not in text else None
    host, _, port = text.rpartition(":")
    return (
        (host, int(port))
        if host and port.isascii() and port.isdecimal() and int(port) < 2**16
        else None
    )


def listen(place: str | Path, port: int, *, backlog: int) -> tuple[socket.socket, SpanAddress]:
    """Listen for connections; return the socket and its address.

    `place`: an address of this host, for TCP at `port` (0 for any free port), or a folder for a new
    Unix socket; the folder is created for this user alone. `backlog`: most connections that wait to
    be accepted. Raises: SpanUnreachable.
    """
    try:
        if isinstance(place, Path):
            make_private_folder(place)
            remove_dead_sockets(place)
            path = place.absolute() / f"{secrets.token_hex(8)}{SUFFIX}"
            return listen_at(path, backlog=backlog), path
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        listener = socket.create_server((place, port), family=family, backlog=backlog)
    except OSError as error:
        is_path = isinstance(place, Path)
        remedy = (
            "choose a folder on a local disk with --set data_dir=DIR"
            if is_path
            else "choose an address of this host and a free port"
        )
        where = place if is_path else f"{place}:{port}"
        cause = error.strerror or error
        raise SpanUnreachable(
            f"cannot listen for span connections at {where}: {cause}; {remedy}"
        ) from error
    name = listener.getsockname()
    return listener, (name[0], name[1])


def connect(address: SpanAddress, timeout_s: float) -> socket.socket:
    """Return a socket connected to `address`. Raises: OSError."""
    if isinstance(address, Path):
        return connect_to(address, timeout_s)
    return socket.create_connection(address, timeout=timeout_s)


def set_options(sock: socket.socket) -> None:
    """Configure a connected socket: blocking, large buffers, closed after `PEER_SILENT_S` of
    silence.
    """
    sock.settimeout(None)
    options = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PEER_SILENT_S // 3),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PEER_SILENT_S // 6),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
        # For data under way, during which the kernel sends no probes.
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", PEER_SILENT_S * 1000),
    ]
    for name, limit in (("SO_SNDBUF", "wmem_max"), ("SO_RCVBUF", "rmem_max")):
        if _kernel_limit_bytes(limit) >= SOCKET_BUFFER_BYTES:
            options.append((socket.SOL_SOCKET, name, SOCKET_BUFFER_BYTES))
    for level, name, value in options:
        # Not every system has every option, and the connection works without.
        with suppress(OSError, AttributeError):
            sock.setsockopt(level, getattr(socket, name), value)


@cache
def _kernel_limit_bytes(name: str) -> int:
    """Return the kernel's limit of socket buffers, `wmem_max` or `rmem_max`; 0 if unknown. A buffer
    set under a lower limit would be smaller than the kernel's automatic size.
    """
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core", name).read_text())
    return 0
