"""Estimated playback position of a client in the audio that it was sent. Pure; the caller passes
the time.
"""


class Playhead:
    """Playback position of a response's audio, estimated by the clock and corrected by the client's
    reports. Units: samples; `now` is in seconds of any clock.

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
        """Set the position to `played`, the number of samples that the client reports as played; at
        most `sent`. A report before the first send, or after `rewind`, has no effect.
        """
        if self._is_started:
            self._base, self._since = max(0, min(played, self.sent)), now

    def rewind(self, sample: int) -> None:
        """Set position and `sent` back to `sample`, for a client that has received nothing after
        that sample. The position then stays there until the next send.
        """
        self.sent = self._base = sample
        self._is_started = False

    def room(self, ahead_s: float, now: float) -> int:
        """Return the number of samples to send now so that the client is at most `ahead_s` seconds
        ahead of playback.
        """
        return max(0, int(ahead_s * self._rate_hz) - (self.sent - self.position(now)))

    def left_s(self, now: float) -> float:
        """Return the length in seconds of the sent audio that the client has not played."""
        return (self.sent - self.position(now)) / self._rate_hz
