"""Files and folders that only their owner can use. Knows no deployment."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

OTHERS, OTHERS_WRITE = 0o077, 0o022


def make_private_folder(folder: Path) -> None:
    """Create a folder for this user alone, if it is missing. Missing parent folders get default
    permissions. Raises: OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def others_may_replace(folder: Path, is_own: Callable[[str], bool]) -> bool:
    """Return True if another user owns the folder, or would still be able to write into it after
    `close_to_others`. `is_own`: predicate that is True for the names of the caller's files.

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
