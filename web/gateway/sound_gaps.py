"""Gaps in the sound of an answer as it was made: times in which a player that begins with the first
sound has nothing to play.
"""

import logging

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from fleet.telemetry.trace import SoundGaps
from web.gateway.fleet_port import FleetPort

log = logging.getLogger("fleet.web")

MAX_SILENCE_US = 50_000
"""Longest time without sound that a listener does not notice as a dropout."""


class GapFinder:
    """Finder of gaps in the sound of one answer, from its audio chunks at `rate_hz`."""

    def __init__(self, rate_hz: int) -> None:
        self._rate_hz = max(rate_hz, 1)
        self._end_us = 0
        self._are_timed = True
        self._num_gaps, self._longest_us = 0, 0

    def add(self, at_us: int, num_samples: int) -> tuple[int, int] | None:
        """Count the next chunk, produced at `at_us`. Return the beginning and the end of the gap
        before the chunk; None if there is no gap. Units: microseconds since 1970; 0 for a chunk
        without a time.
        """
        self._are_timed &= at_us > 0
        dry_us = self._end_us
        begin_us = max(self._end_us, at_us)
        self._end_us = begin_us + round(num_samples * 1e6 / self._rate_hz)
        if not dry_us or at_us - dry_us <= MAX_SILENCE_US:
            return None
        self._num_gaps += 1
        self._longest_us = max(self._longest_us, at_us - dry_us)
        return dry_us, at_us

    @property
    def gaps(self) -> SoundGaps | None:
        """The gaps so far; None without sound, or if a chunk had no time."""
        if not self._end_us or not self._are_timed:
            return None
        return SoundGaps(num=self._num_gaps, longest_us=self._longest_us)


async def note_gaps(client: FleetPort, request: RequestId, gaps: SoundGaps | None) -> None:
    """Write the gaps to the request's trace, which is kept longer than the chunks; None writes
    nothing. A failed write is only logged.
    """
    if gaps is None:
        return
    try:
        await client.telemetry.record_gaps(request, gaps)
    except FleetError as error:
        log.info("request %s: the gaps in its sound cannot be written: %s", request, error.message)
