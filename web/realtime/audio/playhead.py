"""Estimated playback position of a client in the audio that it was sent. Pure; the caller passes
the time.
"""


class Playhead:
    """Units: samples; `now` in seconds of any one clock.

    Invariants: `position` never exceeds `sent`; between two sends it grows by at most the time that
    passes.
    """

    def __init__(self, rate_hz: int) -> None:
        self.sent = 0
        self._rate_hz = rate_hz
        self._base, self._since = 0, 0.0
        self._is_started = False

    def position(self, now: float) -> int:
        if not self._is_started:
            return self._base
        return min(self.sent, self._base + int((now - self._since) * self._rate_hz))

    def send(self, num_samples: int, now: float) -> None:
        if not self._is_started or self.position(now) >= self.sent:
            self._base = self.sent
            self._since = now
            self._is_started = True
        self.sent += num_samples

    def report(self, played: int, now: float) -> None:
        """Set the position that the client reports, limited to what was sent."""
        if self._is_started:
            self._base, self._since = max(0, min(played, self.sent)), now

    def rewind(self, sample: int) -> None:
        """Continue from `sample`: the client has received nothing after it."""
        self.sent = self._base = sample
        self._is_started = False

    def room(self, ahead_s: float, now: float) -> int:
        """Return how many samples may be sent now to be at most `ahead_s` ahead of playback."""
        return max(0, int(ahead_s * self._rate_hz) - (self.sent - self.position(now)))

    def left_s(self, now: float) -> float:
        """Return the seconds that the client still has to play."""
        return (self.sent - self.position(now)) / self._rate_hz
