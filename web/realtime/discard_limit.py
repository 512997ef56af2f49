"""Rate at which one session may start responses that are discarded before their end. Pure; the
caller passes the time.

One response is active at a time, but a client that creates and cancels in turn would make the fleet
start thousands.
"""

BURST = 32
PER_S = 8.0
"""More than needed by speech with a pause after every word, each of which starts a speculative
response.
"""


class DiscardLimit:
    """Units: `now` in seconds of any one clock."""

    def __init__(self) -> None:
        self._left, self._at = float(BURST), 0.0

    def count(self, now: float) -> None:
        """Count one response that was discarded."""
        self._refill(now)
        self._left -= 1

    def delay_s(self, now: float) -> float:
        """Return the seconds that the client's next event must wait."""
        self._refill(now)
        return max(0.0, -self._left / PER_S)

    def _refill(self, now: float) -> None:
        self._left = min(BURST, self._left + max(0.0, now - self._at) * PER_S)
        self._at = now
