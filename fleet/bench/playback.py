"""A listener's clock: when each piece of an answer is played, and whether it came in time. Pure; told the time."""

START_S = 0.1
"""For how long sound is gathered before any is played, at the beginning and after each time it ran dry: as our own page does."""


class PlaybackClock:
    """One answer. Units: seconds of any one clock.

    `underruns`: how often everything had been played and more came after all. `late_s`: of each piece but the first, by how much
    it came after the moment it was to be played; below 0 it was early.
    """

    def __init__(self, rate_hz: int) -> None:
        self.num_samples = 0
        self.underruns = 0
        self.late_s: list[float] = []
        self._rate_hz = rate_hz
        self._zero_s = 0.0
        """When sample 0 would have been played, had it never run dry."""

    def came(self, num_samples: int, now_s: float) -> None:
        if not self.num_samples:
            self._zero_s = now_s + START_S
        else:
            late_s = now_s - self.ends_s
            self.late_s.append(late_s)
            if late_s > 0:
                self.underruns += 1
                self._zero_s += late_s + START_S
        self.num_samples += num_samples

    @property
    def ends_s(self) -> float:
        """When all that came has been played."""
        return self._zero_s + self.num_samples / self._rate_hz
