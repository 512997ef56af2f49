"""Statistics of one session, and the division of a response's latency into parts. Pure."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from web.realtime.protocol.server_events import TimingPart

RETAINED_TURNS = 200


class SessionStats:
    """Counts and latencies of a session. The client counts the `underruns`."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.underruns = 0
        self._voice_to_voice_ms: deque[float] = deque(maxlen=RETAINED_TURNS)

    def add(self, voice_to_voice_ms: float) -> None:
        self._voice_to_voice_ms.append(voice_to_voice_ms)

    @property
    def last_ms(self) -> float | None:
        return self._voice_to_voice_ms[-1] if self._voice_to_voice_ms else None

    @property
    def median_ms(self) -> float | None:
        return (
            round(statistics.median(self._voice_to_voice_ms), 1)
            if self._voice_to_voice_ms
            else None
        )


def timing_parts(
    begin_us: int,
    decided_us: int,
    claimed_us: int | None,
    first_us: Mapping[str, int],
    stages: Sequence[str],
    arrived_us: int,
    voiced_us: int | None,
) -> list[TimingPart]:
    """Divide the time from the end of speech to the response at each timestamp; the parts add up to
    the whole.

    The gateway has received the first output at `arrived_us`; its first voiced sample is played at
    `voiced_us`, None for text. A timestamp that is unknown, or before the last one (a speculative
    response), takes no time.
    """
    timestamps = [
        ("endpointing", decided_us),
        ("queue", claimed_us),
        *((stage, first_us.get(stage)) for stage in stages),
    ]
    end_us = arrived_us if voiced_us is None else voiced_us
    ends = (
        [("gateway", arrived_us)]
        if voiced_us is None
        else [("gateway", arrived_us), ("silence", voiced_us)]
    )
    parts: list[TimingPart] = []
    here = begin_us
    for name, at_us in [*timestamps, *ends]:
        there = here if at_us is None else min(max(here, at_us), end_us)
        parts.append(TimingPart(name=name, ms=round((there - here) / 1000, 1)))
        here = there
    return parts
