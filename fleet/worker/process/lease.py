"""A worker's lease: a thread renews it while the engine loop makes progress. Knows no task.

A stuck loop must lose its rights, so the thread stops renewing once the loop's last progress is
older than a bound. The bound exceeds a lease, since an engine step may take longer than a lease;
before a long operation (loading, compiling) the loop sets a longer bound. The thread logs the
stacks of all threads when it stops renewing, and when an operator orders a dump.
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
from fleet.control.outage import Outage
from fleet.core.ids import WorkerId
from fleet.worker.process.stacks import log_stacks

log = logging.getLogger(__name__)

STUCK_S = 6.0


class Lease:
    """Lease of one incarnation of a worker, renewed by a thread. `lost` is set once Redis refuses a
    renewal: the incarnation is over, and its tasks belong to other workers.
    """

    def __init__(
        self,
        client: redis.Redis,
        worker: WorkerId,
        lease_s: float,
        vitals: Callable[[], Mapping[str, int | str]],
    ) -> None:
        self._client = client
        self._worker = worker
        self._lease_s = lease_s
        self._vitals = vitals
        self._stamp = time.monotonic()
        self._bound_s = max(STUCK_S, 2 * lease_s)
        self._num_renewals, self._written = 0, dict[str, int | str]()
        self._stop, self._outage = threading.Event(), Outage(f"the lease of {worker}")
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def progress(self, bound_s: float | None = None) -> None:
        """Record that the loop made progress. `bound_s`: longest time that the next iteration may
        take, if longer than the default bound.
        """
        self._bound_s = max(bound_s or 0.0, STUCK_S, 2 * self._lease_s)
        self._stamp = time.monotonic()

    def _run(self) -> None:
        stuck = False
        while not self._stop.wait(self._lease_s / RENEWALS):
            was_stuck, stuck = stuck, time.monotonic() - self._stamp > self._bound_s
            if not stuck:
                self._renew()
            elif not was_stuck:
                log_stacks(
                    log,
                    f"the engine loop has made no progress for {self._bound_s:.1f} s; its lease "
                    "is not renewed",
                )

    def _renew(self) -> None:
        changed = self._changed_vitals()
        try:
            answer = text(
                run(self._client, scripts.renew(self._worker, int(self._lease_s * 1e6), changed))
            )
        except RedisError as error:
            self._outage.add(error)
            self._num_renewals, self._written = 0, {}  # Redis may return without its last writes
            return
        self._outage.end()
        self._num_renewals += 1
        self._written |= changed
        if answer == "dump":
            log_stacks(log, f"stacks of {self._worker}, by an operator's order")
        elif answer != "ok":
            self.lost.set()

    def _changed_vitals(self) -> dict[str, int | str]:
        """Return the statistics that changed since they were last written. At all renewals but one
        per lease the result is empty, since writing costs more than the renewal.
        """
        if self._num_renewals % RENEWALS:
            return {}
        return {
            name: value
            for name, value in self._vitals().items()
            if self._written.get(name) != value
        }
