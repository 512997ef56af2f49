"""Training samples of a target model, their checks on arrival, and their move to the trainer's
device. Legend: see `fleet.drafts.eagle3`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.errors import SampleRefused
from fleet.drafts.eagle3.config import NUM_TAPS, Eagle3Config
from fleet.drafts.eagle3.loss import TargetRows, TrainingRows
from fleet.engine.base import Arrays

HASH_BYTES = 32
MIN_POSITIONS = 3
"""Fewest positions of a sample: at position i a head drafts token i + 2, so a draft needs three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """A training sample: a prompt with its answer, and the hidden states that the target computed.

    `ids_N`: token ids, int64. `taps_NT`: inputs of the tapped layers, low to high. `last_NH`:
    hidden states after the final norm; alternatively `logits_NV`. `embeddings_NH`: inputs of the
    first layer, if they are not the embeddings of the ids, as for audio. `answer_start`: index of
    the answer's first token. `layer_ids`: tapped layers. `target_hash`: hash of the target's
    weights.
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
        """Check that the sample fits a head of this configuration.

        Raises: SampleRefused with the sample's id and the cause.
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


def sample_of(sample_id: str, answer_start: int, parts: Sequence[Arrays]) -> DraftSample:
    """Join the chunks of a received sample.

    `answer_start`: index of the answer's first token. `parts`: arrays of each chunk: `ids` and
    hidden states by position, `layer_ids` [3] and `target` [32]. Raises: SampleRefused if an array
    is missing, or if different targets computed the chunks.
    """
    layer_ids = {
        tuple(row) for row in _joined(sample_id, "layer_ids", parts).reshape(-1, NUM_TAPS).tolist()
    }
    targets = {row.tobytes() for row in _joined(sample_id, "target", parts).reshape(-1, HASH_BYTES)}
    if len(layer_ids) != 1 or len(targets) != 1:
        raise SampleRefused(f"sample {sample_id}: its rows were computed by different targets")
    with_inputs = any(INPUT_ROWS in part for part in parts)
    (target,), (low, middle, high) = targets, layer_ids.pop()
    return DraftSample(
        sample_id=sample_id,
        ids_N=_tensor(sample_id, "ids", parts).long(),
        taps_NT=_tensor(sample_id, TAPS, parts),
        last_NH=_tensor(sample_id, LAST_ROWS, parts),
        embeddings_NH=_tensor(sample_id, INPUT_ROWS, parts) if with_inputs else None,
        answer_start=answer_start,
        layer_ids=(low, middle, high),
        target_hash=target.hex(),
    )


def _joined(sample_id: str, name: str, parts: Sequence[Arrays]) -> NDArray[np.generic]:
    found = [part[name] for part in parts if name in part]
    if not found or len(found) != len(parts):
        raise SampleRefused(
            f"sample {sample_id}: {len(parts) - len(found)} of its {len(parts)} chunks have no "
            f"{name}"
        )
    return np.concatenate(found)


def _tensor(sample_id: str, name: str, parts: Sequence[Arrays]) -> Tensor:
    return torch.from_numpy(_joined(sample_id, name, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """The two functions of the target model that training needs.

    `embed`: maps ids [n] to embeddings [n, H]. `head`: maps final hidden states [n, H] to logits
    [n, V].
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


@torch.no_grad()
def training_rows(sample: DraftSample, target: TargetParts, vocabulary_D: Tensor) -> TrainingRows:
    """Move a checked sample to the device of `vocabulary_D`, and compute the target's predictions
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
