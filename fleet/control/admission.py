"""Errors of refused requests, from the answers of the scripts `submit` and `admission`. Sends
nothing.
"""

import logging
import math
import time
from collections.abc import Sequence

from fleet.core.errors import AlreadySubmitted, FleetError, NoWorker, Overloaded, RedisUnreachable
from fleet.core.ids import RequestId

log = logging.getLogger("fleet.control.client")

REFUSAL_PAUSE_S = 10.0

MAX_RETRY_AFTER_S = 60
"""OpenAI's older SDKs ignore a longer one."""


def refusal_of(answer: Sequence[str], max_requests: int) -> FleetError:
    """Return the error for an answer other than "ok"."""
    match answer:
        case ["no_worker", retry_us, *roles]:
            retry_s = min(max(math.ceil(int(retry_us) / 1e6), 1), MAX_RETRY_AFTER_S)
            message = (
                f"no worker serves the role {', '.join(roles)}; start one with `fleet "
                f"worker {roles[0]}` or resume one"
            )
            return NoWorker(f"{message}, then try again in {retry_s} s", retry_after_s=retry_s)
        case ["full", *_]:
            return Overloaded(
                f"{max_requests} requests are running or waiting already; try again shortly"
            )
        case ["exists", *_]:
            return AlreadySubmitted("a request of this id was submitted before; resume it")
        case _:
            return RedisUnreachable(f"the request was not admitted ({answer[0]}); try again")


class NoWorkerLog:
    """Log of refusals for lack of a worker: one line per `REFUSAL_PAUSE_S`, so that many requests
    do not fill the log.
    """

    def __init__(self) -> None:
        self._unlogged_until = 0.0

    def note(self, request: RequestId, error: NoWorker) -> None:
        if time.monotonic() < self._unlogged_until:
            return
        self._unlogged_until = time.monotonic() + REFUSAL_PAUSE_S
        line = (
            "request %s is refused: %s; more such refusals at this gateway within %.0f s are "
            "not logged"
        )
        log.warning(line, request, error.message, REFUSAL_PAUSE_S, extra={"request_id": request})
