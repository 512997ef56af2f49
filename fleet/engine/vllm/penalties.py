"""Frequency and presence penalties that count the tokens of an earlier owner, which vLLM receives as part of the prompt.

Loaded by vLLM from its engine arguments. Source: vllm 0.32, v1/sample/logits_processor/interface.py.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

FREQUENCY, PRESENCE, NUM_KNOWN = "fleet_frequency_penalty", "fleet_presence_penalty", "fleet_num_known"
"""Names in `SamplingParams.extra_args`; `NUM_KNOWN` tokens at the end of the prompt belong to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    frequency: float
    presence: float
    known: tuple[int, ...]
    drawn: list[int]
    """vLLM's own list, which grows with the answer."""


class AnswerPenalties(LogitsProcessor):
    """Subtracts `frequency * count + presence` from the logit of each token of the answer so far."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row_of)

    def apply(self, logits: Tensor) -> Tensor:
        for index, row in self._rows.items():
            counts = Counter(row.known)
            counts.update(row.drawn)
            if counts:
                ids = torch.tensor(list(counts), device=logits.device)
                number = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
                logits[index, ids] -= row.frequency * number + row.presence
        return logits


def _row_of(params: SamplingParams, prompt_ids: list[int] | None, drawn: list[int]) -> _Row | None:
    extra = params.extra_args or {}
    if FREQUENCY not in extra:
        return None
    num_known = extra[NUM_KNOWN]
    known = tuple((prompt_ids or [])[-num_known:]) if num_known else ()
    return _Row(frequency=extra[FREQUENCY], presence=extra[PRESENCE], known=known, drawn=drawn)
