"""Interface of a voice, which speaks one clause at a time. Knows no request and no Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, quoted

MIN_SPEED, MAX_SPEED = 0.25, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceName:
    """A voice and its language, a tag such as `en-US`."""

    name: str
    language: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """Speech of a clause. `samples`: mono, -1 to 1. `word_ends`: position of the sample after the
    last one of each word of the clause; positions never decrease.
    """

    samples: NDArray[np.float32]
    word_ends: NDArray[np.int64]


class VoiceModel(Protocol):
    """A model with one or more voices.

    Invariants: equal arguments give equal bytes, in every process on machines of one kind.
    """

    sample_rate_hz: int

    def voices(self) -> Sequence[VoiceName]:
        """Return the voices, the default one first."""
        ...

    def synthesize(self, text: str, voice: str, *, speed: float, seed: int) -> Speech:
        """Speak `text`: words separated by spaces, with punctuation; whole numbers, decimals,
        ordinals and years may be digits. `speed`: 1 is the voice's own pace, from `MIN_SPEED` to
        `MAX_SPEED`; the pitch does not change. `seed`: keys the model's noise, if it has any.
        """
        ...


def find_voice(voices: Sequence[VoiceName], wanted: str) -> VoiceName:
    """Return the voice of this name, or the default one for "". Raises: BadInput listing the
    voices.
    """
    for each in voices:
        if wanted in (each.name, ""):
            return each
    known = ", ".join(each.name for each in voices)
    raise BadInput(f"voice: no voice {quoted(wanted)}; use one of {known}", param="voice")
