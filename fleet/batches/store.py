"""Batches on disk: a folder for each, with its record. Its job alone writes the record after its
creation; a cancellation is a file of its own. Sends nothing.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from fleet.batches.files import FileStore
from fleet.batches.records import (
    BATCH,
    BATCH_ID,
    ENDED,
    MAX_EXPIRY_S,
    WINDOW_S,
    Batch,
    StoredBatch,
    is_owned,
    new_id,
)
from fleet.config import FleetConfig
from fleet.core.errors import Conflict, NotFound, Overloaded, quoted
from fleet.process.private import make_private_folder, write_private

RECORD, CANCEL = "record.json", "cancel"
_decode = msgspec.json.Decoder(StoredBatch).decode


class BatchStore:
    """The batches in `batches.folder`, which gateways and job workers share. An ended batch is kept
    for at least `MAX_EXPIRY_S` after its creation; `create` removes older ones.
    """

    def __init__(self, config: FleetConfig, clock: Callable[[], float] = time.time) -> None:
        self.files = FileStore(config, clock)
        self._root = config.batches_dir / "batches"
        self._unfinished = config.batches_dir / "unfinished"
        self._max_unfinished = config.batches.max_unfinished
        self.clock = clock

    def create(
        self,
        endpoint: str,
        input_file_id: str,
        metadata: Mapping[str, str] | None = None,
        output_expiry_s: int = MAX_EXPIRY_S,
        owner: str = "",
        key: str = "",
    ) -> Batch:
        """Store a new batch; the caller starts the job that runs it. `owner`: see `new_id`. `key`:
        name of the client's API key; "" without keys.

        Raises: NotFound if there is no such file; Conflict if the file is an output of a batch;
        Overloaded if `batches.max_unfinished` batches are unfinished; OSError.
        """
        if self.files.find(input_file_id).purpose != "batch":
            raise Conflict(
                "input_file_id: the file is the output of a batch; upload one for a batch",
                param="input_file_id",
            )
        if len(self.unfinished()) >= self._max_unfinished:
            raise Overloaded(
                f"{self._max_unfinished} batches have not ended (batches.max_unfinished); try "
                "again when one has, or cancel one",
                retry_after_s=60,
            )
        self._remove_old()
        now = int(self.clock())
        batch = Batch(
            id=new_id(BATCH, owner),
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=dict(metadata) if metadata else None,
        )
        for folder in (self._root.parent, self._root, self._unfinished, self._folder(batch.id)):
            make_private_folder(folder)
        self.save(StoredBatch(batch=batch, output_expiry_s=output_expiry_s, key=key))
        (self._unfinished / batch.id).touch(mode=0o600)
        return batch

    def save(self, stored: StoredBatch) -> None:
        """Replace the record of a batch. An ended batch is also removed from the list of unfinished
        batches.
        """
        batch = stored.batch
        write_private(self._folder(batch.id) / RECORD, msgspec.json.encode(stored).decode())
        if batch.status in ENDED:
            (self._unfinished / batch.id).unlink(missing_ok=True)

    def load(self, batch_id: str) -> StoredBatch:
        """Return a batch as its job last saved it, without regard to a cancellation. Raises:
        NotFound.
        """
        try:
            return _decode((self._folder(batch_id) / RECORD).read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise _not_found(batch_id) from error

    def find(self, batch_id: str) -> Batch:
        """Return a batch as clients see it: after a cancellation the status is `cancelling` until
        the job has ended the batch. Raises: NotFound.
        """
        batch = self.load(batch_id).batch
        cancelled_at = self.cancelled_at(batch_id)
        if cancelled_at is None:
            return batch
        status = batch.status if batch.status in ENDED else "cancelling"
        return msgspec.structs.replace(batch, status=status, cancelling_at=cancelled_at)

    def check_owner(self, batch_id: str, owner: str) -> None:
        """Raise NotFound unless the id names `owner` (see `new_id`). Whether the batch exists is
        not checked.
        """
        if not is_owned(batch_id, owner):
            raise _not_found(batch_id)

    def page(self, after: str, limit: int, owner: str = "") -> tuple[Sequence[Batch], bool]:
        """Return up to `limit` batches of a client, newest first, and True if there are more.
        `after`: id of a batch; only older batches are returned. With "" the newest are returned.
        """
        ids = [
            name for name in self._ids() if is_owned(name, owner) and (not after or name < after)
        ]
        return [self.find(name) for name in ids[:limit]], len(ids) > limit

    def cancel(self, batch_id: str) -> Batch:
        """Record the cancellation of a batch and return the batch. Its job then ends it, with an
        error for each line that has no answer yet. Idempotent. Raises: NotFound; Conflict if the
        batch has ended without a cancellation.
        """
        status = self.load(batch_id).batch.status
        if status in ENDED and self.cancelled_at(batch_id) is None:
            raise Conflict(f"batch {batch_id} has ended already: {status}", param="batch_id")
        if self.cancelled_at(batch_id) is None:
            write_private(self._folder(batch_id) / CANCEL, str(int(self.clock())))
        return self.find(batch_id)

    def cancelled_at(self, batch_id: str) -> int | None:
        """Return the time at which a batch was cancelled, in seconds since 1970; None if it was
        not.
        """
        try:
            return int((self._folder(batch_id) / CANCEL).read_text())
        except FileNotFoundError:
            return None

    def unfinished(self) -> list[str]:
        """Return the ids of batches that have not ended, the oldest first."""
        if not self._unfinished.is_dir():
            return []
        return sorted(name for name in os.listdir(self._unfinished) if BATCH_ID.fullmatch(name))

    def user_of(self, file_id: str) -> str | None:
        """Return the id of an unfinished batch that reads a file; None if there is none."""
        batches = (self.load(batch_id).batch for batch_id in self.unfinished())
        return next((batch.id for batch in batches if batch.input_file_id == file_id), None)

    def discard(self, batch_id: str) -> None:
        """Remove a batch that could not be started. Idempotent."""
        (self._unfinished / batch_id).unlink(missing_ok=True)
        shutil.rmtree(self._folder(batch_id), ignore_errors=True)

    def _remove_old(self) -> None:
        for batch_id in list(self._ids()):
            batch = self.load(batch_id).batch
            if batch.status in ENDED and batch.created_at + MAX_EXPIRY_S < self.clock():
                self.discard(batch_id)

    def _ids(self) -> Iterator[str]:
        """Yield the ids of all batches, the newest first."""
        names = os.listdir(self._root) if self._root.is_dir() else []
        for name in sorted(names, reverse=True):
            if BATCH_ID.fullmatch(name) and (self._root / name / RECORD).exists():
                yield name

    def _folder(self, batch_id: str) -> Path:
        if not BATCH_ID.fullmatch(batch_id):
            raise _not_found(batch_id)
        return self._root / batch_id


def _not_found(batch_id: str) -> NotFound:
    return NotFound(
        f"no batch {quoted(batch_id)}; GET /v1/batches lists those there are", param="batch_id"
    )
