"""When the trainer trains, saves and promotes. Pure."""

import hashlib
from dataclasses import dataclass

from fleet.core.errors import ConfigError
from fleet.drafts.trainer.samples import DraftSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSchedule:
    """When windows are trained, checkpoints made and versions promoted; see `TrainingConfig`.

    `num_slots`: most samples that are not acknowledged. `margin`: gain of acceptance length that
    promotes a version; the trainer promotes none if it is None.
    """

    num_slots: int
    window_samples: int
    passes: int
    checkpoint_windows: int
    held_out: float
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.num_slots < self.window_samples:
            raise ConfigError(
                f"training.window_samples: {self.window_samples} is more than the trainer holds "
                f"({self.num_slots}); raise "
                "stages.trainer.max_batch",
                param="training.window_samples",
            )

    def holds_out(self, sample: DraftSample) -> bool:
        """Return True for samples to compare versions by: always the same ones of equal texts."""
        digest = hashlib.blake2b(sample.ids_N.numpy().tobytes(), digest_size=4).digest()
        return int.from_bytes(digest, "little") < self.held_out * 2**32
