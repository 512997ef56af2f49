"""The trainer of a draft head: one optimizer step for each window of samples. Knows no source of
samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.loss import DraftCounts, TrainingRows, unrolled_loss
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample, TargetParts, training_rows

TRAINED_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Settings of training. A window, the samples of one optimizer step, has `window_samples`
    samples, computed `batch_samples` at a time.

    `num_steps`, `decay`: see `unrolled_loss`. `warmup_windows`: windows over which the learning
    rate grows linearly from 0.
    Raises: ConfigError with the name of the field.
    """

    window_samples: int = 8
    batch_samples: int = 2
    num_steps: int = 5
    decay: float = 0.8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5
    warmup_windows: int = 20

    def __post_init__(self) -> None:
        for name in (
            "window_samples",
            "batch_samples",
            "num_steps",
            "decay",
            "learning_rate",
            "max_grad_norm",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"trainer: {name} must be above 0, not {getattr(self, name)}", param=name
                )
        if self.window_samples % self.batch_samples:
            raise ConfigError(
                f"trainer: window_samples ({self.window_samples}) is no multiple of "
                f"batch_samples ({self.batch_samples})",
                param="window_samples",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """Result of training one window. `window`: number of the window, from 1. `loss`: mean over its
    batches, before the optimizer step. `counts`: sums over its samples. `grad_norm`: norm before
    clipping.
    """

    window: int
    loss: float
    grad_norm: float
    num_positions: int
    counts: DraftCounts
    sample_ids: tuple[str, ...]


class NotFinite(ArithmeticError):
    """The loss or gradient of a window is not finite. `sample_ids`: samples of the window."""

    def __init__(self, message: str, sample_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.sample_ids = sample_ids


class Trainer:
    """Trains a draft head with AdamW on the samples in a replay buffer.

    Raises: ConfigError for a head of fewer than 32 bits, in which small updates are lost; serve a
    copy (`in_dtype`).
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: TargetParts,
        settings: TrainerSettings,
        buffer: ReplayBuffer,
    ) -> None:
        if head.config.dtype not in TRAINED_DTYPES:
            raise ConfigError(
                f"trainer: a head is trained in {' or '.join(TRAINED_DTYPES)}, not "
                f"{head.config.dtype}",
                param="dtype",
            )
        self.head, self.buffer = head, buffer
        self.settings = settings
        self._target = target
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._first = [weight.detach().clone() for weight in head.parameters()]
        self.num_windows = 0
        """Number of optimizer steps made so far."""

    def reset(self) -> None:
        """Return head and optimizer to their state before the first window."""
        with torch.no_grad():
            for weight, first in zip(self.head.parameters(), self._first, strict=True):
                weight.copy_(first)
        self.optimizer.state.clear()
        self.num_windows = 0

    def add(self, sample: DraftSample) -> bool:
        """Check a sample and add it to the replay buffer; return whether it was added, see
        `ReplayBuffer.add`.

        Raises: SampleRefused if the sample does not fit the head.
        """
        sample.check(self.head.config)
        return self.buffer.add(sample)

    def train_window(self) -> WindowRecord:
        """Make one optimizer step on a whole window drawn from the replay buffer.

        Raises: ValueError if the buffer has too few samples; NotFinite.
        """
        return self.train_on(self.buffer.draw(self.settings.window_samples))

    def train_on(self, samples: Sequence[DraftSample]) -> WindowRecord:
        """Make one optimizer step on these samples.

        Raises: NotFinite if the loss or a gradient is not finite; the head is then unchanged.
        """
        settings, sample_ids = self.settings, tuple(sample.sample_id for sample in samples)
        batches = [
            samples[at : at + settings.batch_samples]
            for at in range(0, len(samples), settings.batch_samples)
        ]
        self.optimizer.zero_grad(set_to_none=True)
        total, counts = 0.0, None
        for batch in batches:
            try:
                done = unrolled_loss(
                    self.head, self._rows(batch), num_steps=settings.num_steps, decay=settings.decay
                )
            except ArithmeticError as error:
                raise NotFinite(f"window {self.num_windows + 1}: {error}", sample_ids) from error
            (done.loss / len(batches)).backward()
            total += done.loss.item() / len(batches)
            counts = done.counts if counts is None else counts + done.counts
        assert counts is not None, "a window without batches"
        norm = float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), settings.max_grad_norm))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(
                f"window {self.num_windows + 1}: the gradient of the draft head is not finite",
                sample_ids,
            )
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(
                1.0, (self.num_windows + 1) / (settings.warmup_windows + 1)
            )
        self.optimizer.step()
        self.num_windows += 1
        return WindowRecord(
            window=self.num_windows,
            loss=total,
            grad_norm=norm,
            counts=counts,
            sample_ids=sample_ids,
            num_positions=sum(len(sample.ids_N) for sample in samples),
        )

    @torch.no_grad()
    def evaluate(
        self, samples: Sequence[DraftSample], head: Eagle3Head | None = None
    ) -> DraftCounts:
        """Return the draft counts over samples without training on them, for `head`, or for the
        trained head if it is None.

        Raises: SampleRefused if a sample does not fit the head; ConfigError without samples.
        """
        counts: DraftCounts | None = None
        head, settings = head or self.head, self.settings
        for sample in samples:
            sample.check(head.config)
            rows = [training_rows(sample, self._target, head.vocabulary_D)]
            done = unrolled_loss(head, rows, num_steps=settings.num_steps, decay=settings.decay)
            counts = done.counts if counts is None else counts + done.counts
        if counts is None:
            raise ConfigError("trainer: no samples to evaluate", param="samples")
        return counts

    def _rows(self, samples: Sequence[DraftSample]) -> list[TrainingRows]:
        return [training_rows(sample, self._target, self.head.vocabulary_D) for sample in samples]
