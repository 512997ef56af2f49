"""Unix sockets in folders of one user, at paths that may be longer than a socket address allows."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEAD_S = 60.0
"""Age in seconds from which a socket that refuses connections is removed. A younger socket may not
be listening yet.
"""
SUFFIX = ".sock"


@contextmanager
def address_of(folder: Path, name: str) -> Iterator[str]:
    """Yield a short path of the socket `name` in `folder`: the address of a Unix socket has at most
    107 bytes.
    """
    if not hasattr(os, "O_PATH"):
        yield str(folder / name)
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen_at(path: Path, *, backlog: int) -> socket.socket:
    """Return a listening socket at `path` to which only this user can connect. `backlog`: argument
    of `listen(2)`. Raises: OSError.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with address_of(path.parent, path.name) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the listening socket at `path`. `timeout_s`: time limit of connecting, and of each
    later send and receive. Raises: OSError.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        with address_of(path.parent, path.name) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def remove_dead_sockets(folder: Path) -> None:
    """Remove each socket in `folder` that is older than `DEAD_S` and refuses connections, as
    sockets of killed processes do. Sockets that cannot be examined or removed are left.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime < DEAD_S:
                continue
            try:
                connect_to(path, 1.0).close()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
