"""Records of training in memory, for trainers without Redis."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.records import TrainingRecords


@dataclass
class RecordTable:
    """What Redis has of training: the trainer that may write, its epoch, and the versions.

    `fenced`: trainers whose rights have ended. `before`: version in use before the present one.
    """

    trainer: int = 0
    epoch: int = 0
    last_number: int = 0
    versions: list[DraftVersion] = field(default_factory=list[DraftVersion])
    present: DraftVersion | None = None
    before: DraftVersion | None = None
    fenced: set[int] = field(default_factory=set[int])

    def copied(self) -> "RecordTable":
        return copy.deepcopy(self)

    def lose_tail(self, earlier: "RecordTable") -> None:
        """Return to an earlier state, as Redis does that has lost its last writes."""
        for name, value in vars(earlier.copied()).items():
            setattr(self, name, value)


class LocalRecords(TrainingRecords):
    """Records of one trainer, which other trainers share through the same table."""

    _ids = itertools.count(1)

    def __init__(self, table: RecordTable) -> None:
        self.table = table
        self.trainer = next(self._ids)
        self._epoch = 0

    def fence(self) -> None:
        """End this trainer's right, as the conductor does for a worker that was frozen or died."""
        self.table.fenced.add(self.trainer)

    def claim(self, newest: int) -> int | None:
        if self.trainer in self.table.fenced:
            return None
        self.table.trainer = self.trainer
        self.table.epoch = self._epoch = max(self.table.epoch, newest) + 1
        return self._epoch

    def holds(self) -> bool:
        table = self.table
        is_fenced = self.trainer in table.fenced
        return not is_fenced and (table.trainer, table.epoch) == (self.trainer, self._epoch)

    def versions(self) -> Sequence[DraftVersion]:
        return list(self.table.versions)

    def add_version(self, version: DraftVersion, newest: int) -> DraftVersion | None:
        if not self.holds():
            return None
        table = self.table
        known = next((each for each in table.versions if each.sha256 == version.sha256), None)
        if known is not None:
            return known
        last = max(table.last_number, newest)
        is_taken = any(each.number == version.number for each in table.versions)
        number = version.number if version.number and not is_taken else last + 1
        table.last_number = max(last, number)
        table.versions.append(msgspec.structs.replace(version, number=number))
        return table.versions[-1]

    def forget_version(self, version: DraftVersion) -> bool:
        used = [each.sha256 for each in (self.table.present, self.table.before) if each is not None]
        if not self.holds() or version.sha256 in used:
            return False
        self.table.versions = [
            each for each in self.table.versions if each.sha256 != version.sha256
        ]
        return True

    def version_in_use(self) -> DraftVersion | None:
        return self.table.present

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        if not self.holds() or present != self.table.present:
            return False
        self.table.before, self.table.present = present, version
        return True
