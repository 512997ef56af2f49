"""Checkpoints of a trainer and versions of its head, in a folder that all trainers of the fleet
share. Methods block, and are for one thread at a time.
"""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from fleet.core.clock import now_us
from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.files import WEIGHTS_FILE, load_head, save_head
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.samples import DraftSample
from fleet.drafts.trainer.state import TrainedSamples, restore_trainer, save_samples, save_trainer
from fleet.drafts.trainer.trainer import Trainer

CHECKPOINTS, VERSIONS = "checkpoints", "versions"


class Checkpoints:
    """Writer and reader of one trainer's checkpoints and versions, under the shared folder."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._checkpoints, self._versions = folder / CHECKPOINTS, folder / VERSIONS

    def save(self, samples: TrainedSamples, previous: str, *, is_trained: bool) -> str:
        """Write a checkpoint and return its name. Raises: OSError.

        `samples`: ids of the samples that it contains. `previous`: name of the checkpoint before.
        `is_trained`: False if no optimizer step was made since `previous`; the files of weights and
        moments are then shared.
        """
        name = f"{self._trainer.num_windows:08d}-{secrets.token_hex(4)}"
        folder, last = self._checkpoints / name, self._checkpoints / previous
        if not is_trained and previous and last.is_dir():
            save_samples(folder, samples, last)
        else:
            save_trainer(self._trainer, folder, samples)
        return name

    def restore(self, name: str) -> TrainedSamples:
        """Load a checkpoint into the trainer; return the samples that it contains.

        Raises: ConfigError if the checkpoint is not in the folder.
        """
        folder = self._checkpoints / name
        if not folder.is_dir():
            raise ConfigError(
                f"training.folder: the fleet's last checkpoint {name} is not in "
                f"{folder.parent}; all trainers need one folder",
                param="training.folder",
            )
        return restore_trainer(self._trainer, folder)

    def keep_only(self, name: str) -> None:
        """Delete all checkpoints except `name`."""
        for folder in self._checkpoints.iterdir():
            if folder.name != name:
                shutil.rmtree(folder, ignore_errors=True)

    def write_version(
        self, source: str, num_samples: int, acceptance: float | None
    ) -> DraftVersion:
        """Write the trainer's head as a version, in a folder named by its hash; return the
        version's record, without a number yet. `source`: training run that made it.
        """
        head = self._trainer.head
        folder = self._versions / secrets.token_hex(8)
        sha256 = save_head(head, folder)
        place = self._versions / sha256
        if place.exists():
            shutil.rmtree(folder)
        else:
            folder.rename(place)
        return DraftVersion(
            number=0,
            sha256=sha256,
            target=head.config.target_hash,
            num_bytes=(place / WEIGHTS_FILE).stat().st_size,
            windows=self._trainer.num_windows,
            samples=num_samples,
            acceptance=acceptance,
            source=source,
            created_us=now_us(),
        )

    def acceptance_of(self, version: DraftVersion | None, held_out: Sequence[DraftSample]) -> float:
        """Return the simulated acceptance length of a version on held-out samples; 0 if there are
        no samples, no version, or its files are missing.
        """
        folder = self._versions / version.sha256 if version is not None else None
        if folder is None or not folder.is_dir() or not held_out:
            return 0.0
        head = load_head(folder, device=self._trainer.head.fc.device)
        return self._trainer.evaluate(held_out, head).simulated_acceptance_length
