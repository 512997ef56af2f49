"""How a session fares: its state as people see it, and how long each answer took, part by part. Pure."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from web.realtime.protocol.server_events import TimingPart

KEPT_TURNS = 200


class Story:
    """`server_underruns`: how often sound came too late for a listener who plays it at once; `underruns` what clients counted."""

    def __init__(self) -> None:
        self.turns = 0
        self.underruns = 0
        self.server_underruns = 0
        self._took_ms: deque[float] = deque(maxlen=KEPT_TURNS)

    def note(self, voice_to_voice_ms: float) -> None:
        self._took_ms.append(voice_to_voice_ms)

    @property
    def last_ms(self) -> float | None:
        return self._took_ms[-1] if self._took_ms else None

    @property
    def median_ms(self) -> float | None:
        return round(statistics.median(self._took_ms), 1) if self._took_ms else None


def timing_parts(
    begin_us: int,
    decided_us: int,
    claimed_us: int | None,
    first_us: Mapping[str, int],
    stages: Sequence[str],
    arrived_us: int,
    voiced_us: int | None,
) -> list[TimingPart]:
    """The time from the end of speech to the answer, cut where each mark lies; the parts add up to the whole.

    `arrived_us`: the gateway has the first of the answer; `voiced_us`: its first voiced sample is heard, None for text.
    A mark that is not known takes no time, nor one that lies before the last (an answer begun on speculation).
    """
    marks = [("endpointing", decided_us), ("queue", claimed_us), *((stage, first_us.get(stage)) for stage in stages)]
    end_us = arrived_us if voiced_us is None else voiced_us
    ends = [("gateway", arrived_us)] if voiced_us is None else [("gateway", arrived_us), ("silence", voiced_us)]
    parts: list[TimingPart] = []
    here = begin_us
    for name, mark in [*marks, *ends]:
        there = here if mark is None else min(max(here, mark), end_us)
        parts.append(TimingPart(name=name, ms=round((there - here) / 1000, 1)))
        here = there
    return parts
