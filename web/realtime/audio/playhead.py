"""How far a listener can be in sound that was sent: plays at the pace of time, never more than there is. Pure; told the time."""


class Playhead:
    """Units: samples; `now` in seconds of any one clock.

    Invariants: `at` never exceeds `sent`; between two sends it grows by at most the time that passes.
    """

    def __init__(self, rate_hz: int, start: int = 0) -> None:
        self.sent = start
        self.underruns = 0
        """How often the listener had played everything and had to wait for more."""
        self._rate_hz = rate_hz
        self._base, self._since = start, 0.0
        self._begun = False

    def at(self, now: float) -> int:
        if not self._begun:
            return self._base
        return min(self.sent, self._base + int((now - self._since) * self._rate_hz))

    def send(self, num_samples: int, now: float) -> None:
        if not self._begun or self.at(now) >= self.sent:
            self.underruns += self._begun
            self._base, self._since, self._begun = self.sent, now, True
        self.sent += num_samples

    def told(self, played: int, now: float) -> None:
        """The listener says how much it has played; what it says of more than was sent is not believed."""
        if self._begun:
            self._base, self._since = max(0, min(played, self.sent)), now

    def rewind(self, sample: int) -> None:
        """The listener has no more than this of what was sent."""
        self.sent = self._base = sample
        self._begun = False

    def room(self, lead_s: float, now: float) -> int:
        """How many more samples may be sent without being further ahead of the listener than `lead_s`."""
        return max(0, int(lead_s * self._rate_hz) - (self.sent - self.at(now)))

    def left_s(self, now: float) -> float:
        """How long the listener has still to play."""
        return (self.sent - self.at(now)) / self._rate_hz
