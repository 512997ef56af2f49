"""Protocol between keepers and the fork server: its messages, its address, and which processes may
share one server.

Connections are Unix sockets that keep message boundaries; messages are msgpack, and file
descriptors travel beside them. Imports nothing heavy.
"""

import fcntl
import hashlib
import os
import re
import resource
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleet.cli.environment import without_secrets

MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 20, 3
LOCK = "preload.lock"
_SESSION = re.compile(
    r"PORT|PWD|OLDPWD|_|SHLVL|TERM.*|COLORTERM|LINES|COLUMNS|LS_COLORS|LESS.*|SSH_.*"
    r"|TMUX.*|STY|WINDOW.*|DISPLAY|XDG_.*|DBUS_.*"
    r"|(FLEET|HONCHO|VSCODE|GNOME|ITERM)_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID"
)
"""Variables set by a terminal, a supervisor or Fleet that no library reads at import. Keepers that
differ only in these variables may share a server.
"""
_INHERITED = re.compile(
    r"(Uid|Gid|Groups|Umask|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):"
)


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """First message of the fork server, sent once its imports are done. `refusal`: reason why it
    cannot fork; empty if it can. `pid`: process of the server.
    """

    refusal: str
    pid: int


class StartRequest(msgspec.Struct, frozen=True, tag=True):
    """Request of a keeper to run `fleet ARGUMENTS` in a forked process. File descriptors sent with
    it: the output, the read end of the lifeline pipe, and the memory of the process's beats if the
    keeper watches it.

    `environment`: entries NAME=VALUE. `keeper`: pid of the sender. Strings are bytes, since
    arguments and environment need not be valid UTF-8.
    """

    arguments: list[bytes]
    environment: list[bytes]
    folder: bytes
    keeper: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """Reply to a successful `StartRequest`; a pidfd of the new process is sent with it."""

    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """Reply to a `StartRequest` that failed."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Message of the fork server that a forked process has ended. `status`: exit status as in
    `subprocess`, negative for a signal.
    """

    status: int


Message = Greeting | StartRequest | Started | NotStarted | Ended
_decoder = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """Send one message. Raises: OSError, also for a message that is too long."""
    socket.send_fds(connection, [msgspec.msgpack.encode(message)], descriptors or [])


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message and its file descriptors. Raises: EOFError at the end of the connection;
    BlockingIOError, OSError.
    """
    data, descriptors, _, _ = socket.recv_fds(
        connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        raise EOFError("the connection has ended")
    return _decoder.decode(data), descriptors


def is_own_peer(connection: socket.socket) -> bool:
    """Return True if the process at the other end of the Unix socket runs as this user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", peer)[1] == os.geteuid()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock that protects the creation and removal of a fork server's socket in `folder`.
    Raises: BlockingIOError if another process holds it.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def socket_name(modules: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Return the socket name of a fork server that this process can share, as a hash of everything
    that its child processes would inherit.

    A child inherits namespaces, control groups, limits, capabilities, CPU affinity and niceness,
    and libraries read environment variables at import. Processes that differ in any of these do not
    share a server.
    """
    shared = without_secrets(environment, frozenset())
    variables = sorted(
        f"{name}={value}" for name, value in shared.items() if not _SESSION.fullmatch(name)
    )
    status = [line for line in _lines("/proc/self/status") if _INHERITED.match(line)]
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))]
    limits = [str(resource.getrlimit(number)) for number in range(16)]
    place = [
        sys.executable,
        os.getcwd(),
        str(os.getpriority(os.PRIO_PROCESS, 0)),
        str(os.sched_getscheduler(0)),
    ]
    traits = [*modules, *variables, *status, *spaces, *limits, *place, *_lines("/proc/self/cgroup")]
    digest = hashlib.sha256("\0".join(traits).encode("utf-8", "surrogateescape")).hexdigest()
    return f"preload-{digest[:16]}.sock"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
