"""Download of a model's files into the cache of `huggingface_hub`.

The library's own download is not used: it checks only a file's size, and deletes an incomplete file
when its process ends. Here a file takes its name once its hash is right, and its part stays on disk
until then. Names, locks, listing and login are the library's.
"""

import glob
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import httpx2
from filelock import Timeout
from huggingface_hub import hf_hub_url, snapshot_download
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    disable_progress_bars,
    hf_raise_for_status,
    http_stream_backoff,
)

from fleet.core.errors import ConfigError
from fleet.hub.cache import Hub
from fleet.hub.listing import TIMEOUT_S, HubFile, Listing, explaining

WAIT_S = 0.5
"""Time between two looks at what another process has received."""
RETRIES, PAUSE_S = 3, 1.0
"""Attempts in a row that bring no byte before a download is given up, and the pause before each."""


class Bar(Protocol):
    """Progress in bytes. `update` counts bytes received now; `add_present` counts bytes that were
    on disk before, or takes bytes back if `size` is negative.

    `wait` counts `size` bytes that another process has received since the last call, and shows that
    this process waits for it; `end_wait` shows that the wait is over.
    """

    def update(self, n: float | None = 1, /) -> object: ...

    def add_present(self, size: int, /) -> None: ...

    def wait(self, size: int, /) -> None: ...

    def end_wait(self) -> None: ...


def missing_bytes(hub: Hub, listing: Listing) -> int:
    """Return the size of what is not yet on disk; parts of files count as present."""
    missing = 0
    for file in listing.files:
        present = _size_on_disk(hub.home(listing.name) / "blobs" / file.hash)
        missing += max(0, file.size - present)
    return missing


def part_of(blob: Path) -> Path:
    """Return the place of a file's first bytes while it is incomplete."""
    return blob.with_name(f"{blob.name}.incomplete")


def check_space(hub: Hub, num_bytes: int) -> None:
    """Check that the disk has room for a download. Raises: ConfigError if not."""
    place = next(folder for folder in (hub.cache, *hub.cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ConfigError(
            f"checkpoint: {num_bytes / 1e6:.0f} MB are missing, and the disk of {hub.cache} has "
            f"{free / 1e6:.0f} MB free; free space, or set another folder as hub_cache",
            param="hub_cache",
        )


def fetch(hub: Hub, listing: Listing, bar: Bar) -> Path:
    """Download the listed files that are missing, check the hash of all, and return their folder.

    Other processes may do the same at the same time; each file is downloaded once. The folder gets
    its files, and a branch its new commit, after the last file is complete. Raises: ConfigError.
    """
    name, blobs = listing.name, hub.home(listing.name) / "blobs"
    locks = hub.cache / ".locks" / blobs.parent.name
    folder = hub.snapshot(name, listing.commit)
    with explaining(hub, name):
        for place in (blobs, locks, folder):
            place.mkdir(parents=True, exist_ok=True)
        for file in listing.files:
            url = hf_hub_url(name.repo, file.path, revision=listing.commit, endpoint=hub.endpoint)
            with _locked(locks / f"{file.hash}.lock", blobs / file.hash, bar):
                _complete(url, file, blobs / file.hash, bar)
        for file in listing.files:
            _link(blobs / file.hash, folder / file.path)
        # All files are there: this stores the listing that `resolve` reads, and downloads nothing.
        with disable_progress_bars():
            snapshot_download(
                name.repo,
                revision=listing.commit,
                cache_dir=hub.cache,
                endpoint=hub.endpoint,
                allow_patterns=[glob.escape(file.path) for file in listing.files],
            )
        if name.revision != listing.commit:
            _write_ref(blobs.parent / "refs" / name.revision, listing.commit)
    return folder


@contextmanager
def _locked(lock: Path, blob: Path, bar: Bar) -> Iterator[None]:
    """Hold a file's lock. While another process has the lock, show how many bytes that process has
    received.
    """
    counted = 0
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(WeakFileLock(lock, timeout=WAIT_S))
                break
            except Timeout:
                size = _size_on_disk(blob)
                bar.wait(size - counted)
                counted = size
        if counted:
            bar.wait(-counted)
        bar.end_wait()
        yield


def _size_on_disk(blob: Path) -> int:
    """Return how many bytes of a file are there, complete or not. Another process may rename the
    part at any time.
    """
    for place in (part_of(blob), blob):
        with suppress(FileNotFoundError):
            return place.stat().st_size
    return 0


def _complete(url: str, file: HubFile, blob: Path, bar: Bar) -> None:
    """Bring a file into the cache if it is missing or damaged. Raises: ConfigError if the received
    file is damaged too, which is then deleted.
    """
    if blob.exists():
        if _hash(blob, file) == file.hash:
            bar.add_present(file.size)
            return
        blob.unlink()
    part = part_of(blob)
    _receive_all(url, file, part, bar)
    found = _hash(part, file)
    if found != file.hash:
        part.unlink()
        raise ConfigError(
            f"checkpoint: {url} arrived damaged (hash {found}, the hub names {file.hash}) and was "
            "deleted; run the command again",
            param="checkpoint",
        )
    part.replace(blob)


def _receive_all(url: str, file: HubFile, part: Path, bar: Bar) -> None:
    """Receive the rest of a file; continue after lost connections while bytes arrive."""
    part.touch()
    if part.stat().st_size > file.size:
        os.truncate(part, 0)
    bar.add_present(part.stat().st_size)
    num_failed = 0
    while True:
        before = part.stat().st_size
        try:
            _receive(url, file, part, bar)
            return
        except httpx2.TransportError:
            num_failed = 0 if part.stat().st_size > before else num_failed + 1
            if num_failed == RETRIES:
                raise
            time.sleep(PAUSE_S)


def _receive(url: str, file: HubFile, part: Path, bar: Bar) -> None:
    """Receive a file from the end of its part on, over one connection."""
    with part.open("ab") as out:
        kept = out.tell()
        if kept == file.size:
            return
        # Compressed bytes could not be continued.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if kept:
            headers["Range"] = f"bytes={kept}-"
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=TIMEOUT_S, retry_on_exceptions=()
        ) as response:
            hf_raise_for_status(response)
            if kept and response.status_code != 206:
                out.truncate(0)
                bar.add_present(-kept)
            # One byte too many shows that the hash is wrong; the rest is not needed.
            pieces = takewhile(lambda _: out.tell() <= file.size, response.iter_bytes())
            for piece in pieces:
                out.write(piece)
                bar.update(len(piece))


def _hash(path: Path, file: HubFile) -> str:
    """Return the hash of a file, of the kind that the hub names for it."""
    if len(file.hash) == 64:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _link(blob: Path, place: Path) -> None:
    """Give a blob its name in a snapshot, in place of whatever has that name."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(place)
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(blob, place.parent))
    aside.replace(place)


def _write_ref(ref: Path, commit: str) -> None:
    ref.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(ref)
    aside.write_text(commit)
    aside.replace(ref)


def _aside(place: Path) -> Path:
    """Return a path beside `place` that no other thread of any process writes meanwhile."""
    return place.with_name(f"{place.name}.{os.getpid()}.{threading.get_native_id()}")
