"""Training samples of a target, and their check at the door. Legend: that of
`fleet.drafts.eagle3`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fleet.core.errors import SampleRefused
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.loss import TargetRows, TrainingRows

MIN_POSITIONS = 3
"""A head drafts token i + 2 from position i, and the target confirms it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """A prompt and its answer, as the target computed them.

    `ids_N`: int64. `taps_NT`: low to high. Either `last_NH`, the final hidden rows after the final
    norm, or `logits_NV`.
    `embeddings_NH`: the rows that entered the first layer, where they are not those of the ids, as
    for audio.
    `answer_start`: index of the answer's first token. `layer_ids`, `target_hash`: of the taps, and
    of the target that computed them.
    """

    sample_id: str
    ids_N: Tensor
    taps_NT: Tensor
    answer_start: int
    layer_ids: tuple[int, ...]
    target_hash: str
    last_NH: Tensor | None = None
    logits_NV: Tensor | None = None
    embeddings_NH: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts().values())

    def check(self, config: Eagle3Config) -> None:
        """Raises: SampleRefused with the sample's id and the cause, unless the sample fits a head
        of this configuration.
        """
        cause = self._mismatch(config) or self._wrong_shape(config) or self._wrong_value(config)
        if cause:
            raise SampleRefused(f"sample {self.sample_id}: {cause}")

    def _mismatch(self, config: Eagle3Config) -> str | None:
        if self.target_hash != config.target_hash:
            return (
                f"computed by the target {self.target_hash}, the head belongs to "
                f"{config.target_hash}"
            )
        if self.layer_ids != config.layer_ids:
            return f"taps of the layers {self.layer_ids}, the head reads {config.layer_ids}"
        if (self.last_NH is None) == (self.logits_NV is None):
            return "needs either last hidden rows or logits"
        return None

    def _wrong_shape(self, config: Eagle3Config) -> str | None:
        num_positions = len(self.ids_N)
        widths = {
            "taps": config.tap_width,
            "last hidden rows": config.hidden_size,
            "embeddings": config.hidden_size,
            "logits": config.vocab_size,
        }
        for name, part in self._parts().items():
            wanted = (num_positions, widths[name]) if name in widths else (num_positions,)
            if tuple(part.shape) != wanted:
                return f"{name} have the shape {tuple(part.shape)}, not {wanted}"
        if num_positions < MIN_POSITIONS:
            return f"{num_positions} positions; a draft needs at least {MIN_POSITIONS}"
        if not 0 <= self.answer_start < num_positions:
            return (
                f"the answer starts at {self.answer_start}, outside of its {num_positions} "
                "positions"
            )
        return None

    def _wrong_value(self, config: Eagle3Config) -> str | None:
        if int(self.ids_N.min()) < 0 or int(self.ids_N.max()) >= config.vocab_size:
            return f"an id is outside of 0..{config.vocab_size - 1}"
        for name, part in self._parts().items():
            if not bool(part.isfinite().all()):
                return f"{name} are not finite"
        return None

    def _parts(self) -> dict[str, Tensor]:
        parts = {
            "ids": self.ids_N,
            "taps": self.taps_NT,
            "last hidden rows": self.last_NH,
            "logits": self.logits_NV,
            "embeddings": self.embeddings_NH,
        }
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """The parts of the target that training reads.

    `embed` maps ids [n] to rows [n, H], `head` final hidden rows [n, H] to logits [n, V].
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


@torch.no_grad()
def training_rows(sample: DraftSample, target: TargetParts, vocabulary_D: Tensor) -> TrainingRows:
    """Move a checked sample to the device of the vocabulary, and compute what the target predicts
    at its positions.
    """
    device = vocabulary_D.device
    ids_N = sample.ids_N.to(device)
    if sample.logits_NV is not None:
        predicted = TargetRows.of_logits(sample.logits_NV.to(device), vocabulary_D)
    else:
        assert sample.last_NH is not None, "a sample that was not checked"
        predicted = TargetRows.of_hidden(sample.last_NH.to(device), target.head, vocabulary_D)
    given = sample.embeddings_NH
    return TrainingRows(
        embeddings_NH=target.embed(ids_N) if given is None else given.to(device),
        taps_NT=sample.taps_NT.to(device),
        target=predicted,
        is_answer_N=torch.arange(len(ids_N), device=device) >= sample.answer_start,
    )
