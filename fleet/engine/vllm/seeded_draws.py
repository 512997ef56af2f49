"""Sampling of tokens inside vLLM as the torch engine samples them: same penalties, cuts and noise,
at the same place of the answer.

vLLM's noise depends on how often it sampled before, and its penalties count only tokens that it
sampled itself; so an answer that another engine began would continue with other tokens. Here the
logits get penalties, cuts and noise that depend on the request, its seed and the answer so far, and
vLLM takes the highest. Loaded by vLLM from its engine arguments.
Source: vllm 0.32, v1/sample/logits_processor/interface.py.
"""

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from fleet.core.request import Sampling
from fleet.engine.base import TokenRule
from fleet.engine.torch.noise import noise_key
from fleet.engine.torch.sampling import RowSampling, TokenCounts, adjusted

SAMPLING, SALT, NUM_KNOWN = "fleet_sampling", "fleet_salt", "fleet_num_known"
OPEN_RULE = "fleet_open_rule"
"""Keys in `SamplingParams.extra_args`: sampling parameters, salt of the noise, number of tokens at
the end of the prompt that belong to the answer, and `EngineRequest.open_rule`.
"""


@dataclass(slots=True, kw_only=True)
class _Row:
    """Sampling state of one request in vLLM's batch. `drawn` is vLLM's own list of sampled tokens,
    which grows with the answer; its first `num_counted` tokens are in `counts`.
    """

    sampling: Sampling
    salt: int
    num_known: int
    counts: TokenCounts
    drawn: list[int]
    rule: TokenRule | None
    num_counted: int = 0

    def next_draw(self) -> RowSampling:
        for token in self.drawn[self.num_counted :]:
            self.counts.add(token)
            if self.rule is not None:
                self.rule.add(token)
        self.num_counted = len(self.drawn)
        key = noise_key(self.sampling.seed, self.salt, 0, self.num_known + len(self.drawn))
        allowed = self.rule.allowed(()) if self.rule is not None else None
        return RowSampling(
            sampling=self.sampling, noise_key=key, counts=self.counts, allowed=allowed
        )


class SeededDraws(LogitsProcessor):
    """vLLM logits processor that applies penalties, cuts and noise to each request that has
    penalties or a rule, or is not greedy.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row_of)

    def apply(self, logits: Tensor) -> Tensor:
        if self._rows:
            index = torch.tensor(list(self._rows), device=logits.device)
            logits[index] = adjusted(
                logits[index], [row.next_draw() for row in self._rows.values()]
            )
        return logits


def _row_of(params: SamplingParams, prompt_ids: list[int] | None, drawn: list[int]) -> _Row | None:
    extra = params.extra_args or {}
    if SAMPLING not in extra:
        return None
    num_known, ids = extra[NUM_KNOWN], prompt_ids or []
    counts = TokenCounts(ids[: len(ids) - num_known])
    rule = extra[OPEN_RULE]() if OPEN_RULE in extra else None
    for token in ids[len(ids) - num_known :]:
        counts.add(token)
        if rule is not None:
            rule.add(token)
    sampling = msgspec.convert(extra[SAMPLING], Sampling)
    return _Row(
        sampling=sampling,
        salt=extra[SALT],
        num_known=num_known,
        counts=counts,
        drawn=drawn,
        rule=rule,
    )
