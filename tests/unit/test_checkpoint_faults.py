"""Trainers that share a folder while they are killed or frozen at any file operation, Redis loses
its last writes, and checkpoints are deleted or damaged: the next trainer continues from the newest
whole checkpoint, and one that was frozen changes nothing.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.checkpoints import Checkpoints
from fleet.drafts.trainer.folder import CHECKPOINTS, VERSIONS, Overtaken, checkpoints_of, epochs_of
from fleet.drafts.trainer.state import FILES, MANIFEST_FILE, TrainedSamples
from fleet.drafts.trainer.trainer import Trainer
from fleet.drafts.trainer.versions import recorded
from tests.draft_records import LocalRecords, RecordTable
from tests.file_faults import FrozenCall, run_killed
from tests.unit.test_draft_trainer import make_trainer

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

NUM_STEPS, MOST_VERSIONS = 30, 3
MOST_OPERATIONS = 90


@pytest.fixture(autouse=True)
def no_power_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the flushes, which only the end of the machine would need."""
    monkeypatch.setattr("os.fsync", lambda _: None)


class SharedFolder:
    """A folder and records that trainers share. `stamp` is different for each state of a head."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = RecordTable()
        self.stamp = 0

    def visible(self) -> dict[str, bytes]:
        """Return every file that readers may see by its path, without the epoch, and the epochs."""
        found = {"epochs": repr(epochs_of(self.folder)).encode()}
        for file in self.folder.rglob("*"):
            parts = file.relative_to(self.folder).parts
            if file.is_file() and not any(part[0] == "." for part in parts):
                found["/".join(parts)] = file.read_bytes()
        return found

    def hidden(self) -> list[Path]:
        return [*self.folder.glob("*/*/.*"), *self.folder.glob("*/.*")]


class SharingTrainer:
    """Trainer of a shared folder, without a thread."""

    def __init__(self, shared: SharedFolder) -> None:
        self._shared = shared
        self.trainer: Trainer = make_trainer([])
        self.records = LocalRecords(shared.table)
        self.checkpoints = Checkpoints(self.trainer, shared.folder)
        self.checkpoints.begin(self.records)

    def join_again(self) -> None:
        """Begin another incarnation of the worker."""
        self.records = LocalRecords(self._shared.table)
        self.checkpoints.begin(self.records)

    def open(self) -> int:
        """Become the trainer that writes; return the stamp of the state that training continues
        from, 0 for the first head.
        """
        assert self.checkpoints.open() is not None
        stamp = self.trainer.num_windows
        assert not stamp or float(self.trainer.head.fc.detach().flatten()[0]) == stamp
        return stamp

    def advance(self) -> int:
        """Train: give the head another state, and return its stamp."""
        self._shared.stamp += 1
        with torch.no_grad():
            self.trainer.head.fc.fill_(self._shared.stamp)
        self.trainer.num_windows = self._shared.stamp
        return self._shared.stamp

    def save(self) -> str:
        """Write the present state as a checkpoint; return its name."""
        samples = TrainedSamples(contained=(f"sample {self.trainer.num_windows}",))
        written = self.checkpoints.write(samples)
        self.checkpoints.publish(written)
        return written.name

    def publish(self) -> DraftVersion:
        return self.checkpoints.publish_version(
            self.checkpoints.write_version("run", 1, acceptance=None)
        )

    def save_and_publish(self) -> None:
        self.save()
        self.publish()


def trainer_with_unsaved_state(shared: SharedFolder) -> SharingTrainer:
    """Return a trainer that has saved and published two states and is in a third."""
    trainer = SharingTrainer(shared)
    trainer.open()
    for _ in range(2):
        trainer.advance()
        trainer.save_and_publish()
    trainer.advance()
    return trainer


@pytest.mark.parametrize("is_resurrected", [False, True])
def test_trainer_frozen_at_any_file_operation_changes_nothing_once_another_has_opened_the_folder(
    tmp_path: Path, is_resurrected: bool
) -> None:
    """`is_resurrected`: Redis loses that the frozen trainer was fenced, so that its records accept
    what it writes.
    """
    num_frozen = 0
    for at in range(MOST_OPERATIONS):
        shared = SharedFolder(tmp_path / str(at))
        old = trainer_with_unsaved_state(shared)
        call = FrozenCall(old.save_and_publish, at)
        if not call.start():
            assert at > 20, "a save has fewer file operations than it must have"
            break
        num_frozen += 1
        before = shared.table.copied()
        old.records.fence()
        successor = SharingTrainer(shared)
        assert successor.open() in (2, 3)
        successor.advance()
        successor.save_and_publish()
        visible = shared.visible()
        if is_resurrected:
            shared.table.lose_tail(before)
        call.thaw()
        assert call.error is None or isinstance(call.error, (Overtaken, OSError)), call.error
        assert shared.visible() == visible, f"changed by a trainer frozen at operation {at}"
        last = SharingTrainer(shared)
        assert last.open() == shared.stamp
        assert not shared.hidden()
        shutil.rmtree(shared.folder)
    else:
        pytest.fail(f"a save has more than {MOST_OPERATIONS} file operations")
    assert num_frozen > 20


def test_trainer_frozen_while_it_takes_over_changes_nothing(tmp_path: Path) -> None:
    for at in range(MOST_OPERATIONS):
        shared = SharedFolder(tmp_path / str(at))
        first = SharingTrainer(shared)
        first.open()
        for _ in range(3):
            first.advance()
            first.save_and_publish()
        first.records.fence()
        old = SharingTrainer(shared)
        call = FrozenCall(old.checkpoints.open, at)
        if not call.start():
            assert at > 5
            return
        old.records.fence()
        successor = SharingTrainer(shared)
        assert successor.open() == 3
        successor.advance()
        successor.save_and_publish()
        visible = shared.visible()
        call.thaw()
        assert shared.visible() == visible, f"changed by a trainer frozen at operation {at}"
        with pytest.raises((Overtaken, OSError)):
            old.save()
        assert shared.visible() == visible
        shutil.rmtree(shared.folder)
    pytest.fail("opening a folder never ends")


def test_trainer_killed_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    for at in range(MOST_OPERATIONS):
        shared = SharedFolder(tmp_path / str(at))
        old = trainer_with_unsaved_state(shared)
        is_killed = run_killed(old.save_and_publish, at)
        successor = SharingTrainer(shared)
        assert successor.open() in (2, 3)
        successor.advance()
        successor.save_and_publish()
        assert not shared.hidden() and len(checkpoints_of(shared.folder)) == 2
        shutil.rmtree(shared.folder)
        if not is_killed:
            return
    pytest.fail("a save never ends")


@dataclass
class SavedState:
    """A checkpoint that became visible. `is_whole`: nobody has deleted or damaged it.
    `is_superseded`: two newer ones have been whole together, so that it may be removed.
    """

    name: str
    stamp: int
    is_whole: bool = True
    is_superseded: bool = False


@dataclass
class TrainingHistory:
    """A random history of trainers in one folder, and what it must lead to."""

    shared: SharedFolder
    rng: random.Random
    saves: list[SavedState] = field(default_factory=list[SavedState])
    numbers: dict[int, str] = field(default_factory=dict[int, str])
    tables: list[RecordTable] = field(default_factory=list[RecordTable])

    def __post_init__(self) -> None:
        self.active = SharingTrainer(self.shared)
        assert self.active.open() == 0

    def step(self) -> None:
        self.tables.append(self.shared.table.copied())
        ordered: list[Callable[[], None]] = [
            self.save,
            self.save,
            self.publish,
            self.kill,
            self.freeze,
            self.lose_tail,
            self.damage,
        ]
        self.rng.choice(ordered)()
        self.check_folder()

    def save(self) -> None:
        stamp = self.active.advance()
        self.saves.append(SavedState(self.active.save(), stamp))
        assert not self.shared.hidden()

    def publish(self) -> None:
        self.note(self.active.publish())

    def note(self, version: DraftVersion) -> None:
        known = self.numbers.setdefault(version.number, version.sha256)
        assert known == version.sha256, f"two heads are version {version.number}"

    def kill(self) -> None:
        """Kill the trainer at a file operation of a save, and replace it."""
        self.active.advance()
        run_killed(self.active.save_and_publish, self.rng.randrange(MOST_OPERATIONS))
        self.replace()

    def freeze(self) -> None:
        """Freeze the trainer, let a successor train, and thaw it: nothing may change then."""
        old = self.active
        old.advance()
        call = FrozenCall(old.save_and_publish, self.rng.randrange(MOST_OPERATIONS))
        is_frozen = call.start()
        before = self.shared.table.copied()
        self.replace()
        for _ in range(self.rng.randrange(3)):
            self.save()
        if not is_frozen:
            return
        if self.rng.random() < 0.5:
            self.shared.table.lose_tail(before)
        visible = self.shared.visible()
        call.thaw()
        assert self.shared.visible() == visible
        self.rejoin()

    def lose_tail(self) -> None:
        """Redis loses its last writes; the trainer's worker notices it, and joins again."""
        self.shared.table.lose_tail(self.rng.choice(self.tables[-8:]))
        self.rejoin()

    def damage(self) -> None:
        """Delete or damage one of the checkpoints, if the next best is at most two saves old."""
        present = {place.name: place for place in checkpoints_of(self.shared.folder)}
        whole = [save for save in self.saves if save.is_whole and save.name in present]
        if len(whole) < 2:
            return
        save = self.rng.choice(whole[-2:])
        others = [each for each in whole if each is not save]
        if len(self.saves) - 1 - self.saves.index(others[-1]) > 2:
            return
        save.is_whole = False
        if self.rng.random() < 0.3:
            shutil.rmtree(present[save.name])
            return
        file = present[save.name] / self.rng.choice([*FILES, MANIFEST_FILE])
        data = bytearray(file.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        file.write_bytes(data)

    def replace(self) -> None:
        """Fence the trainer, which may be frozen or dead, and let another continue."""
        self.active.records.fence()
        self.note_visible()
        self.active = SharingTrainer(self.shared)
        self.check_continuation(self.active.open())

    def rejoin(self) -> None:
        self.active.join_again()
        self.check_continuation(self.active.open())

    def note_visible(self) -> None:
        """Count the checkpoint that became visible before its trainer was killed or frozen."""
        newest = next(iter(checkpoints_of(self.shared.folder)), None)
        if newest is not None and all(save.name != newest.name for save in self.saves):
            self.saves.append(SavedState(newest.name, self.shared.stamp))

    def check_continuation(self, stamp: int) -> None:
        """Check that training continues from the newest checkpoint that is whole, which is at most
        two saves old.
        """
        ages = [age for age, save in enumerate(reversed(self.saves)) if save.is_whole]
        assert stamp == (self.saves[-1 - ages[0]].stamp if ages else 0)
        assert not ages or ages[0] <= 2

    def check_folder(self) -> None:
        """Check that the two newest whole checkpoints are there, that the disk is bounded, and that
        no two heads are one version.
        """
        folder = self.shared.folder
        needed = [save for save in self.saves if save.is_whole and not save.is_superseded]
        present = {place.name for place in checkpoints_of(folder)}
        assert {save.name for save in needed[-2:]} <= present
        for save in needed[:-2]:
            save.is_superseded = True
        assert len(list((folder / CHECKPOINTS).iterdir())) == 1
        assert len(checkpoints_of(folder)) <= 3
        versions = [version for _, version in recorded((folder / VERSIONS).iterdir())]
        registered = {each.number: each.sha256 for each in self.shared.table.versions}
        assert len(registered) == len(self.shared.table.versions)
        assert len(versions) <= MOST_VERSIONS + 2
        for version in versions:
            assert registered.get(version.number, version.sha256) == version.sha256


@pytest.mark.parametrize("seed", range(24))
def test_training_continues_from_the_newest_whole_checkpoint_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("fleet.drafts.trainer.versions.MOST_VERSIONS", MOST_VERSIONS)
    history = TrainingHistory(SharedFolder(tmp_path), random.Random(seed))
    for _ in range(NUM_STEPS):
        history.step()
    history.replace()
    history.save()
    assert len(checkpoints_of(tmp_path)) in (1, 2)
