"""vLLM's sampling parameters of the rest of an answer."""

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from fleet.engine.base import EngineRequest
from fleet.engine.vllm.penalties import FREQUENCY, NUM_KNOWN, PRESENCE


def sampling_params(request: EngineRequest, num_known: int, end_ids: frozenset[int]) -> SamplingParams:
    """Return the settings of the rest of an answer, of which `num_known` tokens are known."""
    sampling = request.sampling
    most = sampling.max_tokens - num_known
    least = most if sampling.ignore_eos else min(most, max(0, sampling.min_tokens - num_known))
    penalties: dict[str, float] = {}
    if sampling.frequency_penalty or sampling.presence_penalty:
        penalties = {
            FREQUENCY: sampling.frequency_penalty,
            PRESENCE: sampling.presence_penalty,
            NUM_KNOWN: num_known,
        }
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=(sampling.seed + num_known) % 2**63 if sampling.temperature > 0 else None,
        max_tokens=most,
        min_tokens=least,
        stop_token_ids=sorted(end_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=penalties or None,
    )
