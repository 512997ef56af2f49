"""A thread of an anchor that sets up its route, and the next route whenever a span worker is lost.

The anchor alone decides which span worker has which span. The thread writes the route to Redis
under a new generation, and sends each worker its place over a connection. The engine finds the
finished chain in its `RouteSlot`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import redis
from redis.exceptions import RedisError

from fleet.control import scripts
from fleet.control.connect import connect, run, texts
from fleet.control.outage import Outage
from fleet.core.errors import NoWorker, RedisUnreachable
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.process.fleet_secret import FleetSecret
from fleet.spans.net.ring import BlockReads
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import Returned, SpanSetup
from fleet.spans.protocol.plan import ModelSizes
from fleet.spans.route.connections import ConnectedChain
from fleet.spans.route.division import (
    Candidates,
    Placed,
    RouteDivision,
    RouteFailure,
    RouteGap,
    RouteWorker,
    fits_beside,
)
from fleet.spans.route.records import SpanRecords
from fleet.spans.route.setup import (
    CHECK_S,
    DIAL_TIMEOUT_S,
    prepare_spans,
    set_up_route,
)
from fleet.spans.route.standby import StandbySpans

log = logging.getLogger(__name__)

POLL_S, ERROR_PAUSE_S = 0.05, 1.0
LOOK_S = 1.0
"""Interval at which the anchor looks for further span workers while a route computes."""
RETRY_S = 5.0
"""Pause before a failed change of the division is tried again."""
HAND_OVER_S = 5.0
"""Time without a route after which an anchor gives its tasks to another one that has all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """Settings of one anchor's route.

    `anchor`: worker id of the anchor. `role`: role of its span workers. `division`: strategy that
    divides the layers among workers. `sizes`: memory that the layers need; None if the
    configuration names the spans. `no_worker_timeout_s`: time without some layers after which
    requests fail. `returned`, `wire_dtype`: see `SpanSetup`. `keep_bytes`: see `SpanLog`. `blocks`:
    see `SpanArrivals`.
    """

    anchor: WorkerId
    stage: StageName
    role: RoleName
    division: RouteDivision
    sizes: ModelSizes | None
    returned: Returned
    wire_dtype: str
    keep_bytes: int
    no_worker_timeout_s: float
    blocks: BlockReads | None = None


def _left_by(leaving: Sequence[WorkerId]) -> str:
    return f", and {', '.join(leaving)} leaves" if leaving else ""


class RouteKeeper:
    """Thread that keeps an anchor's route: sets it up, replaces lost workers, and changes the
    division.

    `start` begins the thread; `stop` ends it and closes the route.
    """

    def __init__(
        self,
        redis_url: str,
        settings: RouteSettings,
        slot: RouteSlot,
        secret: FleetSecret | None,
        is_needed: Callable[[], bool],
    ) -> None:
        """Prepare the thread.

        `slot`: slot through which the engine receives finished routes. `is_needed`: function that
        returns True while the anchor computes or accepts tasks; otherwise its span workers are
        released for other anchors.
        """
        self._redis_url = redis_url
        self._settings = settings
        self._slot = slot
        self._secret = secret
        self._is_needed = is_needed
        self._stopping = threading.Event()
        self._chain: ConnectedChain | None = None
        self._hops: list[RouteWorker] = []
        self._next_look_s = 0.0
        self._lineage = 0
        self._recorded: tuple[str, Mapping[WorkerId, str] | None] | None = None
        self._has_claims = False
        self._standby = StandbySpans(settings.anchor, self._stopping.is_set)
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
            # the loop of this thread: without it, the anchor would never have a route again
            except Exception:
                log.exception(
                    "the route of %s could not be followed; it is tried again",
                    self._settings.anchor,
                )
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
        """Close the route, and release its workers for other anchors."""
        if self._chain is not None:
            self._chain.close()
            self._chain = None
        self._gap_since_s = None
        self._free_workers(client)

    def _free_workers(self, client: redis.Redis) -> None:
        """Release the span workers that this anchor has claimed in Redis."""
        if self._has_claims:
            with contextlib.suppress(RouteFailure):  # an anchor that was fenced has none
                self._write_route(client, ())
            self._has_claims = False

    def _wait(self) -> None:
        """Wait until the route is checked again: `CHECK_S`, or `POLL_S` if there is no complete
        route, since requests wait for one.
        """
        until_s = time.monotonic() + CHECK_S
        while not self._stopping.wait(POLL_S) and time.monotonic() < until_s:
            if self._chain is None or self._chain.is_broken:
                return

    def _must_change(
        self, client: redis.Redis, records: SpanRecords, chain: ConnectedChain
    ) -> bool:
        """Return True if the route must be set up again: a worker is lost, or a better division is
        loaded.
        """
        members = records.read_members([hop.worker for hop in self._hops])
        if not members.are_listed:
            log.warning("a span worker of the route is lost; its connections are closed")
            return True
        now_s = time.monotonic()
        if not members.leaving and now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_S
        try:
            placed = self._move(client, records, chain, is_leaving=bool(members.leaving))
        except RouteFailure as failure:
            self._next_look_s = now_s + RETRY_S
            if str(failure) != self._not_moved:
                self._not_moved = str(failure)
                log.warning(
                    "the route of %s stays as it is%s: %s",
                    self._settings.stage,
                    _left_by(members.leaving),
                    failure,
                )
            return False
        if placed:
            chain.expect_end()
            self._settings.division.accept(placed)
            log.info(
                "the route of %s moves to %d span workers%s",
                self._settings.stage,
                len(placed),
                _left_by(members.leaving),
            )
        return bool(placed)

    def _move(
        self, client: redis.Redis, records: SpanRecords, chain: ConnectedChain, *, is_leaving: bool
    ) -> Placed:
        """Return the division to change to, after its workers have loaded their spans while the
        present route computes; empty if the present division stays.

        A worker without memory for both spans loads the new one after the present route has ended.
        Raises: RouteFailure.
        """
        found, sizes = self._find(records), self._settings.sizes
        placed = self._settings.division.better(found, is_leaving=is_leaving)
        if not placed:
            self._record(client, "", self._settings.division.losses(found))
            self._follow_standby(client, found)
            return ()
        now = {hop.worker: LayerSpan.parse(hop.span, "span") for hop in self._hops}
        hops = found.with_spans(placed)
        added = [hop for hop in hops if hop.worker not in now]
        self._write_route(client, [*self._hops, *added])

        def is_changed(hop: RouteWorker) -> bool:
            last, span = now[hop.worker], LayerSpan.parse(hop.span, "span")
            return str(last) != hop.span and (
                sizes is None or fits_beside(sizes, hop.memory, span, last)
            )

        changed = [hop for hop in hops if hop.worker in now and is_changed(hop)]
        workers = [*now, *(hop.worker for hop in added)]
        try:
            prepare_spans(
                self._settings.anchor,
                [*changed, *added],
                lambda: chain.is_broken or self._is_over(records, workers),
            )
        except RouteFailure:
            # other anchors may have the workers that are not added
            self._write_route(client, self._hops)
            raise
        return placed

    def _follow_standby(self, client: redis.Redis, found: Candidates) -> None:
        """Let unused workers load spans of the route, and record in Redis the workers that have.
        With automatic spans, only standby workers do so.
        """
        used, is_auto = {hop.worker for hop in self._hops}, self._settings.sizes is not None
        standby = [
            each
            for each in found.free
            if each.worker not in used and (each.stands_by or not is_auto)
        ]
        unused = found.with_spans([(each.worker, each.span) for each in standby])
        for hop in self._standby.follow([hop.span for hop in self._hops], unused):
            run(client, scripts.note_standby(self._settings.anchor, hop.worker, hop.span))
            log.info("%s stands by with layers %s", hop.worker, hop.span)

    def _is_over(self, records: SpanRecords, workers: Sequence[WorkerId]) -> bool:
        return self._stopping.is_set() or not records.all_listed(workers)

    def _set_up(self, client: redis.Redis, records: SpanRecords) -> None:
        """Try to set up a route; on failure, record the reason as the anchor's gap."""
        self._chain = None
        division = self._settings.division
        try:
            found = self._find(records)
            placed = division.place(found)
            hops = found.with_spans(placed)
            names = [hop.worker for hop in hops]
            generation = self._write_route(client, hops)
            division.accept(placed)
            chain = set_up_route(
                self._settings.anchor,
                hops,
                self._terms(generation),
                lambda: self._is_over(records, names),
                self._settings.blocks,
            )
        except RouteFailure as failure:
            if isinstance(failure, RouteGap):
                self._free_workers(client)  # another anchor may have the layers that this one lacks
            self._follow_gap(client, records, str(failure))
            return
        self._hops, self._not_moved = hops, ""
        self._lineage = self._lineage or generation
        self._chain = chain
        self._slot.offer(chain)
        self._record(client, "", division.losses(found))
        described = ", ".join(f"{hop.span} on {hop.worker}" for hop in hops)
        log.info("route %d of %s: %s", generation, self._settings.stage, described)

    def _terms(self, generation: int) -> SpanSetup:
        settings, slot = self._settings, self._slot
        return SpanSetup(
            generation=generation,
            span="",
            following="",
            lineage=self._lineage or generation,
            num_pages=slot.num_pages,
            page_size=slot.page_size,
            returned=settings.returned,
            wire_dtype=settings.wire_dtype,
            keep_bytes=settings.keep_bytes,
        )

    def _find(self, records: SpanRecords) -> Candidates:
        """Return the span workers that this anchor may use, and how many of them it may take."""
        own, found = self._settings.anchor, records.find(self._settings.role)
        others = {record.anchor for record in found} - {"", own}
        live = {other for other in others if records.all_listed([WorkerId(other)])}
        found.sort(key=lambda record: (record.anchor != own, record.stands_by, record.worker))
        num_anchors = max(1, records.num_accepting(RoleName(self._settings.stage)))
        return Candidates(
            free=[record for record in found if record.anchor not in live],
            limit=-(-len(found) // num_anchors),
        )

    def _write_route(self, client: redis.Redis, hops: Sequence[RouteWorker]) -> int:
        """Claim the workers in Redis; return the generation of the route. Raises: RouteFailure."""
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
        """Record why there is no route. After `HAND_OVER_S`, if another anchor has all layers,
        fence this worker if it has tasks, which then continue there; without such an anchor, let
        requests fail after `no_worker_timeout_s`.
        """
        settings, now_s = self._settings, time.monotonic()
        if self._gap_since_s is None:
            self._gap_since_s = now_s
        self._record(client, gap, None)
        since_s = now_s - self._gap_since_s
        if since_s < min(HAND_OVER_S, settings.no_worker_timeout_s):
            return
        if records.another_serves(RoleName(settings.stage), settings.anchor):
            self._slot.report_outage(None)
            if records.num_tasks(settings.anchor):
                log.warning(
                    "the tasks of %s continue on another worker of %s: %s",
                    settings.anchor,
                    settings.stage,
                    gap,
                )
                run(client, scripts.fence_worker("", settings.anchor))
        elif since_s > settings.no_worker_timeout_s:
            self._slot.report_outage(NoWorker(f"{gap}; start `fleet worker {settings.role}`"))

    def _record(self, client: redis.Redis, gap: str, losses: Mapping[WorkerId, str] | None) -> None:
        if (gap, losses) == self._recorded:
            return
        run(client, scripts.note_gap(self._settings.anchor, gap, losses))
        if gap and (self._recorded is None or gap != self._recorded[0]):
            log.warning("%s has no route: %s; its requests wait", self._settings.stage, gap)
        self._recorded = gap, losses

    def _end_gap(self, client: redis.Redis) -> None:
        if self._recorded is None or self._recorded[0]:
            self._record(client, "", None)
        self._gap_since_s = None
        self._slot.report_outage(None)
