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
from fleet.engine.torch.adjustments import Adjustments
from fleet.engine.torch.noise import noise_key
from fleet.engine.torch.sampling import RowSampling, TokenCounts, adjusted, banned_ids

SAMPLING, SALT, NUM_KNOWN = "fleet_sampling", "fleet_salt", "fleet_num_known"
OPEN_RULE, END_IDS = "fleet_open_rule", "fleet_end_ids"
"""Keys in `SamplingParams.extra_args`, in the order of the constants: sampling parameters, salt of
the noise, number of tokens at the end of the prompt that belong to the answer,
`EngineRequest.open_rule`, and end tokens that vLLM does not ban itself.
"""


@dataclass(slots=True, kw_only=True)
class _Row:
    """Sampling state of one request in vLLM's batch. `known`: tokens of the answer that vLLM got
    with the prompt; `drawn` is vLLM's own list of sampled tokens, which grows with the answer; its
    first `num_counted` tokens are in `counts`.
    """

    sampling: Sampling
    salt: int
    known: list[int]
    counts: TokenCounts
    drawn: list[int]
    rule: TokenRule | None
    end_ids: frozenset[int]
    adjustments: Adjustments | None
    num_counted: int = 0

    def next_draw(self) -> RowSampling:
        for token in self.drawn[self.num_counted :]:
            self.counts.add(token)
            if self.rule is not None:
                self.rule.add(token)
        self.num_counted = len(self.drawn)
        allowed = self.rule.allowed(()) if self.rule is not None else None
        number, adjusts = len(self.known) + len(self.drawn), self.adjustments
        return RowSampling(
            sampling=self.sampling,
            noise_key=noise_key(self.sampling.seed, self.salt, 0, number),
            counts=self.counts,
            banned=banned_ids(self.sampling, number, self.end_ids, allowed),
            allowed=allowed,
            adjustment=adjusts.row(self.known, self.drawn) if adjusts is not None else None,
        )


class SeededDraws(LogitsProcessor):
    """vLLM logits processor that applies biases, penalties, cuts and noise to each request
    that has any of them or a rule, or is not greedy.
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
    ids = prompt_ids or []
    num_prompt = len(ids) - extra[NUM_KNOWN]
    counts, known = TokenCounts(ids[:num_prompt]), ids[num_prompt:]
    rule = extra[OPEN_RULE]() if OPEN_RULE in extra else None
    for token in known:
        counts.add(token)
        if rule is not None:
            rule.add(token)
    sampling = msgspec.convert(extra[SAMPLING], Sampling)
    return _Row(
        sampling=sampling,
        salt=extra[SALT],
        known=known,
        counts=counts,
        drawn=drawn,
        rule=rule,
        end_ids=frozenset(extra.get(END_IDS, ())),
        adjustments=Adjustments.of(sampling),
    )
