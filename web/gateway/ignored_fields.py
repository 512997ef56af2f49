"""Warnings about ignored fields that a client may count on, such as tools: in the answer, and in
the log. Knows no route.
"""

import logging
import time
from collections.abc import Callable, Sequence

from web.schema.fields.chat import TOOLS_IGNORED

log = logging.getLogger("fleet.web")

PERIOD_S = 60.0
"""Seconds for which a field is not logged again after a log line about it."""


def warning_of(name: str) -> str:
    """Return the warning that tools in the field `name`, such as `session.tools`, are ignored."""
    return f"{name}: ignored: {TOOLS_IGNORED}"


class IgnoredFieldLog:
    """Log of ignored fields, with one line for each field in `PERIOD_S`: clients with tools send
    these fields with every request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def note(self, request_id: str, names: Sequence[str]) -> None:
        now = self._clock()
        for name in names:
            if now - self._logged_at.get(name, -PERIOD_S) >= PERIOD_S:
                self._logged_at[name] = now
                log.warning(
                    "request %s: %s; others in the next %.0f s are not logged",
                    request_id,
                    warning_of(name),
                    PERIOD_S,
                )
