"""Files of the API on disk: a folder for each, with its record and its content. Knows no batch."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fleet.batches.records import FILE, FILE_ID, MAX_EXPIRY_S, FileObject, Purpose, is_owned, new_id
from fleet.config import FleetConfig
from fleet.core.errors import Conflict, NotFound, quoted
from fleet.process.private import make_private_folder, write_private

RECORD, CONTENT = "record.json", "content"
PREPARED = ".new-"
"""Prefix of the folder of a file that is being written."""
_decode = msgspec.json.Decoder(FileObject).decode


class FileStore:
    """The files in `batches.folder`, which gateways and job workers share. A file exists for
    clients once its record is written; expired files are removed when files are added or listed.
    """

    def __init__(self, config: FleetConfig, clock: Callable[[], float] = time.time) -> None:
        self._root = config.batches_dir / "files"
        self._max_files = config.batches.max_files
        self._clock = clock

    def add(
        self, content: bytes, filename: str, expiry_s: int = MAX_EXPIRY_S, owner: str = ""
    ) -> FileObject:
        """Store an uploaded input file of a batch. `owner`: see `new_id`. Raises: Conflict if
        `batches.max_files` files are stored; OSError.
        """
        if len(self._records()) >= self._max_files:
            raise Conflict(
                f"{self._max_files} files are stored (batches.max_files); delete some first",
                param="file",
            )
        file_id = new_id(FILE, owner)
        prepared = self._root / f"{PREPARED}{file_id}"
        self._make(prepared)
        with open(os.open(prepared / CONTENT, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(content)
        record = self._record(file_id, filename, len(content), expiry_s, "batch")
        write_private(prepared / RECORD, msgspec.json.encode(record).decode())
        prepared.rename(self._folder(file_id))
        return record

    def prepare(self, file_id: str) -> Path:
        """Create the folder of a file that is written step by step, and return the path of its
        content. Clients do not see the file until `publish` is called.
        """
        self._make(self._folder(file_id))
        return self._folder(file_id) / CONTENT

    def publish(self, file_id: str, filename: str, expiry_s: int) -> None:
        """Let clients see a file whose content is complete. Idempotent."""
        folder = self._folder(file_id)
        size = (folder / CONTENT).stat().st_size
        record = self._record(file_id, filename, size, expiry_s, "batch_output")
        write_private(folder / RECORD, msgspec.json.encode(record).decode())

    def check_owner(self, file_id: str, owner: str) -> None:
        """Raise NotFound unless the id names `owner` (see `new_id`). Whether the file exists is not
        checked.
        """
        if not is_owned(file_id, owner):
            raise _not_found(file_id)

    def find(self, file_id: str) -> FileObject:
        """Return a file that has not expired. Raises: NotFound."""
        try:
            record = _decode((self._folder(file_id) / RECORD).read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise _not_found(file_id) from error
        if record.expires_at <= self._clock():
            raise _not_found(file_id)
        return record

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content. Raises: NotFound."""
        self.find(file_id)
        return self._folder(file_id) / CONTENT

    def files(self, purpose: str = "", owner: str | None = None) -> Sequence[FileObject]:
        """Return the files, newest first. `purpose`: "" for every purpose. `owner`: see `new_id`;
        None for the files of all owners.
        """
        found = [
            record
            for record in self._records()
            if purpose in ("", record.purpose) and (owner is None or is_owned(record.id, owner))
        ]
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete(self, file_id: str) -> None:
        """Remove a file. Raises: NotFound."""
        self.find(file_id)
        self._remove(file_id)

    def discard(self, file_id: str) -> None:
        """Remove a file whether or not it was published. Idempotent."""
        shutil.rmtree(self._folder(file_id), ignore_errors=True)

    def _records(self) -> list[FileObject]:
        """Return the records of all files; remove the files that have expired or cannot be read."""
        if not self._root.is_dir():
            return []
        records: list[FileObject] = []
        for name in os.listdir(self._root):
            if not (FILE_ID.fullmatch(name) and (self._root / name / RECORD).exists()):
                continue
            try:
                records.append(self.find(name))
            except NotFound:
                self._remove(name)
        return records

    def _remove(self, file_id: str) -> None:
        folder = self._folder(file_id)
        # without its record the file is gone, even if the removal is interrupted
        (folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _make(self, folder: Path) -> None:
        make_private_folder(self._root.parent)
        make_private_folder(self._root)
        make_private_folder(folder)

    def _folder(self, file_id: str) -> Path:
        if not FILE_ID.fullmatch(file_id):
            raise _not_found(file_id)
        return self._root / file_id

    def _record(
        self, file_id: str, filename: str, num_bytes: int, expiry_s: int, purpose: Purpose
    ) -> FileObject:
        now = int(self._clock())
        return FileObject(
            id=file_id,
            bytes=num_bytes,
            created_at=now,
            expires_at=now + expiry_s,
            filename=filename,
            purpose=purpose,
        )


def _not_found(file_id: str) -> NotFound:
    return NotFound(
        f"no file {quoted(file_id)}; GET /v1/files lists those there are", param="file_id"
    )
