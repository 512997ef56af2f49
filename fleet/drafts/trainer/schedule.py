"""Schedule of training: when to train windows, write checkpoints and promote versions. Pure."""

import hashlib
from dataclasses import dataclass

from fleet.core.errors import ConfigError
from fleet.drafts.trainer.samples import DraftSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSchedule:
    """Settings of when windows are trained, checkpoints written and versions promoted; see
    `TrainingConfig`.

    `num_slots`: most unacknowledged samples. `margin`: gain of acceptance length that promotes a
    version; None promotes no version.
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
        """Return True if a sample is kept for evaluation instead of training. The choice depends on
        the token ids only, so that equal texts give equal choices.
        """
        digest = hashlib.blake2b(sample.ids_N.numpy().tobytes(), digest_size=4).digest()
        return int.from_bytes(digest, "little") < self.held_out * 2**32
