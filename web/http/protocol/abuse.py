"""Rate-limited log lines about refused and closed connections: no client can fill the log."""

import logging
from dataclasses import dataclass

log = logging.getLogger("fleet.web")

PERIOD_S = 60.0
MAX_TRACKED = 256
"""Limit of pairs of kind and address; events of further addresses are counted under `OTHERS`."""
OTHERS = "other addresses"


@dataclass(slots=True)
class _Count:
    logged_at: float
    num_unlogged: int = 0
    last: str = ""


class AbuseLog:
    """One line per kind and address in `PERIOD_S`: the first event is logged immediately, the others as a count."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, kind: str, address: str | None, message: str, now: float) -> None:
        """Log or count an event. Events of one `kind` are counted together. `now`: seconds of the event loop's clock."""
        key = (kind, address or "a local socket")
        if key not in self._counts and len(self._counts) >= MAX_TRACKED:
            key = (kind, OTHERS)
        count = self._counts.get(key)
        if count is None:
            self._counts[key] = _Count(now)
            log.warning("%s: %s; further ones are counted and logged within %.0f s", key[1], message, PERIOD_S)
            return
        count.num_unlogged += 1
        count.last = message

    def sweep(self, now: float) -> None:
        """Log the counts of all periods that are over."""
        for key, count in [item for item in self._counts.items() if now - item[1].logged_at >= PERIOD_S]:
            kind, address = key
            if count.num_unlogged == 0:
                del self._counts[key]
                continue
            log.warning("%s: %s, %d times in %.0f s; the last: %s", address, kind, count.num_unlogged, PERIOD_S, count.last)
            self._counts[key] = _Count(now)
