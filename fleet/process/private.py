"""Files and folders that only their owner can use. Knows no deployment."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from fleet.core.errors import ConfigError

OTHERS, OTHERS_WRITE = 0o077, 0o022


def make_private_folder(folder: Path) -> None:
    """Create a folder for this user alone. An existing folder is left as it is. Missing parent
    folders get default permissions. Raises: OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def others_may_replace(folder: Path, is_own: Callable[[str], bool]) -> bool:
    """Return True if a user other than this one and root owns the folder, or if other users could
    still write into the folder after `close_to_others`. `is_own`: predicate that is True for the
    names of the caller's files.

    In a folder with a sticky bit, only the owner of a file can replace it. Root may use any user's
    folder, as in containers.
    """
    found = folder.stat()
    if os.geteuid() not in (0, found.st_uid):
        return found.st_uid != 0 or _others_write(found.st_mode)
    return _others_write(found.st_mode) and not all(is_own(name) for name in os.listdir(folder))


def _others_write(mode: int) -> bool:
    return bool(mode & OTHERS_WRITE) and not mode & stat.S_ISVTX


def write_private(path: Path, content: str) -> None:
    """Replace the file atomically by one with `content` that only this user can read. Raises:
    OSError.
    """
    spare = path.with_name(f"{path.name}.{os.getpid()}")
    spare.unlink(missing_ok=True)
    with open(os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    spare.replace(path)


def close_to_others(folder: Path, is_own: Callable[[str], bool]) -> bool:
    """Remove other users' permissions on a folder. Return True if other users have no permission
    now. `is_own`: predicate that is True for the names of the caller's files.

    Left unchanged are another user's folder, a folder with a sticky bit, and a folder with a file
    that is not the caller's: such a folder is a home or project folder or /tmp, which other users
    may need.
    """
    mode = folder.stat().st_mode
    if not mode & OTHERS:
        return True
    try:
        if mode & stat.S_ISVTX or not all(is_own(name) for name in os.listdir(folder)):
            return False
        folder.chmod(0o700)
    except PermissionError:
        return False
    return True


def read_closed_file(path: Path, setting: str, max_bytes: int) -> bytes:
    """Read a file of secrets that `setting` names, up to `max_bytes`. Raises: ConfigError if it
    cannot be read, or if other users can read it.
    """
    try:
        # Not blocking: a pipe of that name would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    f"{setting}: {path} is not a file; name one that holds it",
                    param=setting,
                )
            # A secret mounted by Kubernetes or an administrator belongs to root, and its group may
            # read it.
            closed = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid else stat.S_IWGRP | stat.S_IXGRP)
            if status.st_mode & closed:
                raise ConfigError(
                    f"{setting}: {path} is open to other users (mode "
                    f"{stat.S_IMODE(status.st_mode):04o}); run: chmod 600 {path}",
                    param=setting,
                )
            return file.read(max_bytes)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path} cannot be read: {error.strerror or error}", param=setting
        ) from error
