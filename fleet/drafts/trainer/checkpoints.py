"""Checkpoints of a trainer, and versions of its head, in a folder that all trainers of the fleet
share. The folder alone says which there are; Redis says which trainer may write.

Methods block, and are for one thread at a time.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.files import load_head
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.folder import (
    VERSIONS,
    Overtaken,
    WriterFolder,
    checkpoints_of,
    epochs_of,
    generation_of,
)
from fleet.drafts.trainer.records import TrainingRecords
from fleet.drafts.trainer.samples import DraftSample
from fleet.drafts.trainer.state import (
    Lineage,
    Manifest,
    TrainedSamples,
    check_whole,
    restore_trainer,
    save_trainer,
)
from fleet.drafts.trainer.trainer import Trainer
from fleet.drafts.trainer.versions import VersionShelf, write_version

log = logging.getLogger(__name__)
NUM_KEPT = 2
"""Number of whole checkpoints that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """A checkpoint that was written to `part` and is not visible yet. `spare`: the newest whole
    checkpoint before it, which is kept; "" if there is none.
    """

    part: Path
    name: str
    spare: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVersion:
    """A version of the draft head that was written to `part` and is not visible yet."""

    part: Path
    version: DraftVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Result of `Checkpoints.open` if the trainer may write. `restored`: samples in the checkpoint
    that was loaded, empty if there was none; None if the trainer's state continues, since no other
    trainer wrote a checkpoint after its last one.
    """

    restored: TrainedSamples | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCheckpoint:
    """Name and time of the last checkpoint, for readers; "" and 0 if there is none."""

    name: str = ""
    saved_us: int = 0


def last_checkpoint(folder: Path) -> LastCheckpoint:
    """Return the newest checkpoint in a trainers' folder, even if it is damaged."""
    try:
        newest = next(iter(checkpoints_of(folder)), None)
        return (
            LastCheckpoint(name=newest.name, saved_us=_saved_us(newest))
            if newest is not None
            else LastCheckpoint()
        )
    except OSError:
        return LastCheckpoint()  # a successor renamed the folder, or it cannot be read


def _saved_us(place: Path) -> int:
    return place.stat().st_mtime_ns // 1000


def newest_whole(folder: Path) -> Manifest | None:
    """Return the manifest of the newest whole checkpoint in a trainers' folder; None if there is
    none.
    """
    for place in checkpoints_of(folder):
        if is_whole(place):
            return check_whole(place)
    return None


def is_whole(place: Path) -> bool:
    try:
        check_whole(place)
    except ConfigError as error:
        log.warning("checkpoint %s is not used: %s", place.name, error.message)
        return False
    return True


def _remove_all_but(writer: WriterFolder, kept: Sequence[str]) -> None:
    """Remove all checkpoints but `kept`; remove none if `kept` has fewer than `NUM_KEPT` names."""
    for place in writer.checkpoints() if len(kept) == NUM_KEPT else ():
        if place.name not in kept:
            writer.discard(place)


class Checkpoints:
    """Writer and reader of one trainer's checkpoints and versions, under the shared folder.

    Invariants: the two newest whole checkpoints are never removed.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        self._records: TrainingRecords | None = None
        self._writer: WriterFolder | None = None
        self.name: str | None = None
        """Name of the checkpoint from which the trainer's state continues; "" before the first one,
        None if the state must be loaded.
        """
        self.last = LastCheckpoint()

    def begin(self, records: TrainingRecords) -> None:
        """Use the training records of the worker's next incarnation. The trainer may not write
        before `open`, which then loads its state.
        """
        self._records = records
        self._writer = None
        self.name = None
        self.last = last_checkpoint(self._folder)

    @property
    def records(self) -> TrainingRecords:
        assert self._records is not None, "a trainer without records"
        return self._records

    @property
    def writer(self) -> WriterFolder:
        if self._writer is None:
            raise Overtaken("this trainer may not write")
        return self._writer

    def may_write(self) -> bool:
        """Return True if this is still the trainer that writes. Raises: RedisUnreachable."""
        return self._writer is not None and self.records.holds()

    def open(self) -> Opened | None:
        """Become the trainer that writes, and load the newest whole checkpoint unless the trainer's
        state is newer; return None while another trainer may write.

        Raises: ConfigError if the checkpoint's head has another configuration, OSError,
        RedisUnreachable.
        """
        self._writer = None
        epoch = self.records.claim(max(epochs_of(self._folder), default=0))
        if epoch is None:
            return None
        try:
            writer = WriterFolder.take_over(self._folder, epoch)
            VersionShelf(writer, self.records).complete()
            places = writer.checkpoints()
            restored = self._load_newest(writer, places) if self._is_behind(places) else None
        except Overtaken as error:
            log.warning("another trainer is active: %s", error)
            return None
        self._writer = writer
        return Opened(restored=restored)

    def _is_behind(self, places: Sequence[Path]) -> bool:
        """Return True if the newest checkpoint must be loaded: this incarnation has loaded none
        yet, or another trainer wrote a checkpoint after the one that this trainer's state continues
        from.
        """
        if self.name is None:
            return True
        own = generation_of(self.name)
        return any(place.name != self.name and generation_of(place.name) >= own for place in places)

    def _load_newest(self, writer: WriterFolder, places: Sequence[Path]) -> TrainedSamples:
        self.name = None
        whole = list(itertools.islice(filter(is_whole, places), NUM_KEPT))
        _remove_all_but(writer, [place.name for place in whole])
        if whole:
            restored = restore_trainer(self._trainer, whole[0])
            self._note(whole[0])
            log.info("training continues from the checkpoint %s", whole[0].name)
            return restored
        if places:
            log.error("none of %d checkpoints is whole: training starts again", len(places))
        if self._trainer.num_windows:
            self._trainer.reset()
        self.name, self.last = "", LastCheckpoint()
        return TrainedSamples()

    def _note(self, place: Path) -> None:
        self.name = place.name
        self.last = LastCheckpoint(name=place.name, saved_us=_saved_us(place))

    def write(self, samples: TrainedSamples) -> WrittenCheckpoint:
        """Write a checkpoint that is not visible yet. `samples`: ids of the samples in it.

        Raises: Overtaken, OSError.
        """
        writer = self.writer
        writer.clean()
        others = writer.checkpoints()
        former = self.name or ""
        generations = map(generation_of, (former, *(place.name for place in others)))
        lineage = Lineage(generation=max(generations) + 1, parent=former, epoch=writer.epoch)
        part = writer.new_part()
        name = save_trainer(self._trainer, part, samples, lineage)
        spare = next((place.name for place in others if is_whole(place)), "")
        return WrittenCheckpoint(part=part, name=name, spare=spare)

    def publish(self, written: WrittenCheckpoint) -> None:
        """Make a written checkpoint visible, and remove all others except `written.spare`; without
        a spare none is removed.

        Raises: Overtaken if another trainer is active, OSError, RedisUnreachable.
        """
        if not self.may_write():
            raise Overtaken("this trainer has been fenced")
        self._note(self.writer.publish_checkpoint(written.part, written.name))
        _remove_all_but(self.writer, [name for name in (written.name, written.spare) if name])

    def write_version(
        self, source: str, num_samples: int, acceptance: float | None
    ) -> WrittenVersion:
        """Write the trainer's head as a version that is not visible yet. `source`: training run
        that made it. `num_samples`, `acceptance`: values for its `DraftVersion`. Raises: Overtaken,
        OSError.
        """
        part = self.writer.new_part()
        version = write_version(
            self._trainer.head,
            part,
            source=source,
            windows=self._trainer.num_windows,
            samples=num_samples,
            acceptance=acceptance,
        )
        return WrittenVersion(part=part, version=version)

    def publish_version(self, written: WrittenVersion) -> DraftVersion:
        """Make a written version visible; return it with its number.

        Raises: Overtaken if another trainer is active, OSError, RedisUnreachable.
        """
        return VersionShelf(self.writer, self.records).publish(written.part, written.version)

    def acceptance_of(self, version: DraftVersion | None, held_out: Sequence[DraftSample]) -> float:
        """Return the simulated acceptance length of a version on held-out samples; 0 without
        samples, without a version, and if the version's files are missing or damaged.
        """
        folder = self._folder / VERSIONS / version.sha256 if version is not None else None
        if folder is None or not folder.is_dir() or not held_out:
            return 0.0
        try:
            head = load_head(folder, device=self._trainer.head.fc.device)
        except ConfigError as error:
            log.warning("the version in use is not compared: %s", error.message)
            return 0.0
        return self._trainer.evaluate(held_out, head).simulated_acceptance_length
