"""Building of data sets in shards, each shard in a fresh process, because espeak-ng carries the
phase of its voice from text to text.

So a shard is the same in every run, and a build that was killed resumes with the missing shards.
Independent of the shards' content.
"""

import multiprocessing
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm


def build_missing(name: str, make: Callable[[int], None], files: list[Path], workers: int) -> None:
    """Build each shard whose file is missing, in `workers` processes. `files`: file of each shard,
    in the order of the shard numbers. `make`: builds the shard with the given number. `name`: label
    of the progress bar.
    """
    missing = [shard for shard, file in enumerate(files) if not file.exists()]
    if not missing:
        return
    files[0].parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        built = pool.imap_unordered(make, missing, chunksize=1)
        for _ in tqdm(
            built, total=len(files), initial=len(files) - len(missing), desc=name, unit="shard"
        ):
            pass


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield the path of a temporary file to write, which replaces `path` atomically at the end of
    the block.
    """
    new = path.with_suffix(".new")
    yield new
    os.replace(new, path)
