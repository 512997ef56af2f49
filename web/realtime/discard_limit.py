"""Limit of the rate at which one session may start responses that are discarded before their end.
Pure; the caller passes the time.

Only one response is active at a time, but a client that alternates between creating and cancelling
would make the fleet start thousands.
"""

BURST = 32
PER_S = 8.0
"""Discarded responses per second that are allowed permanently: more than speech needs with a pause
after every word, each of which starts a speculative response.
"""


class DiscardLimit:
    """Token bucket of `BURST` discarded responses, refilled at `PER_S`. Units: `now` is in seconds
    of any clock.
    """

    def __init__(self) -> None:
        self._left, self._at = float(BURST), 0.0

    def count(self, now: float) -> None:
        """Count one response that was discarded."""
        self._refill(now)
        self._left -= 1

    def delay_s(self, now: float) -> float:
        """Return the seconds by which to delay the client's next event; 0 within the limit."""
        self._refill(now)
        return max(0.0, -self._left / PER_S)

    def _refill(self, now: float) -> None:
        self._left = min(BURST, self._left + max(0.0, now - self._at) * PER_S)
        self._at = now
