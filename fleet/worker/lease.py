"""Keeping a worker's right to act: a thread that renews the lease while the engine loop moves. Knows no task.

A loop that is stuck must lose its right, so the thread stops renewing when the progress stamp is older than the bound: a pass may
take longer than a lease. A long known operation (loading, compiling) announces a longer bound. It tells where the threads are
when it stops, and when people ask.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

import redis
from redis.exceptions import RedisError

from fleet.config.schema import RENEWALS
from fleet.control import scripts
from fleet.control.connect import run, text
from fleet.core.ids import WorkerId
from fleet.worker.stacks import log_stacks

log = logging.getLogger(__name__)

STUCK_S = 6.0


class Lease:
    """`lost` is set once a renewal was refused: the incarnation is over, its tasks are another's."""

    def __init__(
        self, client: redis.Redis, worker: WorkerId, lease_s: float, vitals: Callable[[], Mapping[str, int | str]]
    ) -> None:
        self._client, self._worker, self._lease_s, self._vitals = client, worker, lease_s, vitals
        self._stamp = time.monotonic()
        self._bound_s = max(STUCK_S, 2 * lease_s)
        self._stop = threading.Event()
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def progress(self, bound_s: float | None = None) -> None:
        """The loop moved. `bound_s` announces that the next move may take this long."""
        self._bound_s = max(bound_s or 0.0, STUCK_S, 2 * self._lease_s)
        self._stamp = time.monotonic()

    def _run(self) -> None:
        stuck = False
        while not self._stop.wait(self._lease_s / RENEWALS):
            was_stuck, stuck = stuck, time.monotonic() - self._stamp > self._bound_s
            if not stuck:
                self._renew()
            elif not was_stuck:
                log_stacks(log, f"the engine loop has not moved for {self._bound_s:.1f} s; the lease is left to lapse")

    def _renew(self) -> None:
        try:
            answer = text(run(self._client, scripts.renew(self._worker, int(self._lease_s * 1e6), self._vitals())))
        except RedisError as error:
            log.warning("the lease could not be renewed: %s", error)
            return
        if answer == "dump":
            log_stacks(log, f"the stacks of {self._worker}, as was asked")
        elif answer != "ok":
            self.lost.set()
