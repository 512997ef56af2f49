"""Process loop of the conductor. Any number of conductors may run; one leads, the rest stand by.

What follows from a change is decided by the script that makes the change. The leader decides what
is a matter of time, by queries of indexes in Redis in fenced scripts: it fences workers whose lease
lapsed, repeats lost grants, fails requests whose role has no worker, aborts requests without a
gateway, and deletes audio after its retention. A new leader continues at once, since no process
remembers any of this. Only leases are watched on the leader's own clock (`fleet.conductor.leases`).
"""

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from fleet.conductor.leases import ClockComparison, LeaseWatch
from fleet.conductor.walks import WalkDriver
from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import connect, exchange, first_text, run, text, texts, worker_ids
from fleet.control.outage import Outage, cause_of, is_away
from fleet.control.redis_status import memory_of
from fleet.core.ids import WorkerId, new_worker_id
from fleet.process.beat import beat
from fleet.process.gc_freeze import freeze_gc

log = logging.getLogger(__name__)

TICK_MS = 200
STANDING_S, COMPUTING_S = 12.5, 60.0
"""Silence of the loop after which the keeper ends the process: `STANDING_S` while the loop waits,
since a call of Redis may take 10 s, and `COMPUTING_S` while it computes.
"""
SWEEP_S = 1.0
EARLY_PERCENT, SWEPT_EARLY = 5.0, 20
"""Early deletion of retained audio. `EARLY_PERCENT`: distance below
`limits.max_redis_memory_percent` at which it begins, in percentage points. `SWEPT_EARLY`: number of
requests whose audio one call deletes.
"""


class Driver:
    """A conductor process. `turn()` watches, acts and waits once; `run()` repeats it until
    `stopping` is set. `me`: id of this process. `clock`: monotonic time in seconds.
    """

    def __init__(
        self,
        config: FleetConfig,
        client: Redis,
        me: WorkerId,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.client = client
        self.me = me
        self._clock = clock
        self.leader = ""
        self.took_over_at = 0.0
        """Time since which this conductor has observed the fleet: start of its leadership, or the
        last time that Redis's clock was set or Redis returned; infinity while Redis is away.
        """
        self._leases = LeaseWatch()
        self._redis_clock = ClockComparison()
        self.next_watch = self._next_sweep = 0.0
        self.stopping = False
        self._outage = Outage(f"conductor {me}")
        stages = [stage.name for stage in config.graph_declaration().all_stages]
        driven = any(config.transition_source_of(stage) == "conductor" for stage in stages)
        self.walks = WalkDriver(config, client) if driven else None

    def run(self) -> None:
        while not self.stopping:
            beat(STANDING_S, COMPUTING_S)
            try:
                self.turn()
                self._outage.end()
            except RedisError as error:
                if not is_away(error):
                    raise
                self.took_over_at = math.inf
                time.sleep(self._outage.add(error))

    def resign(self) -> None:
        """Give up leadership. If Redis does not answer, the leadership lapses on its own."""
        try:
            if self.leader:
                run(self.client, scripts.lead(self.me, self.leader, 1))
        except RedisError as error:
            log.warning(
                "the lead of %s lapses, since it could not be given up: %s",
                self.me,
                cause_of(error),
            )

    def turn(self) -> None:
        """Act on what is due, then wait until something else is due. Without leadership, only try
        to lead.
        """
        self.act()
        self._wait()

    def act(self) -> None:
        """Acquire or renew leadership, and act on what is due if this conductor leads."""
        if self._lead() and self._clock() >= self.next_watch:
            self._watch()

    def _lead(self) -> bool:
        lease_ms = int(self.config.lease.conductor_ttl_s * 1000)
        value = text(run(self.client, scripts.lead(self.me, self.leader, lease_ms)))
        is_new = value != self.leader or math.isinf(self.took_over_at)
        self.leader = value
        if value and is_new:
            self._take_over()
        return bool(value)

    def _take_over(self) -> None:
        self._leases = LeaseWatch()
        self._redis_clock = ClockComparison()
        self._restart_waits()
        log.info("conductor %s leads now", self.me)

    def _restart_waits(self) -> None:
        """Restart the time-outs of all unclaimed grants and of all requests without a gateway,
        since this conductor has not observed the fleet before, or Redis's clock was set.
        """
        self.took_over_at, self.next_watch = self._clock(), 0.0
        self._act([scripts.restart_waits(self.leader)])

    def _wait(self) -> None:
        """Wait until something is due, at most `TICK_MS`, since clients wait until a lapsed lease
        is noticed. A leader decides walks meanwhile.
        """
        due_s = self.next_watch - self._clock() if self.leader else TICK_MS / 1000
        wait_s = min(max(due_s, 0.0), TICK_MS / 1000)
        if self.walks is None or not self.leader:
            time.sleep(wait_s)
        elif not self.walks.turn(self.leader, math.ceil(wait_s * 1000)):
            self.leader = ""

    def _watch(self) -> None:
        lapsed = self._observe_leases()
        now = self._clock()
        self.next_watch = min(now + TICK_MS / 1000, self._leases.due_s(now))
        lease, grace_s = self.config.lease, self.config.lease.no_worker_timeout_s
        is_observed = now - self.took_over_at > grace_s
        fenced = worker_ids(self.client.hkeys(keys.FENCING))
        calls = [
            *(
                scripts.fence_worker(self.leader, worker, deadline_us=deadline_us)
                for worker, deadline_us in lapsed.items()
            ),
            *(scripts.fence_tasks(self.leader, worker) for worker in fenced),
            scripts.overdue(
                self.leader,
                int(lease.claim_timeout_s * 1e6),
                int(grace_s * 1e6) if is_observed else None,
            ),
            scripts.abandon(self.leader, int(lease.gateway_timeout_s * 1e6)),
        ]
        if now >= self._next_sweep:
            is_scarce = self._is_memory_scarce()
            calls.append(scripts.sweep(self.leader, SWEPT_EARLY if is_scarce else 0))
            self._next_sweep = now if is_scarce else now + SWEEP_S
        self._act(calls)

    def _act(self, calls: Sequence[scripts.Call]) -> None:
        """Run fenced scripts. If a script answers "more", the same call is due again at once; if it
        answers "not_leader", this conductor's leadership has ended.
        """
        for call, reply in zip(calls, exchange(self.client, calls), strict=True):
            answer = first_text(reply)
            if answer == "not_leader":
                self.leader = ""
            elif answer == "more":
                self.next_watch = 0.0
                if call.script == "sweep":
                    self._next_sweep = 0.0
            elif answer not in ("ok", "alive"):
                log.error("the script %s failed: Redis answered %s", call.script, answer)

    def _observe_leases(self) -> dict[WorkerId, int]:
        """Read all leases; return the lapsed ones: deadline in microseconds of Redis's clock, by
        worker.
        """
        asked_s = self._clock()
        redis_us, *listed = texts(run(self.client, scripts.leases()))
        answered_s = self._clock()
        step_s = self._redis_clock.step_s(asked_s, answered_s, int(redis_us))
        if step_s:
            log.warning(
                "the clock of Redis was set %s by %.1f s",
                "forward" if step_s > 0 else "back",
                abs(step_s),
            )
            self._restart_waits()
        found = zip(listed[::3], listed[1::3], listed[2::3], strict=True)
        usual_us = int(self.config.lease.worker_ttl_s * 1e6)
        leases = {
            WorkerId(worker): (int(deadline), int(duration or usual_us))
            for worker, deadline, duration in found
        }
        return self._leases.observe(answered_s, int(redis_us), leases)

    def _is_memory_scarce(self) -> bool:
        """Return True if retained audio must be deleted early, before Redis has to refuse
        requests.
        """
        used, most = memory_of(cast("dict[str, int]", self.client.info("memory")))
        bound_percent = self.config.limits.max_redis_memory_percent - EARLY_PERCENT
        return most > 0 and 100 * used / most >= bound_percent


def run_conductor(config: FleetConfig, redis_url: str) -> None:
    """Run one conductor until SIGTERM or SIGINT."""
    client = connect(redis_url, one_connection=True)
    driver = Driver(config, client, new_worker_id("conductor", socket.gethostname(), os.getpid()))

    def stop(_signum: int, _frame: object) -> None:
        driver.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    log.info("conductor %s is up", driver.me)
    freeze_gc()
    driver.run()
    driver.resign()
    client.close()
