"""Measurement of the longest event-loop stall of a gateway, as an ASGI route of the process under
test. Sends nothing.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

PATH = "/test/stall"
PERIOD_S = 0.001


class StallProbe:
    """Timer callback that the event loop should run each millisecond, and that measures how late it
    runs.

    Load by other processes does not count: the time for which the loop's thread waited for a core
    is subtracted, and a stall is at most the CPU time that the whole process used meanwhile.
    `forget`: lets the control plane in memory forget its requests before a measurement, or full
    garbage collections of all that it has kept would be measured.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._longest_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def route(self) -> Route:
        """Return a `GET` route that answers with the longest stall since the previous call, in
        seconds. The first call starts the measurement.
        """
        return Route(PATH, self._answer)

    async def _answer(self, _: Request) -> JSONResponse:
        if self._timer is not None:
            self._timer.cancel()
        longest_s, self._longest_s = self._longest_s, 0.0
        self._forget()
        gc.collect()
        self._wait()
        return JSONResponse(longest_s)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            PERIOD_S, self._measure, time.monotonic(), core_wait_s(), time.process_time()
        )

    def _measure(self, began: float, waited_s: float, used_s: float) -> None:
        late_s = time.monotonic() - began - PERIOD_S - (core_wait_s() - waited_s)
        self._longest_s = max(self._longest_s, min(late_s, time.process_time() - used_s))
        self._wait()


def core_wait_s() -> float:
    """Return the time that the calling thread has been runnable but waiting for a core, in seconds.
    Source: Linux, sched-stats.rst.
    """
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
