"""Periodic work of a worker's loop: vitals, expiry, idle reservations and connections, and all that
covers a lost notice.
"""

import logging
import math
import time
from dataclasses import dataclass

import psutil

from fleet.core.errors import BadInput
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.drafts.exchange.follower import HeadFollower
from fleet.engine.base import Engine
from fleet.telemetry.counts import PullTally
from fleet.telemetry.vitals import Vitals
from fleet.transfer.base import Transfer
from fleet.worker.loop.cached_sessions import CachedSessions
from fleet.worker.loop.grants import GrantIntake
from fleet.worker.loop.hand_off_coordinator import HandOffCoordinator
from fleet.worker.loop.outbox import Outbox
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.task.pending_calls import ignore_reply
from fleet.worker.task.receiver import Receiver
from fleet.worker.task.task_table import TaskTable

log = logging.getLogger(__name__)
INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ConfiguredDrafter:
    """The drafter that the configuration names for a stage, or `off`."""

    stage: StageName
    name: str


class Maintenance:
    """`vitals`: counts for the lease thread to publish; read here, since the engine belongs to the
    loop's thread.

    `consumers`: the stage at the end of each output edge.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: Transfer,
        link: RedisLink,
        tasks: TaskTable,
        receiver: Receiver,
        tally: PullTally,
        intake: GrantIntake,
        hand_offs: HandOffCoordinator,
        cached_sessions: CachedSessions,
        outbox: Outbox,
        consumers: dict[EdgeName, StageName],
        drafter: ConfiguredDrafter,
    ) -> None:
        self._engine, self._transfer, self._link, self._tasks = engine, transfer, link, tasks
        self._receiver, self._tally, self._intake, self._hand_offs = (
            receiver,
            tally,
            intake,
            hand_offs,
        )
        self._cached_sessions, self._outbox, self._consumers = cached_sessions, outbox, consumers
        self._drafter, self._refused_drafter = drafter, ""
        self._num_purges: int | None = None
        self.heads: HeadFollower | None = None
        """Set for a stage that has versions of a draft head."""
        self._process = psutil.Process()
        self.next_poll_s = -math.inf
        self.vitals: dict[str, int | str] = {}

    def poll(self) -> list[RequestId]:
        """Do what is due; return the requests of which the next round trip must ask whether they
        are still live.
        """
        now_s = time.monotonic()
        if now_s < self.next_poll_s:
            return []
        self.next_poll_s = now_s + INTERVAL_S
        self._follow_drafter()
        self._follow_purges()
        self._follow_head()
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

    def _follow_drafter(self) -> None:
        """Use the drafter that an operator chose, or else the configured one."""
        figures, drafters = self._engine.stats().speculation, self._engine.drafters
        if figures is None or drafters is None:
            return
        name = self._link.chosen_drafter(self._drafter.stage) or self._drafter.name
        refused = f"{name} with version {figures.version}"
        is_in_use = name == figures.ordered and (figures.automatic or not figures.failed)
        if is_in_use or name == figures.failed or refused == self._refused_drafter:
            return
        try:
            drafters.use(name)
        except BadInput as error:
            self._refused_drafter = refused
            log.warning(
                "%s cannot draft with %s, and stays with %s: %s",
                self._drafter.stage,
                name,
                figures.drafter,
                error.message,
            )
            return
        self._refused_drafter = ""
        log.info("%s drafts with %s, before with %s", self._drafter.stage, name, figures.drafter)

    def _follow_head(self) -> None:
        """Follow the fleet's version of the draft head, and return to the one before if it is
        worse.
        """
        if self.heads is None:
            return
        for call in self.heads.advance(self._engine.stats().speculation):
            self._outbox.add([(call, ignore_reply)])

    def _follow_purges(self) -> None:
        """Let a trainer forget its samples if an operator ordered it since the last look."""
        samples = self._engine.samples
        if samples is None:
            return
        ordered, self._num_purges = self._num_purges, self._link.num_purges()
        if ordered not in (None, self._num_purges):
            log.info("%d samples of the trainer are forgotten, by order", samples.forget_samples())

    def read_vitals(self) -> None:
        stats = self._engine.stats()
        held = (self.heads.held or "") if self.heads is not None else None
        self.vitals = Vitals(
            running=len(self._tasks),
            pages_used=stats.kv.pages_used,
            pages_total=stats.kv.pages_total,
            pages_kept=stats.kv.pages_cached,
            rows_reused=stats.kv.rows_reused,
            slots_used=self._transfer.used_slots(),
            hops=self._link.hops,
            pulls=self._tally.counts(self._receiver.in_flight()),
            used_bytes=self._transfer.used_bytes(),
            memory_bytes=self._process.memory_info().rss,
            speculation=stats.speculation,
            held_head=held,
            training=stats.training,
            span_figures=stats.spans,
        ).encode()

    def _find_consumers(self) -> None:
        """Find tasks that wait for the credit of a consumer without an owner: it may itself wait
        for the slot that they hold.
        """
        waiting = [
            (task, name)
            for task in self._tasks.values()
            for name, edge in task.outbound.items()
            if edge.is_ahead()
        ]
        owners = self._link.find_owners(
            [(task.request, self._consumers[name]) for task, name in waiting]
        )
        for (task, name), owner in zip(waiting, owners, strict=True):
            task.outbound[name].consumer_unassigned = not owner

    def _forget_fenced_peers(self) -> None:
        """Free the destinations of reads that a frozen peer may still serve, once that peer has
        lost its rights.
        """
        for peer in self._transfer.stalled_peers():
            if not self._link.is_registered(peer):
                self._transfer.forget_peer(peer)
