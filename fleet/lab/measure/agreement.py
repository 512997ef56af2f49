"""Agreement of two implementations: their numbers are comparable only if both did the same work.
Pure.
"""

from collections.abc import Sequence

import msgspec

from fleet.lab.measure.answer_timing import AnswerTiming
from fleet.lab.measure.reference import ReferenceResult, ReferenceWork
from fleet.processing import Frontend


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Number of equal prompts (token ids), texts and audio lengths among `count` answers."""

    count: int
    same_prompt: int
    same_text: int
    same_length: int

    def line(self, name: str) -> str:
        return (
            f"same as the {name}: prompt ids {self.same_prompt}/{self.count}, text "
            f"{self.same_text}/{self.count}, "
            f"length of the audio {self.same_length}/{self.count}"
        )


def compare(
    timings: Sequence[AnswerTiming], other: ReferenceResult, work: ReferenceWork, frontend: Frontend
) -> Agreement:
    """Compare the fleet's answers with those of `other` to the same prompts.

    A prompt is the same if the gateway counted as many ids as `other` received, and the
    tokenisation of `other`, where it has one, gave the same ids.
    """
    same_prompt = same_text = same_length = 0
    for timing in timings:
        answered, spec = other.answers[timing.prompt], work.requests[timing.prompt]
        same_prompt += (
            timing.num_prompt_tokens == len(spec.prompt_ids) and answered.same_prompt is not False
        )
        same_text += timing.answer == _text(answered.answer_ids, frontend)
        same_length += timing.num_samples == answered.num_samples
    return Agreement(
        count=len(timings), same_prompt=same_prompt, same_text=same_text, same_length=same_length
    )


def _text(ids: Sequence[int], frontend: Frontend) -> str:
    detokenizer = frontend.detokenizer()
    return detokenizer.add(ids) + detokenizer.finish()
