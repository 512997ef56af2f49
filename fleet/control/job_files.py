"""The folders in which jobs leave files, under the deployment's `data_dir`: created, read and
removed. Knows no kind of job.

A folder is named after its job's id, and only `REPORT_FILES` are read: no path is taken from a
client.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from fleet.core.errors import Conflict, NotFound
from fleet.core.jobs import REPORT_FILES
from fleet.process.private import make_private_folder

FOLDER = "jobs"
JOB_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_FOLDERS = 200
MAX_FILE_BYTES = 16 * 1024 * 1024


def folder_of(data_dir: Path, job_id: str) -> Path:
    """Return the path of a job's folder, which may not exist. Raises: NotFound for a malformed job
    id.
    """
    if not JOB_ID.fullmatch(job_id):
        raise NotFound(
            f"job_id: {job_id[:80]!r} is not the id of a job; GET /v1/fleet/jobs lists them",
            param="job_id",
        )
    return data_dir.absolute() / FOLDER / job_id


def make_folder(data_dir: Path, job_id: str) -> Path:
    """Create an empty folder for a job, readable by this user only. Raises: OSError, NotFound."""
    folder = folder_of(data_dir, job_id)
    remove_folder(data_dir, job_id)
    make_private_folder(folder.parent)
    folder.mkdir(mode=0o700)
    return folder


def files_in(folder: Path) -> list[str]:
    """Return the names of the `REPORT_FILES` that exist in a job's folder."""
    return [name for name in REPORT_FILES if (folder / name).is_file()]


def read_file(data_dir: Path, job_id: str, name: str) -> bytes:
    """Return the content of one file of a job. Raises: NotFound; Conflict if it is too large."""
    if name not in REPORT_FILES:
        raise NotFound(
            f"name: no file {name[:80]!r}; a job has {' and '.join(REPORT_FILES)} at most",
            param="name",
        )
    path = folder_of(data_dir, job_id) / name
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotFound(
            f"name: job {job_id} has no {name} on this machine ({error.strerror}); if its "
            "worker runs on another machine, look "
            f"in the job's folder under data_dir there",
            param="name",
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise Conflict(
            f"name: {name} of job {job_id} is larger than {MAX_FILE_BYTES} bytes; copy it from "
            "the job's folder under data_dir",
            param="name",
        )
    return content


def remove_folder(data_dir: Path, job_id: str) -> None:
    """Remove a job's folder if it exists; a malformed job id has no folder. Raises: OSError."""
    if JOB_ID.fullmatch(job_id) and os.path.lexists(folder_of(data_dir, job_id)):
        _remove(folder_of(data_dir, job_id))


def remove_old_folders(data_dir: Path, kept: Callable[[list[str]], set[str]]) -> None:
    """Remove the folders of jobs that are no longer stored, and the oldest folders beyond
    `MAX_FOLDERS`.

    `kept`: function that returns the ids, among a list of job ids, whose jobs are still stored.
    Raises: OSError for the first folder that could not be removed, after all other folders were
    tried.
    """
    root = data_dir.absolute() / FOLDER
    folders = (
        [path for path in root.iterdir() if JOB_ID.fullmatch(path.name)] if root.is_dir() else []
    )
    folders.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
    stored = kept([path.name for path in folders]) if folders else set[str]()
    removed = [path for path in folders if path.name not in stored]
    removed += [path for path in folders if path.name in stored][MAX_FOLDERS:]
    failures: list[OSError] = []
    for path in removed:
        try:
            _remove(path)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _remove(path: Path) -> None:
    """Remove a folder. A link or file in its place is removed too, but never a link's target.
    Raises: OSError.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
