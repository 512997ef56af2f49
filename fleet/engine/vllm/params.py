"""vLLM's sampling parameters for the tokens of an answer that vLLM is to compute."""

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from fleet.engine.vllm.llm import Draws
from fleet.engine.vllm.seeded_draws import END_IDS, NUM_KNOWN, OPEN_RULE, SALT, SAMPLING
from fleet.engine.vllm.tapped_rows import NUM_PROMPT, ROW_POSITIONS


def sampling_params(draws: Draws) -> SamplingParams:
    """Return vLLM's settings of a request. vLLM samples greedily: `SeededDraws` adds biases,
    penalties and noise to the logits. Where the request has stop tokens, `SeededDraws` also bans
    the end tokens, since vLLM's `min_tokens` would ban both kinds.
    """
    sampling = draws.request.sampling
    least = (
        draws.max_tokens
        if sampling.ignore_eos
        else min(draws.max_tokens, max(0, sampling.min_tokens - draws.num_known))
    )
    extra: dict[str, object] = {}
    penalties = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty - 1.0,
        float(not sampling.is_plain),
    )
    open_rule = draws.request.open_rule
    if sampling.temperature > 0 or any(penalties) or open_rule is not None:
        extra = {
            SAMPLING: msgspec.to_builtins(sampling),
            SALT: draws.salt,
            NUM_KNOWN: draws.num_known,
        }
    if open_rule is not None:
        extra[OPEN_RULE] = open_rule
    end_ids = draws.end_ids
    if end_ids and sampling.stop_token_ids:
        extra[END_IDS], least = sorted(end_ids), 0
        end_ids = end_ids.union(sampling.stop_token_ids)
    if draws.row_positions is not None:
        extra |= {NUM_PROMPT: draws.num_prompt, ROW_POSITIONS: list(draws.row_positions)}
    if draws.hands_off:
        extra["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    elif draws.ticket is not None:
        extra["kv_transfer_params"] = dict(draws.ticket)
    return SamplingParams(
        temperature=0.0,
        max_tokens=draws.max_tokens,
        min_tokens=least,
        stop_token_ids=sorted(end_ids),
        detokenize=False,
        logprobs=sampling.top_logprobs if end_ids else None,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )
