"""Limits of an audio file while it is decoded, and their errors. Knows no container and no
codec.
"""

from fleet.core.errors import BadInput, InputTooLarge

MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 192_000
MAX_CHANNELS = 8


class NotReadable(Exception):
    """Error for a file that is damaged, or does not match its first bytes."""


def check_format(rate_hz: int, num_channels: int, where: str) -> None:
    """Check that a file's sample rate and number of channels are accepted. Raises: BadInput naming
    the field `where`.
    """
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        reason = f"sample rate {rate_hz} Hz; use {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz"
        raise BadInput(f"{where}: {reason}", param=where)
    if not 1 <= num_channels <= MAX_CHANNELS:
        reason = f"{num_channels} channels of audio; use at most {MAX_CHANNELS}"
        raise BadInput(f"{where}: {reason}", param=where)


class LengthLimit:
    """Limit of `max_s` seconds on the decoded audio of one file, which may change its sample rate.

    `where`: field of the user's input that has the file, named in errors.
    """

    def __init__(self, max_s: float, where: str) -> None:
        self.max_s, self.where = max_s, where
        self._rate_hz = self._num_samples = 0
        self._before_s = 0.0
        """Seconds decoded before the last change of the sample rate."""

    @property
    def heard_s(self) -> float:
        return self._before_s + (self._num_samples / self._rate_hz if self._rate_hz else 0.0)

    def add(self, num_samples: int, rate_hz: int) -> None:
        """Count decoded samples. Raises: InputTooLarge if the limit is exceeded."""
        if rate_hz != self._rate_hz:
            self._before_s = self.heard_s
            self._rate_hz = rate_hz
            self._num_samples = 0
        self._num_samples += num_samples
        self.expect(0.0)

    def expect(self, declared_s: float) -> None:
        """Check the length that a header declares for the audio that follows. Raises: InputTooLarge
        if the limit would be exceeded.
        """
        if self.heard_s + declared_s > self.max_s:
            reason = f"the audio is longer than {self.max_s:g} s"
            raise InputTooLarge(f"{self.where}: {reason}", param=self.where)
