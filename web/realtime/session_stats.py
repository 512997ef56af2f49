"""Statistics of one voice session, and the division of a response's latency into parts. Pure."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from web.realtime.protocol.server_events import TimingPart

RETAINED_TURNS = 200


class SessionStats:
    """Number of turns, number of playback underruns that the client reported, and voice-to-voice
    latencies of a session.
    """

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
    """Divide the latency of a response, from the end of the user's speech at `begin_us`, into parts
    that add up to it.

    At `decided_us` the turn was found to be over, at `claimed_us` a worker claimed the first task,
    at `first_us[stage]` a stage had its first output (`stages` is their order), at `arrived_us` the
    gateway received the first output, and at `voiced_us` the client plays the first voiced sample;
    None for text. A timestamp that is unknown, or earlier than the one before it (after a
    speculative start), gives a part of length 0.
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
