"""Periodic work of a worker's loop: vitals, expiry, idle reservations and connections, and all that covers a lost notice."""

import math
import time

import psutil

from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.pulls import PullTally
from fleet.engine.base import Engine
from fleet.transfer.base import Transfer
from fleet.worker.cached_sessions import CachedSessions
from fleet.worker.grants import GrantIntake
from fleet.worker.hand_off_coordinator import HandOffCoordinator
from fleet.worker.outbox import Outbox
from fleet.worker.receiver import Receiver
from fleet.worker.redis_link import RedisLink
from fleet.worker.task_table import TaskTable

INTERVAL_S = 0.5


class Maintenance:
    """`vitals`: counts for the lease thread to publish; read here, since the engine belongs to the loop's thread.

    `consumers`: the stage at the end of each output edge.
    """

    def __init__(
        self, engine: Engine, transfer: Transfer, link: RedisLink, tasks: TaskTable, receiver: Receiver, tally: PullTally,
        intake: GrantIntake, hand_offs: HandOffCoordinator, cached_sessions: CachedSessions, outbox: Outbox,
        consumers: dict[EdgeName, StageName],
    ) -> None:  # fmt: skip
        self._engine, self._transfer, self._link, self._tasks = engine, transfer, link, tasks
        self._receiver, self._tally, self._intake, self._hand_offs = receiver, tally, intake, hand_offs
        self._cached_sessions, self._outbox, self._consumers = cached_sessions, outbox, consumers
        self._process = psutil.Process()
        self.next_poll_s = -math.inf
        self.vitals: dict[str, int | str] = {}

    def poll(self) -> list[RequestId]:
        """Do what is due; return the requests of which the next round trip must ask whether they are still live."""
        now_s = time.monotonic()
        if now_s < self.next_poll_s:
            return []
        self.next_poll_s = now_s + INTERVAL_S
        self.read_vitals()
        self._cached_sessions.expire()
        self._forget_fenced_peers()
        self._find_consumers()
        for task in self._tasks.values():
            task.dirty = task.ack_due = True
        self._outbox.add(self._intake.reservation_calls())
        if not self._tasks:
            self._hand_offs.connect_to_sources(self._link.find_workers, self._receiver.peer)
        return list({*self._tasks, *self._tasks.lingering, *self._hand_offs.offers.open_requests()})

    def read_vitals(self) -> None:
        stats = self._engine.stats()
        self.vitals = {
            "running": len(self._tasks),
            "pages_used": stats.pages_used,
            "pages_total": stats.pages_total,
            "pages_kept": stats.pages_cached,
            "rows_reused": stats.rows_reused,
            "slots_used": self._transfer.used_slots(),
            "hops": self._link.hops.encoded(),
            "pulls": self._tally.encoded(self._receiver.in_flight()),
            "used_bytes": self._transfer.used_bytes(),
            "memory_bytes": self._process.memory_info().rss,
        }

    def _find_consumers(self) -> None:
        """Find tasks that wait for the credit of a consumer without an owner: it may itself wait for the slot that they hold."""
        waiting = [(task, name) for task in self._tasks.values() for name, edge in task.outbound.items() if edge.is_ahead()]
        owners = self._link.find_owners([(task.request, self._consumers[name]) for task, name in waiting])
        for (task, name), owner in zip(waiting, owners, strict=True):
            task.outbound[name].consumer_unassigned = not owner

    def _forget_fenced_peers(self) -> None:
        """Free the destinations of reads that a frozen peer may still serve, once that peer has lost its rights."""
        for peer in self._transfer.stalled_peers():
            if not self._link.is_registered(peer):
                self._transfer.forget_peer(peer)
