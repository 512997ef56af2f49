"""A worker's lease: a thread renews it while the engine loop makes progress. Knows no task.

A stuck loop must lose its rights, so the thread stops renewing once the loop has made no progress
for longer than a bound. The bound exceeds a lease, since a turn may take longer than a lease. What
the loop's thread does meanwhile decides which bound applies. While it computes, a turn may take
`max_step_s`. While it waits, `STUCK_S`, or in a step of the engine (which may wait for a GPU or
another process) a multiple of the longest step so far. Before a long operation (loading) the loop
sets a longer bound. Every progress is also a beat for the process's keeper, which kills the process
later than this thread gives it up. The thread logs the stacks of all threads when it stops
renewing, and when an operator orders a dump.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import redis
from redis.exceptions import RedisError

from fleet.config.schema import RENEWALS
from fleet.control import scripts
from fleet.control.connect import SOCKET_TIMEOUT_S, run, text
from fleet.control.outage import Outage
from fleet.core.ids import WorkerId
from fleet.process.beat import START_S, beat
from fleet.process.silence import Silence, thread_state
from fleet.worker.process.stacks import log_stacks

log = logging.getLogger(__name__)

STUCK_S = 6.0
STEP_FACTOR = 4.0
"""Longest time that an engine step may wait for a GPU or another process before the lease is no
longer renewed, as a multiple of the longest step so far.
"""
FIRST_STEP_S = 30.0
"""Longest time that the first engine step may wait, for example while a program for a GPU is
compiled.
"""


@dataclass(frozen=True, slots=True)
class _LoopProgress:
    """The last progress that a loop has reported. `count`: number of reports so far. `bound_s`:
    longest time until the next report in which the loop's thread waits; `computing_s`: longest time
    until the next report in all. `thread`: native id of the loop's thread.
    """

    count: int
    bound_s: float
    computing_s: float
    thread: int


class Lease:
    """Lease of one incarnation of a worker, renewed by a thread. `lost` is set once Redis refuses a
    renewal: the incarnation is over, and its tasks belong to other workers. `max_step_s`: longest
    time for which a turn may compute, if longer than the default bound.
    """

    def __init__(
        self,
        client: redis.Redis,
        worker: WorkerId,
        lease_s: float,
        vitals: Callable[[], Mapping[str, int | str]],
        *,
        max_step_s: float = 0.0,
    ) -> None:
        self._client = client
        self._worker = worker
        self._lease_s = lease_s
        self._vitals = vitals
        self._max_step_s = max_step_s
        self._progress = _LoopProgress(0, 0.0, 0.0, 0)
        self.progress()
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
        beat(START_S, START_S)  # what follows is not the loop: leaving, or another incarnation

    def progress(self, bound_s: float | None = None) -> None:
        """Record that the loop made progress. `bound_s`: longest time that the next iteration may
        take, if longer than the default bound.
        """
        self._record(bound_s or 0.0)

    def begin_step(self, longest_step_s: float) -> None:
        """Record that the loop made progress, and that a step of the engine follows.
        `longest_step_s`: duration of the longest step so far, 0 before the first one.
        """
        bound_s = STEP_FACTOR * longest_step_s if longest_step_s else FIRST_STEP_S
        self._record(min(bound_s, self._max_step_s))

    def _record(self, bound_s: float) -> None:
        bound_s = max(bound_s, STUCK_S, 2 * self._lease_s)
        computing_s = max(bound_s, self._max_step_s)
        thread = threading.get_native_id()
        self._progress = _LoopProgress(self._progress.count + 1, bound_s, computing_s, thread)
        # Later than this lease is given up, and than a call to Redis that has no answer ends.
        later_s = 2 * self._lease_s
        beat(max(bound_s, SOCKET_TIMEOUT_S) + later_s, computing_s + later_s)

    def _run(self) -> None:
        interval_s = self._lease_s / RENEWALS
        silence, was_stuck = Silence(interval_s), False
        while not self._stop.wait(interval_s):
            last = self._progress
            silence.observe(
                time.monotonic(), last.count, lambda at=last.thread: thread_state(os.getpid(), at)
            )
            is_stuck = silence.waiting_s > last.bound_s or silence.total_s > last.computing_s
            if not is_stuck:
                self._renew()
            elif not was_stuck:
                log_stacks(
                    log,
                    f"the engine loop has made no progress for {silence.total_s:.1f} s; its lease "
                    "is not renewed",
                )
            was_stuck = is_stuck

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
        """Return the statistics that changed since they were last written. Writing costs more than
        the renewal, so only one renewal per lease duration writes statistics; at the others the
        result is empty.
        """
        if self._num_renewals % RENEWALS:
            return {}
        return {
            name: value
            for name, value in self._vitals().items()
            if self._written.get(name) != value
        }
