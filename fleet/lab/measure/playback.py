"""Playback clock of a client: when each piece of audio is played, and whether it arrived in time.
Pure; times are arguments.
"""

START_S = 0.1
"""Length of audio buffered before playback starts, at the beginning and after an underrun, as on
the Voice page.
"""


class PlaybackClock:
    """Simulated playback of one answer. Units: seconds on any one clock.

    `underruns`: number of times that the buffer was empty before more audio arrived. `late_s`:
    arrival time of each piece but the first, minus the time at which all earlier audio has been
    played; negative if the piece arrived early.
    """

    def __init__(self, rate_hz: int, start_s: float = START_S) -> None:
        """Create the clock of an answer. `start_s`: length of audio buffered before playback starts
        and after an underrun.
        """
        self.num_samples = 0
        self.underruns = 0
        self.late_s: list[float] = []
        self._rate_hz = rate_hz
        self._buffer_s = start_s
        self._start_s = 0.0
        """Start of playback, delayed by each underrun so far."""

    def receive(self, num_samples: int, now_s: float) -> None:
        if not self.num_samples:
            self._start_s = now_s + self._buffer_s
        else:
            late_s = now_s - self.ends_s
            self.late_s.append(late_s)
            if late_s > 0:
                self.underruns += 1
                self._start_s += late_s + self._buffer_s
        self.num_samples += num_samples

    @property
    def ends_s(self) -> float:
        """Time at which all audio received so far will have been played."""
        return self._start_s + self.num_samples / self._rate_hz
