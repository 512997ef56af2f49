"""Progress of a stage's loading, in the log and in the announcement of the worker's start."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


class LoadProgress:
    """Callback for the loaded share of a role's weights: passes the share on to `passed_to`, and
    logs it every `LOG_EVERY_S`. A short load is not logged.
    """

    def __init__(
        self,
        role: str,
        passed_to: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role = role
        self._passed_to = passed_to
        self._clock = clock
        self._began_s = self._logged_s = -1.0

    def __call__(self, share: float) -> None:
        self._passed_to(share)
        now_s = self._clock()
        if self._began_s < 0:  # the first weight; importing torch came before
            self._began_s = self._logged_s = now_s
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.info(
                "loading %s: %d %% of its weights after %.0f s",
                self._role,
                100 * share,
                now_s - self._began_s,
            )
