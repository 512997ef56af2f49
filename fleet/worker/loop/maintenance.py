"""Periodic work of a worker's loop: statistics, expiry, reservations and connections while idle,
and checks for notices that were lost.
"""

import math
import time

from fleet.core.ids import RequestId
from fleet.drafts.exchange.follower import HeadFollower
from fleet.transfer.watch import WATCH, AgentReport
from fleet.worker.context import WorkerContext
from fleet.worker.loop.engine_orders import EngineOrders
from fleet.worker.loop.grants import GrantIntake
from fleet.worker.loop.hand_off_coordinator import HandOffCoordinator
from fleet.worker.loop.outbox import Outbox
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.loop.vitals import read_vitals
from fleet.worker.task.pending_calls import ignore_reply

INTERVAL_S = 0.5
PEERS_S = 2.0
"""Interval at which the worker checks whether the peers that it is connected to are still
listed.
"""


class Maintenance:
    """Periodic work of a worker's loop. `vitals`: the worker's latest statistics, read from the
    engine in the loop's thread and published by the lease thread.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: WorkerParts,
        hand_offs: HandOffCoordinator,
        intake: GrantIntake,
        outbox: Outbox,
        heads: HeadFollower | None,
    ) -> None:
        self._context = context
        self._parts = parts
        self._heads = heads
        self._tasks = parts.tasks
        self._link = context.link
        self._transfer = context.transfer
        self._hand_offs = hand_offs
        self._intake = intake
        self._outbox = outbox
        self._orders = EngineOrders(context)
        edges = context.graph.edges_from(context.stage)
        self._consumers = {edge.name: edge.target for edge in edges}
        self.next_poll_s = self._next_peers_s = -math.inf
        self.agents = AgentReport()
        self.vitals: dict[str, int | str] = {}

    def poll(self) -> list[RequestId]:
        """Do the periodic work that is due. Return the requests about which the next round trip
        must ask whether they are still live.
        """
        now_s = time.monotonic()
        if now_s < self.next_poll_s:
            return []
        self.next_poll_s = now_s + INTERVAL_S
        self._orders.follow()
        self._follow_head()
        self.read_vitals()
        self._parts.cached_sessions.expire()
        self._forget_unlisted_peers(now_s)
        self._find_consumers()
        for task in self._tasks.values():
            task.dirty = task.ack_due = True
        self._outbox.add(self._intake.reservation_calls())
        if not self._tasks:
            self._hand_offs.connect_to_sources()
        return list({*self._tasks, *self._tasks.lingering, *self._parts.offers.open_requests()})

    def _follow_head(self) -> None:
        """Switch to the draft head version that the fleet has chosen, and back to the previous
        version if the new one is worse.
        """
        if self._heads is not None:
            calls = self._heads.advance(self._context.engine.stats().speculation)
            self._outbox.add([(call, ignore_reply) for call in calls])

    def read_vitals(self) -> None:
        self.agents = WATCH.observe()
        self.vitals = read_vitals(
            self._context, self._parts, self._heads, num_stalled=len(self.agents.stalled)
        )

    def _find_consumers(self) -> None:
        """For every edge without credit, read from Redis whether the consumer is queued for a slot,
        and set `consumer_queued`: while the consumer is queued, the task produces without credit.
        """
        waiting = [
            (task, name)
            for task in self._tasks.values()
            for name, edge in task.outbound.items()
            if edge.is_ahead()
        ]
        are_queued = self._link.are_queued(
            [(task.request, self._consumers[name]) for task, name in waiting]
        )
        for (task, name), is_queued in zip(waiting, are_queued, strict=True):
            task.outbound[name].consumer_queued = is_queued

    def _forget_unlisted_peers(self, now_s: float) -> None:
        """End the connections to peers that are no longer listed. If abandoned reads occupy memory,
        which a frozen peer might still write to, this is checked at every poll.
        """
        if now_s < self._next_peers_s and not self._transfer.stalled_peers():
            return
        self._next_peers_s = now_s + PEERS_S
        for peer in self._link.find_unlisted(self._transfer.peers()):
            self._parts.receiver.forget_peer(peer)
