"""Results shared by all processes of one test run: the first process that needs a result computes
it, and the other processes wait for it and read it.
"""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def compute_once(folder: Path, compute: Callable[[Path], object]) -> Path:
    """Return `folder`, filled by `compute(empty_folder)` unless a process of this run has filled it
    already.
    """
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            compute(unfinished)
            unfinished.rename(folder)
    return folder
