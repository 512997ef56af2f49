"""Address and password of the embedded Redis, which listens on a Unix socket in its data folder,
with a password file beside the socket if it requires one.

Both follow from the data folder alone, so every command of a deployment finds its server. Starts no
server.
"""

import hashlib
import os
import re
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from fleet.core.errors import ConfigError
from fleet.process.private import (
    OTHERS,
    OTHERS_WRITE,
    close_to_others,
    make_private_folder,
    write_private,
)

SOCKET, PASSWORD, LOCK = "redis.sock", "password", "server.lock"
MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""Largest length of a socket path: the size of `sun_path` in `sockaddr_un`, less the closing zero
byte.
"""
SHORT_PATHS = Path("/tmp")
"""Parent folder of short paths. Not `$TMPDIR`, which differs between logins and may be as long as
the path to shorten.
"""
DEAD_LINK_S = 3600.0
_OWN = re.compile(
    rf"{SOCKET}|{PASSWORD}(\.\d+)?|{LOCK}|appendonlydir|appendonly\.aof.*|dump\.rdb|temp-.*"
)


def embedded_url(data_dir: Path) -> str:
    """Return the address of the server that serves `data_dir`, without a password. Raises:
    ConfigError of `short_path`.
    """
    folder = data_dir.absolute()
    if len(os.fsencode(folder / SOCKET)) > MAX_SOCKET_PATH_BYTES or not _is_text(folder):
        folder = short_path(folder)
    return f"unix://{quote(str(folder / SOCKET))}"


def _is_text(folder: Path) -> bool:
    """Return False for a path whose bytes are not UTF-8, which no Redis address can contain."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        return False
    return True


def short_path(folder: Path) -> Path:
    """Return a short path that leads to `folder`: a symbolic link in a folder of this user, named
    after the hash of the long path.

    Raises: ConfigError if the folder of links is not private to this user, or the link leads
    elsewhere.
    """
    home = SHORT_PATHS / f"fleet-{os.geteuid()}"
    link = home / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    with suppress(FileExistsError):
        home.mkdir(mode=0o700)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        raise ConfigError(
            f"redis.data_dir: the path of {folder} is too long for a Unix socket, and {home}, "
            "the folder for shorter links, "
            "is not private to this user; remove it, or choose a shorter path with --set "
            "redis.data_dir=DIR",
            param="redis.data_dir",
        )
    with suppress(FileExistsError):
        link.symlink_to(folder)
        _remove_dead_links(home)
    if os.readlink(link) != str(folder):
        raise ConfigError(
            f"redis.data_dir: {link} leads to another folder than {folder}; remove it",
            param="redis.data_dir",
        )
    return link


def _remove_dead_links(home: Path) -> None:
    """Remove links in `home` to missing folders. New links stay: their folders may not have been
    created yet.
    """
    for link in home.iterdir():
        with suppress(FileNotFoundError):
            if not link.exists() and time.time() - link.lstat().st_mtime > DEAD_LINK_S:
                link.unlink()


def read_password(folder: Path) -> str | None:
    """Return the password of the server whose socket is in `folder`, or None if it requires none.

    The password file counts only if it is a regular file of this user (for root, of any user),
    since another user may own the folder.
    """
    try:
        with open(os.open(folder / PASSWORD, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or os.geteuid() not in (0, found.st_uid):
                return None
            return file.read(1024).decode("ascii", "replace").strip() or None
    except OSError:
        return None


def make_password(data_dir: Path) -> str:
    """Return the server's password, generated at the first call for `data_dir`. Raises: ConfigError
    if the password file belongs to another user.
    """
    if not os.path.lexists(data_dir / PASSWORD):
        write_private(data_dir / PASSWORD, secrets.token_urlsafe(32) + "\n")
    password = read_password(data_dir)
    if password is None:
        raise ConfigError(
            f"redis.data_dir: {data_dir / PASSWORD} is not a file of this user with a password "
            "in it; remove it, and start again",
            param="redis.data_dir",
        )
    return password


def secure_data_dir(data_dir: Path) -> None:
    """Create the server's folder if it is missing, and remove other users' permissions from the
    folder and the server's files.

    Raises: OSError; ConfigError if other users may still write into the folder, since they could
    replace the server's socket.
    """
    make_private_folder(data_dir)
    if not close_to_others(data_dir, is_own=lambda name: _OWN.fullmatch(name) is not None):
        found = data_dir.stat()
        if found.st_mode & OTHERS_WRITE:
            raise ConfigError(
                f"redis.data_dir: other users may write into {data_dir}; choose a folder of "
                "this user with --set "
                f"redis.data_dir=DIR, or `chmod go-w {data_dir}`",
                param="redis.data_dir",
            )
    for name in filter(_OWN.fullmatch, os.listdir(data_dir)):
        with suppress(FileNotFoundError):  # a running server removes files of its own
            _close(data_dir / name)


def _close(path: Path) -> None:
    found = path.lstat().st_mode
    if stat.S_ISDIR(found):
        path.chmod(0o700)
        for inner in path.iterdir():
            _close(inner)
    elif found & OTHERS and not stat.S_ISLNK(found):
        path.chmod(0o600)
