"""Facts of training that the whole fleet shares, as the trainer reads and writes them. The worker
keeps them in Redis.
"""

from typing import Protocol

import msgspec

from fleet.drafts.figures.training import DraftVersion


class TrainingRecords(Protocol):
    """Writes are refused, with None or False, once another trainer is active."""

    def checkpoint(self) -> str:
        """Return the name of the last durable checkpoint; "" before the first one."""
        ...

    def note_checkpoint(self, name: str) -> bool:
        """Make a checkpoint the last durable one."""
        ...

    def add_version(self, version: DraftVersion) -> DraftVersion | None:
        """Add a version, and return it with its number. A version of the same bytes is returned as
        it is.
        """
        ...

    def version_in_use(self) -> DraftVersion | None:
        """Return the version that the fleet drafts with; None: that of the workers' start."""
        ...

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        """Let the fleet draft with a version, if `present` is still in use."""
        ...


class LocalRecords(TrainingRecords):
    """Records of one process that trains alone."""

    def __init__(self) -> None:
        self._checkpoint = ""
        self.versions: list[DraftVersion] = []
        self.present: DraftVersion | None = None

    def checkpoint(self) -> str:
        return self._checkpoint

    def note_checkpoint(self, name: str) -> bool:
        self._checkpoint = name
        return True

    def add_version(self, version: DraftVersion) -> DraftVersion | None:
        known = next((each for each in self.versions if each.sha256 == version.sha256), None)
        if known is not None:
            return known
        self.versions.append(msgspec.structs.replace(version, number=len(self.versions) + 1))
        return self.versions[-1]

    def version_in_use(self) -> DraftVersion | None:
        return self.present

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        self.present = version
        return True
