"""Rate-limited log of refused requests and closed connections, so that no number of clients can
fill the log.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("fleet.web")

PERIOD_S = 60.0
MAX_TRACKED = 32
"""Limit of pairs of kind and address; events of further addresses are counted under `OTHERS`."""
OTHERS = "other addresses"

CallLater = Callable[[float, Callable[[], None]], object]


@dataclass(slots=True)
class _Count:
    logged_at: float
    num_unlogged: int = 0
    last: str = ""


class AbuseLog:
    """Log with one line for each kind of event and address in `PERIOD_S`: the first event is logged
    immediately, later events are logged as a count.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, kind: str, address: str | None, message: str, now: float) -> None:
        """Log or count an event: `message` in the first line, `kind` in the line with the count.
        `address` is the client's address, None for a local socket. `now` is the time in seconds of
        the event loop's clock.
        """
        key = (kind, address or "a local socket")
        if key not in self._counts and len(self._counts) >= MAX_TRACKED:
            message = f"{key[1]}: {message}"
            key = (kind, OTHERS)
        count = self._counts.get(key)
        if count is None:
            self._counts[key] = _Count(now)
            log.warning(
                "%s: %s; further ones are counted and logged within %.0f s",
                key[1],
                message,
                PERIOD_S,
            )
            return
        count.num_unlogged += 1
        count.last = message

    def sweep(self, now: float) -> None:
        """Log the counts of all periods that are over."""
        for key, count in [
            item for item in self._counts.items() if now - item[1].logged_at >= PERIOD_S
        ]:
            kind, address = key
            if count.num_unlogged == 0:
                del self._counts[key]
                continue
            times = "once" if count.num_unlogged == 1 else f"{count.num_unlogged} times"
            log.warning(
                "%s: %s, %s in %.0f s; the last: %s", address, kind, times, PERIOD_S, count.last
            )
            self._counts[key] = _Count(now)


def call_later(delay_s: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, call)


class TimedAbuseLog:
    """An `AbuseLog` that logs its counts by a timer. Used by the gateway's app for refused
    requests; the connection table sweeps its own log.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, later: CallLater = call_later
    ) -> None:
        self._clock = clock
        self._later = later
        self._lines = AbuseLog()
        self._is_due = False

    def note(self, kind: str, address: str, message: str) -> None:
        """Log or count an event, as `AbuseLog.note` does."""
        self._lines.note(kind, address, message, self._clock())
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due and self._lines:
            self._is_due = True
            self._later(PERIOD_S, self._sweep)

    def _sweep(self) -> None:
        self._is_due = False
        self._lines.sweep(self._clock())
        self._schedule()
