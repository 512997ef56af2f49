"""Limit on the lines that one process adds to the fleet's log: a number of lines per kind and
period. Further lines are counted, not logged.

Without the limit, a line that clients can cause with every request would fill the log. Knows no
Redis.
"""

import logging
from dataclasses import dataclass

PERIOD_S = 60.0
MAX_PER_KIND = 100
"""Number of lines of one kind that are logged per `PERIOD_S`. Further lines are counted, and logged
as one line.
"""
MAX_KINDS = 500
"""Number of kinds that are distinguished. Lines of further kinds are counted together."""

Kind = tuple[str, int, str]
OTHERS: Kind = ("", logging.INFO, "")


@dataclass(slots=True)
class _LineCount:
    """Count of one kind's lines in the present period. `left_out`: number of lines that were not
    logged; `last`: the last such line.
    """

    since: float
    admitted: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class LineBudget:
    """Limit on log lines per kind. A kind is a logger, a level and a message text before its values
    are inserted. Times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self._counts: dict[Kind, _LineCount] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def admits(self, record: logging.LogRecord, now: float) -> bool:
        """Return True if the line may be logged; otherwise count it. `now`: present time."""
        kind = (record.name, record.levelno, str(record.msg))
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = OTHERS
        count = self._counts.setdefault(kind, _LineCount(now))
        if count.admitted < MAX_PER_KIND:
            count.admitted += 1
            return True
        count.left_out += 1
        count.last = record
        return False

    def take_summaries(self, now: float) -> list[logging.LogRecord]:
        """End the periods that are over. Return one line for each kind that exceeded its limit,
        with the number of lines left out.
        """
        over = [
            (kind, count) for kind, count in self._counts.items() if now - count.since >= PERIOD_S
        ]
        for kind, _ in over:
            del self._counts[kind]
        return [_summary(count.last, count.left_out) for _, count in over if count.last is not None]


def _summary(last: logging.LogRecord, left_out: int) -> logging.LogRecord:
    text = "%d more line%s of this kind within %.0f s; the last: %s"
    values = (left_out, "" if left_out == 1 else "s", PERIOD_S, last.getMessage())
    return logging.LogRecord(
        last.name, last.levelno, last.pathname, last.lineno, text, values, None
    )
