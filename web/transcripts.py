"""What earlier spoken answers said, for follow-up turns that name them by id. Kept in this process only."""

import time
from collections import OrderedDict

MAX_KEPT = 1000


class Transcripts:
    """Audio id -> transcript, until it expires. Invariants: at most `MAX_KEPT`, the oldest are forgotten first."""

    def __init__(self, *, keep_s: int) -> None:
        self._keep_s = keep_s
        self._kept: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def put(self, audio_id: str, transcript: str) -> None:
        self._kept[audio_id] = (self.expires_at(), transcript)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def get(self, audio_id: str) -> str | None:
        expires_at, transcript = self._kept.get(audio_id, (0.0, ""))
        return transcript if expires_at > time.time() else None

    def expires_at(self) -> int:
        """Units: seconds since 1970."""
        return int(time.time()) + self._keep_s
