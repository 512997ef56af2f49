"""Setup of an anchor's route, and of the next one whenever a span worker of it is lost. Runs in a thread of its own.

The anchor alone decides which span worker hosts which span; it writes the route to Redis, under a new generation, and gives each
worker its place by the connection to it. The engine finds the finished chain in its `RouteSlot`.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis
from redis.exceptions import RedisError

from fleet.config.schema import SpansConfig
from fleet.control import scripts
from fleet.control.connect import connect, run, texts
from fleet.control.outage import Outage
from fleet.core.errors import FleetError, NoWorker
from fleet.core.fleet_secret import FleetSecret
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.core.layer_spans import LayerSpan, plan_route
from fleet.core.span_assignment import assign_spans
from fleet.core.span_messages import Returned
from fleet.engine.span_chain import RouteSlot
from fleet.spans.chain import ConnectedChain
from fleet.worker.route_setup import CHECK_S, DIAL_TIMEOUT_S, RouteFailure, RouteHop, RouteTerms, set_up_route
from fleet.worker.span_records import SpanRecords, SpanWorkerRecord

log = logging.getLogger(__name__)

RETRY_S = 0.1


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

    def __init__(self, redis_url: str, settings: RouteSettings, slot: RouteSlot, secret: FleetSecret | None) -> None:
        self._redis_url, self._settings, self._slot, self._secret = redis_url, settings, slot, secret
        self._stopping = threading.Event()
        self._chain: ConnectedChain | None = None
        self._hops: list[WorkerId] = []
        self._lineage = 0
        self._gap = ""
        self._gap_since_s: float | None = None
        self._outage = Outage(f"the route of {settings.anchor}")
        self._thread = threading.Thread(target=self._run, name="route", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=2 * DIAL_TIMEOUT_S)
        if self._chain is not None:
            self._chain.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with connect(self._redis_url, one_connection=True) as client:
                    self._keep(client, SpanRecords(client, self._secret))
            except (RedisError, FleetError) as error:
                pause_s = self._outage.add(error) if isinstance(error, RedisError) else RETRY_S
                self._stopping.wait(pause_s)

    def _keep(self, client: redis.Redis, records: SpanRecords) -> None:
        while not self._stopping.is_set():
            if self._chain is None or self._chain.is_broken:
                self._set_up(client, records)
            elif not records.all_listed(self._hops):
                log.warning("a span worker of the route is lost; its connections are closed")
                self._chain.close()
                continue
            self._outage.end()
            self._stopping.wait(CHECK_S if self._chain is not None else RETRY_S)

    def _set_up(self, client: redis.Redis, records: SpanRecords) -> None:
        """Try to set up a route; note a gap, or why it failed."""
        self._chain = None
        try:
            chosen = self._choose(records)
            generation = self._write_route(client, chosen)
            hops = [
                RouteHop(worker=record.worker, address=record.address, key=record.key, span=span)
                for record, span in zip(chosen, self._wanted(), strict=True)
            ]
            chain = set_up_route(self._settings.anchor, hops, self._terms(generation), lambda: self._check(records, chosen))
        except RouteFailure as failure:
            self._note_gap(str(failure))
            return
        self._end_gap()
        self._hops = [record.worker for record in chosen]
        self._lineage = self._lineage or generation
        self._chain = chain
        self._slot.offer(chain)
        described = ", ".join(f"{span} on {worker}" for span, worker in zip(self._wanted(), self._hops, strict=True))
        log.info("route %d of %s: %s", generation, self._settings.stage, described)

    def _check(self, records: SpanRecords, chosen: Sequence[SpanWorkerRecord]) -> None:
        """Raises: RouteFailure if the route that is being set up is not worth waiting for."""
        if self._stopping.is_set():
            raise RouteFailure("the anchor stops")
        if not records.all_listed([record.worker for record in chosen]):
            raise RouteFailure("a span worker of the route is lost")

    def _terms(self, generation: int) -> RouteTerms:
        settings, slot = self._settings, self._slot
        return RouteTerms(
            generation=generation, lineage=self._lineage or generation, num_pages=slot.num_pages, page_size=slot.page_size,
            returned=settings.returned, wire_dtype=settings.wire_dtype, keep_bytes=settings.keep_bytes,
        )  # fmt: skip

    def _wanted(self) -> list[str]:
        return [str(span) for span in self._settings.spans.worker_spans]

    def _choose(self, records: SpanRecords) -> list[SpanWorkerRecord]:
        """Return a free span worker for each span, in the order of the layers. Raises: RouteFailure naming missing layers."""
        found = records.find(self._settings.role)
        others = {record.anchor for record in found} - {"", self._settings.anchor}
        live = {other for other in others if records.all_listed([WorkerId(other)])}
        free = {record.worker: record for record in found if record.anchor not in live}
        wanted = self._wanted()
        workers = assign_spans(wanted, {worker: record.span for worker, record in free.items()})
        if None in workers:
            have = {worker: LayerSpan.parse(span, "spans") for span, worker in zip(wanted, workers, strict=True) if worker}
            anchor = self._settings.spans.anchor_span
            plan = plan_route(anchor, have, self._slot.num_layers, head_on_anchor=self._settings.spans.has_head_on_anchor)
            raise RouteFailure(f"no span worker has {plan.describe_gap()} of {self._settings.stage}")
        return [free[worker] for worker in workers if worker is not None]

    def _write_route(self, client: redis.Redis, chosen: Sequence[SpanWorkerRecord]) -> int:
        """Claim the workers in Redis, and return the route's generation. Raises: RouteFailure."""
        hops = [(record.worker, span) for record, span in zip(chosen, self._wanted(), strict=True)]
        answer, *more = texts(run(client, scripts.set_route(self._settings.anchor, hops)))
        if answer != "ok":
            reasons = {
                "stale": "this anchor was fenced",
                "gone": "a span worker has left",
                "claimed": "another anchor has a worker",
            }
            raise RouteFailure(f"{reasons.get(answer, answer)} {' '.join(more)}".strip())
        return int(more[0])

    def _note_gap(self, gap: str) -> None:
        now_s = time.monotonic()
        if self._gap_since_s is None:
            self._gap_since_s = now_s
        if gap != self._gap:
            self._gap = gap
            log.warning("%s has no route: %s; its requests wait", self._settings.stage, gap)
        if now_s - self._gap_since_s > self._settings.no_worker_timeout_s:
            self._slot.report_outage(NoWorker(f"{gap}; start `fleet worker {self._settings.role}`"))

    def _end_gap(self) -> None:
        self._gap, self._gap_since_s = "", None
        self._slot.report_outage(None)
