"""From the chunks of a capture to a sample."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.errors import SampleRefused
from fleet.drafts.eagle3.config import NUM_TAPS
from fleet.drafts.trainer.samples import DraftSample
from fleet.engine.base import Arrays

HASH_BYTES = 32


def sample_of(sample_id: str, answer_start: int, parts: Sequence[Arrays]) -> DraftSample:
    """Join the chunks of a capture: `ids`, rows by position, and in each chunk `layer_ids` [3] and
    `target` [32].

    Raises: SampleRefused if a tensor is missing, or if the chunks were computed by different
    targets.
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
