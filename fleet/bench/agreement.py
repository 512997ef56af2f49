"""Whether two implementations answered alike: numbers are only comparable if both did the same work. Pure."""

from collections.abc import Sequence

import msgspec

from fleet.bench.answer_timing import AnswerTiming
from fleet.bench.reference import ReferenceResult, ReferenceWork
from fleet.processing import Frontend


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How many of `count` answers were the other's: prompt ids, text, and length of the audio."""

    count: int
    same_prompt: int
    same_text: int
    same_length: int


def compare(traces: Sequence[AnswerTiming], other: ReferenceResult, work: ReferenceWork, frontend: Frontend) -> Agreement:
    """The fleet's answers with another's to the same prompts.

    A prompt is the same if the gateway counted as many ids as were sent to the other, and the other's own tokenisation,
    where it has one, made the very same.
    """
    same_prompt = same_text = same_length = 0
    for trace in traces:
        answered, spec = other.answers[trace.prompt], work.requests[trace.prompt]
        same_prompt += trace.num_prompt_tokens == len(spec.prompt_ids) and answered.same_prompt is not False
        same_text += trace.answer == _text(answered.answer_ids, frontend)
        same_length += trace.num_samples == answered.num_samples
    return Agreement(count=len(traces), same_prompt=same_prompt, same_text=same_text, same_length=same_length)


def _text(ids: Sequence[int], frontend: Frontend) -> str:
    detokenizer = frontend.detokenizer()
    return detokenizer.add(ids) + detokenizer.finish()
