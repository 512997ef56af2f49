"""Setup of an anchor's route, and of the next one whenever a span worker of it is lost. Runs in a thread of its own.

The anchor alone decides which span worker hosts which span; it writes the route to Redis, under a new generation, and gives each
worker its place by the connection to it. The engine finds the finished chain in its `RouteSlot`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from redis.exceptions import RedisError

from fleet.config.schema import SpansConfig
from fleet.control import scripts
from fleet.control.connect import connect, run, texts
from fleet.control.outage import Outage
from fleet.core.errors import NoWorker, RedisUnreachable
from fleet.core.fleet_secret import FleetSecret
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.core.layer_spans import LayerSpan, plan_route
from fleet.core.span_assignment import assign_spans
from fleet.core.span_messages import Returned
from fleet.engine.span_chain import RouteSlot
from fleet.spans.chain import ConnectedChain
from fleet.worker.route_setup import CHECK_S, DIAL_TIMEOUT_S, RouteFailure, RouteHop, RouteTerms, set_up_route
from fleet.worker.span_records import SpanRecords

log = logging.getLogger(__name__)

POLL_S, ERROR_PAUSE_S = 0.05, 1.0
HAND_OVER_S = 5.0
"""Time without a route after which an anchor gives its tasks to another one that has all layers."""


class RouteGap(RouteFailure):
    """There are too few span workers for a route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """The configured division of a stage, for the anchor `anchor`. `role`: of its span workers.

    `no_worker_timeout_s`: after it requests fail for layers that no worker has. `wire_dtype`, `returned`: as in `SpanSetup`.
    """

    anchor: WorkerId
    stage: StageName
    role: RoleName
    spans: SpansConfig
    returned: Returned
    wire_dtype: str
    keep_bytes: int
    no_worker_timeout_s: float


class RouteKeeper:
    """`start` begins the thread, `stop` ends it and closes the route."""

    def __init__(
        self, redis_url: str, settings: RouteSettings, slot: RouteSlot, secret: FleetSecret | None, is_needed: Callable[[], bool]
    ) -> None:
        """`is_needed` returns True while the anchor computes or accepts tasks; other anchors may else have its span workers."""
        self._redis_url, self._settings, self._slot, self._secret = redis_url, settings, slot, secret
        self._is_needed = is_needed
        self._stopping = threading.Event()
        self._chain: ConnectedChain | None = None
        self._hops: list[WorkerId] = []
        self._lineage = 0
        self._gap: str | None = None
        self._has_claims = False
        self._not_moved = ""
        self._gap_since_s: float | None = None
        self._outage = Outage(f"the route of {settings.anchor}")
        self._thread = threading.Thread(target=self._run, name="route", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():  # not if the anchor was refused before its route began
            self._thread.join(timeout=2 * DIAL_TIMEOUT_S)
        if self._chain is not None:
            self._chain.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with connect(self._redis_url, one_connection=True) as client:
                    self._keep(client, SpanRecords(client, self._secret))
            except RedisError as error:
                self._stopping.wait(self._outage.add(error))
            except RedisUnreachable:
                self._stopping.wait(self._outage.pause_s())
            except Exception:  # the loop of this thread: without it, the anchor would never have a route again
                log.exception("the route of %s could not be followed; it is tried again", self._settings.anchor)
                self._stopping.wait(ERROR_PAUSE_S)

    def _keep(self, client: redis.Redis, records: SpanRecords) -> None:
        while not self._stopping.is_set():
            if not self._is_needed():
                self._release(client)
            elif self._chain is None or self._chain.is_broken:
                self._set_up(client, records)
            elif self._must_change(client, records, self._chain):
                self._chain.close()
                continue
            if self._chain is not None:
                self._end_gap(client)
            self._outage.end()
            self._wait()

    def _release(self, client: redis.Redis) -> None:
        """Close the route, and let other anchors have its workers."""
        if self._chain is not None:
            self._chain.close()
            self._chain = None
        self._gap_since_s = None
        self._free_workers(client)

    def _free_workers(self, client: redis.Redis) -> None:
        """Let other anchors have the span workers that this one has claimed."""
        if self._has_claims:
            with contextlib.suppress(RouteFailure):  # an anchor that was fenced has none
                self._write_route(client, ())
            self._has_claims = False

    def _wait(self) -> None:
        """Wait until the route is to be looked at: a broken one soon, since requests wait for the next."""
        until_s = time.monotonic() + CHECK_S
        while not self._stopping.wait(POLL_S) and time.monotonic() < until_s:
            if self._chain is None or self._chain.is_broken:
                return

    def _must_change(self, client: redis.Redis, records: SpanRecords, chain: ConnectedChain) -> bool:
        """Return True if a worker of the route is lost, or if one leaves and others are ready to compute without it."""
        members = records.read_members(self._hops)
        if not members.are_listed:
            log.warning("a span worker of the route is lost; its connections are closed")
            return True
        if not members.leaving:
            return False
        chain.expect_end()
        try:
            self._load_replacements(client, records, chain)
        except RouteFailure as failure:
            if str(failure) != self._not_moved:
                self._not_moved = str(failure)
                log.warning("%s leaves the route of %s when it ends: %s", members.leaving[0], self._settings.stage, failure)
            return False
        log.info("%s leaves the route of %s, and is replaced", ", ".join(members.leaving), self._settings.stage)
        return True

    def _load_replacements(self, client: redis.Redis, records: SpanRecords, chain: ConnectedChain) -> None:
        """Let the workers that replace leaving ones load their spans, while the present route computes. Raises: RouteFailure."""
        hops = self._choose(records)
        generation = self._write_route(client, hops)
        added = [hop for hop in hops if hop.worker not in self._hops]

        def is_over() -> bool:
            return chain.is_broken or self._is_over(records, [*self._hops, *(hop.worker for hop in added)])

        set_up_route(self._settings.anchor, added, self._terms(generation), is_over).close()

    def _is_over(self, records: SpanRecords, workers: Sequence[WorkerId]) -> bool:
        return self._stopping.is_set() or not records.all_listed(workers)

    def _set_up(self, client: redis.Redis, records: SpanRecords) -> None:
        """Try to set up a route; note a gap, or why it failed."""
        self._chain = None
        try:
            hops = self._choose(records)
            names = [hop.worker for hop in hops]
            generation = self._write_route(client, hops)
            chain = set_up_route(self._settings.anchor, hops, self._terms(generation), lambda: self._is_over(records, names))
        except RouteFailure as failure:
            if isinstance(failure, RouteGap):
                self._free_workers(client)  # another anchor may have the layers that this one lacks
            self._follow_gap(client, records, str(failure))
            return
        self._hops, self._not_moved = names, ""
        self._lineage = self._lineage or generation
        self._chain = chain
        self._slot.offer(chain)
        described = ", ".join(f"{span} on {worker}" for span, worker in zip(self._wanted(), self._hops, strict=True))
        log.info("route %d of %s: %s", generation, self._settings.stage, described)

    def _terms(self, generation: int) -> RouteTerms:
        settings, slot = self._settings, self._slot
        return RouteTerms(
            generation=generation, lineage=self._lineage or generation, num_pages=slot.num_pages, page_size=slot.page_size,
            returned=settings.returned, wire_dtype=settings.wire_dtype, keep_bytes=settings.keep_bytes,
        )  # fmt: skip

    def _wanted(self) -> list[str]:
        return [str(span) for span in self._settings.spans.worker_spans]

    def _choose(self, records: SpanRecords) -> list[RouteHop]:
        """Return a free span worker for each span, in the order of the layers. Raises: RouteGap naming missing layers.

        Workers of the last route come first, and standby workers last.
        """
        found = records.find(self._settings.role)
        others = {record.anchor for record in found} - {"", self._settings.anchor}
        live = {other for other in others if records.all_listed([WorkerId(other)])}
        own = self._settings.anchor
        found.sort(key=lambda record: (record.anchor != own, record.stands_by, record.worker))
        free = {record.worker: record for record in found if record.anchor not in live}
        wanted = self._wanted()
        workers = assign_spans(wanted, {worker: record.span for worker, record in free.items()})
        if None in workers:
            have = {worker: LayerSpan.parse(span, "spans") for span, worker in zip(wanted, workers, strict=True) if worker}
            anchor = self._settings.spans.anchor_span
            plan = plan_route(anchor, have, self._slot.num_layers, head_on_anchor=self._settings.spans.has_head_on_anchor)
            raise RouteGap(f"no span worker has {plan.describe_gap()} of {self._settings.stage}")
        chosen = [free[worker] for worker in workers if worker is not None]
        return [
            RouteHop(worker=record.worker, address=record.address, key=record.key, span=span)
            for record, span in zip(chosen, wanted, strict=True)
        ]

    def _write_route(self, client: redis.Redis, hops: Sequence[RouteHop]) -> int:
        """Claim the workers in Redis, and return the route's generation. Raises: RouteFailure."""
        call = scripts.set_route(self._settings.anchor, [(hop.worker, hop.span) for hop in hops])
        answer, *more = texts(run(client, call))
        if answer != "ok":
            reasons = {
                "stale": "this anchor was fenced",
                "gone": "a span worker has left",
                "claimed": "another anchor has a worker",
            }
            raise RouteFailure(f"{reasons.get(answer, answer)} {' '.join(more)}".strip())
        self._has_claims = bool(hops)
        return int(more[0])

    def _follow_gap(self, client: redis.Redis, records: SpanRecords, gap: str) -> None:
        """Record why there is no route. After a time, give the tasks to an anchor that has one; without any, let them fail."""
        settings, now_s = self._settings, time.monotonic()
        if self._gap_since_s is None:
            self._gap_since_s = now_s
        self._record_gap(client, gap)
        since_s = now_s - self._gap_since_s
        if since_s < min(HAND_OVER_S, settings.no_worker_timeout_s):
            return
        if records.another_serves(RoleName(settings.stage), settings.anchor):
            self._slot.report_outage(None)
            if records.num_tasks(settings.anchor):
                log.warning("the tasks of %s continue on another worker of %s: %s", settings.anchor, settings.stage, gap)
                run(client, scripts.fence_worker("", settings.anchor))
        elif since_s > settings.no_worker_timeout_s:
            self._slot.report_outage(NoWorker(f"{gap}; start `fleet worker {settings.role}`"))

    def _record_gap(self, client: redis.Redis, gap: str) -> None:
        if gap != self._gap:
            run(client, scripts.note_gap(self._settings.anchor, gap))
            self._gap = gap
            if gap:
                log.warning("%s has no route: %s; its requests wait", self._settings.stage, gap)

    def _end_gap(self, client: redis.Redis) -> None:
        self._record_gap(client, "")
        self._gap_since_s = None
        self._slot.report_outage(None)
