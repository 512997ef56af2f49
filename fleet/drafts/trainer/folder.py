"""The folder that the trainers of a fleet share: the only record of which checkpoints there are.

```
checkpoints/EPOCH/GENERATION-HASH/   a checkpoint
checkpoints/EPOCH/.part-...          a checkpoint or version that is being written
checkpoints/EPOCH/.trash-...         a folder that is being removed
versions/SHA256/                     a version of the draft head
```

The writer's folder is named by its epoch, which Redis gives. A successor renames it to its own
epoch, which is higher. All that a trainer publishes or removes is renamed out of or into its own
folder: once the successor has renamed that, the predecessor's paths no longer exist. So a trainer
that was frozen at any instruction and resumed later can neither publish, overwrite nor remove
anything.

Methods block. Knows no Redis and no tensors.
"""

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fleet.drafts.eagle3.files import flush_folder

CHECKPOINTS, VERSIONS = "checkpoints", "versions"
HIDDEN = "."
"""First character of the names of folders that are being written or removed."""
PART, TRASH = ".part-", ".trash-"
ABANDONED_S = 3600.0
"""Age at which a folder that an operator's command was writing is removed."""
EPOCH_DIGITS = 20
EPOCH = re.compile(rf"[0-9]{{{EPOCH_DIGITS}}}")
CHECKPOINT = re.compile(r"([0-9]{8,12})-[0-9a-f]{16}")
OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY)


class Overtaken(Exception):
    """Another trainer has taken over the folder, so that this one may not write to it any more."""


def epochs_of(folder: Path) -> list[int]:
    """Return the epochs of the writers' folders in a trainers' folder, the highest first. There is
    one, unless a trainer was lost while it created its own.
    """
    try:
        names = os.listdir(folder / CHECKPOINTS)
    except FileNotFoundError:
        return []
    return sorted((int(name) for name in names if EPOCH.fullmatch(name)), reverse=True)


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a trainers' folder, the newest first; damaged ones are included.
    For readers that do not write; a successor may rename the folder at any time.
    """
    epochs = epochs_of(folder)
    return _checkpoints_in(_writer_path(folder, epochs[0])) if epochs else []


def generation_of(name: str) -> int:
    """Return the generation in the name of a checkpoint; 0 if it is the name of something else."""
    found = CHECKPOINT.fullmatch(name)
    return int(found[1]) if found is not None else 0


def _writer_path(folder: Path, epoch: int) -> Path:
    return folder / CHECKPOINTS / f"{epoch:0{EPOCH_DIGITS}d}"


def _checkpoints_in(place: Path) -> list[Path]:
    try:
        names = [name for name in os.listdir(place) if generation_of(name)]
    except FileNotFoundError:
        return []
    return [place / name for name in sorted(names, key=generation_of, reverse=True)]


class WriterFolder:
    """The folder of the trainer that may write, at one epoch. `take_over` opens it.

    Raises Overtaken once another trainer has taken over, and OSError of the disk.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self.epoch = epoch
        self._folder = folder
        self._place = _writer_path(folder, epoch)

    @classmethod
    def take_over(cls, folder: Path, epoch: int) -> "WriterFolder":
        """Make `epoch` the writer of a trainers' folder, and remove what former writers left
        unfinished. From then on, former writers can no longer write there.

        Raises: Overtaken if a higher epoch writes there.
        """
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        own = cls(folder, epoch)
        own._rename_former()
        flush_folder(folder / CHECKPOINTS)
        own.clean()
        return own

    def _rename_former(self) -> None:
        """Rename the former writer's folder to this epoch's; create one if there is none."""
        while self.epoch not in (present := epochs_of(self._folder)):
            try:
                if present and present[0] < self.epoch:
                    os.rename(_writer_path(self._folder, present[0]), self._place)
                elif not present:
                    self._place.mkdir()
                else:
                    break
            except (FileNotFoundError, FileExistsError):
                continue  # another trainer was faster; the next look shows whose epoch is higher
        if present[0] > self.epoch:
            raise Overtaken(f"epoch {present[0]} writes to {self._folder}, above {self.epoch}")

    def clean(self) -> None:
        """Remove folders of lower epochs, and unfinished parts. Called while this trainer writes
        nothing.
        """
        for epoch in epochs_of(self._folder):
            if epoch < self.epoch:
                self.discard(_writer_path(self._folder, epoch))
        for name in self._listed():
            if name[0] == HIDDEN:
                self.discard(self._place / name)
        (self._folder / VERSIONS).mkdir(exist_ok=True)
        for path in (self._folder / VERSIONS).iterdir():
            if path.name[0] == HIDDEN and time.time() - path.stat().st_mtime > ABANDONED_S:
                self.discard(path)

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self._place)
        except FileNotFoundError as error:
            raise Overtaken(f"{self._place} was taken over") from error

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, the newest first; damaged ones are included."""
        return _checkpoints_in(self._place)

    def new_part(self) -> Path:
        """Return a new empty folder in which a checkpoint or version is written."""
        part = self._place / f"{PART}{secrets.token_hex(8)}"
        try:
            part.mkdir()
        except FileNotFoundError as error:
            raise Overtaken(f"{self._place} was taken over") from error
        return part

    def publish_checkpoint(self, part: Path, name: str) -> Path:
        """Make a complete part visible as the checkpoint `name`; return its folder."""
        place = self._place / name
        self._move(part, place)
        flush_folder(self._place)
        return place

    def version(self, sha256: str) -> Path:
        """Return the folder of a version of the draft head, which may not exist."""
        return self._folder / VERSIONS / sha256

    def versions(self) -> Iterator[Path]:
        """Yield the folders of the versions of the draft head."""
        return (each for each in (self._folder / VERSIONS).iterdir() if each.name[0] != HIDDEN)

    def publish_version(self, part: Path, sha256: str) -> None:
        """Make a complete part visible as a version of the draft head; remove the part instead if
        the folder has that version already.
        """
        try:
            self._move(part, self.version(sha256))
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
            self.discard(part)
            return
        flush_folder(self._folder / VERSIONS)

    def publish_file(self, part: Path, place: Path) -> None:
        """Move the only file of `part` to `place`, where it replaces a file of the same name;
        remove `part`.
        """
        self._move(part / place.name, place)
        flush_folder(place.parent)
        self.discard(part)

    def discard(self, path: Path) -> None:
        """Remove a folder, if it exists. A reader sees all of it or nothing."""
        trash = self._place / f"{TRASH}{secrets.token_hex(8)}"
        try:
            self._move(path, trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def _move(self, path: Path, place: Path) -> None:
        try:
            os.rename(path, place)
        except FileNotFoundError as error:
            self._listed()
            raise error
