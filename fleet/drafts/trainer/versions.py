"""Versions of the draft head in the trainers' folder: each in a folder named by the hash of its
weights, with its record. Redis has a copy of the records, for processes that do not see the folder.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from fleet.core.clock import now_us
from fleet.drafts.eagle3.files import WEIGHTS_FILE, write_head, write_whole
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.figures.training import (
    DraftVersion,
    decode_version,
    encode_version,
    same_version,
)
from fleet.drafts.trainer.folder import Overtaken, WriterFolder
from fleet.drafts.trainer.records import TrainingRecords

log = logging.getLogger(__name__)

VERSION_FILE = "version.json"
MOST_VERSIONS = 16
"""Number of versions that are kept, besides the one in use and the one before it."""


def write_version(
    head: Eagle3Head,
    folder: Path,
    *,
    source: str,
    windows: int = 0,
    samples: int = 0,
    acceptance: float | None = None,
) -> DraftVersion:
    """Write a head and its record to a folder that exists; return the record, without a number yet.
    See `DraftVersion` for the parameters.
    """
    sha256 = write_head(head, folder)
    version = DraftVersion(
        number=0,
        sha256=sha256,
        target=head.config.target_hash,
        num_bytes=(folder / WEIGHTS_FILE).stat().st_size,
        windows=windows,
        samples=samples,
        acceptance=acceptance,
        source=source,
        created_us=now_us(),
    )
    write_record(folder, version)
    return version


def write_record(folder: Path, version: DraftVersion) -> None:
    """Write the record of a version to the folder of its files, durably."""
    write_whole(folder / VERSION_FILE, encode_version(version))


def read_version(folder: Path) -> DraftVersion | None:
    """Return the record of a version in its folder; None if the record is missing or damaged, or
    belongs to another version.
    """
    try:
        version = decode_version((folder / VERSION_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return version if version.sha256 == folder.name else None


def is_whole(folder: Path) -> bool:
    """Return True if a version's weights have the hash that names their folder."""
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == folder.name
    except OSError:
        return False


def recorded(folders: Iterable[Path]) -> Iterator[tuple[Path, DraftVersion]]:
    """Yield each version that has a record, with its folder."""
    for folder in folders:
        if (version := read_version(folder)) is not None:
            yield folder, version


def newest_number(folders: Iterable[Path]) -> int:
    """Return the highest number in the records of these versions; 0 if none has one."""
    return max((version.number for _, version in recorded(folders)), default=0)


class VersionShelf:
    """The versions in a folder to which one trainer writes, and their copy in Redis.

    Raises: Overtaken once another trainer writes, OSError, RedisUnreachable.
    """

    def __init__(self, writer: WriterFolder, records: TrainingRecords) -> None:
        self._writer, self._records = writer, records

    def complete(self) -> None:
        """Add the folder's versions that Redis lacks, since Redis may have lost its last writes; a
        version keeps its number. Records in the folder are corrected from Redis. Then remove the
        oldest versions, beyond `MOST_VERSIONS`.
        """
        known = {version.sha256: version for version in self._records.versions()}
        lacking: list[DraftVersion] = []
        for folder in self._writer.versions():
            version, registered = read_version(folder), known.get(folder.name)
            if registered is not None:
                if version is None or not same_version(registered, version):
                    self._write_record(registered)
            elif version is not None and is_whole(folder):
                lacking.append(version)
        for version in sorted(lacking, key=lambda each: each.number):
            self._add(version)
        self._remove_oldest()

    def publish(self, part: Path, version: DraftVersion) -> DraftVersion:
        """Make a written version visible in the folder and in Redis, and remove the oldest versions
        beyond `MOST_VERSIONS`; return the version with its number.
        """
        place = self._writer.version(version.sha256)
        if place.exists() and not is_whole(place):
            log.warning("version %s is damaged, and written again", version.sha256)
            self._writer.discard(place)
        self._writer.publish_version(part, version.sha256)
        added = self._add(read_version(place) or version)
        self._remove_oldest()
        return added

    def _add(self, version: DraftVersion) -> DraftVersion:
        added = self._records.add_version(version, newest_number(self._writer.versions()))
        if added is None:
            raise Overtaken("this trainer has been fenced")
        if added != version:
            self._write_record(added)
        return added

    def _write_record(self, version: DraftVersion) -> None:
        part = self._writer.new_part()
        write_record(part, version)
        self._writer.publish_file(part, self._writer.version(version.sha256) / VERSION_FILE)

    def _remove_oldest(self) -> None:
        found = sorted(recorded(self._writer.versions()), key=lambda each: -each[1].number)
        for folder, version in found[MOST_VERSIONS:]:
            if self._records.forget_version(version):
                log.info("version %d of the draft head is removed", version.number)
                self._writer.discard(folder)
