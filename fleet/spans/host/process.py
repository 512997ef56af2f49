"""The process of a span worker: registers in Redis, loads the span that an anchor assigns, and
computes steps until it is stopped.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import redis

from fleet.config import FleetConfig
from fleet.config.roles import Role
from fleet.control import scripts
from fleet.control.connect import connect, run
from fleet.control.notices import OrderNotice, PromotionNotice
from fleet.core.errors import SpanUnreachable
from fleet.core.ids import WorkerId
from fleet.core.log_labels import Labels
from fleet.engine.torch.build import open_device
from fleet.process.fleet_secret import FleetSecret, span_connection_key
from fleet.spans.host.backlog import SpanBacklog
from fleet.spans.host.hosting import SpanHosting
from fleet.spans.host.loaded import LoadedSpans
from fleet.spans.host.memory import available_bytes
from fleet.spans.net.addresses import SpanAddress
from fleet.spans.net.connection import SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.spans.net.listener import SpanListener
from fleet.spans.net.ring import block_reads
from fleet.spans.protocol.figures import SpanFigures
from fleet.spans.route.records import SpanRecords
from fleet.stages.builders import SpanBuilder, span_builder
from fleet.stages.options import BuildOptions
from fleet.telemetry.vitals import Vitals
from fleet.transfer.watch import WATCH, AgentReport, check_agents
from fleet.worker.process.availability import Availability
from fleet.worker.process.device import DeviceMonitor
from fleet.worker.process.endpoints import endpoint_fields, new_token
from fleet.worker.process.lease import Lease
from fleet.worker.process.peers import PeerAccess
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.process.registered_process import RegisteredProcess
from fleet.worker.process.registration import process_fields, register_worker

log = logging.getLogger(__name__)

IDLE_S = 0.2
INBOX_POLL_S = 0.5
DIAL_TIMEOUT_S = 2.0
LOADING_S = 1800.0
DRAIN_S = 2.0
"""Time that a stopping span worker waits for its anchor to replace it in the route."""


class RedisNeighbours:
    """Opens connections to other span workers, at the addresses in their Redis records."""

    def __init__(
        self, redis_url: str, own_name: WorkerId, secret: FleetSecret | None, arrivals: SpanArrivals
    ) -> None:
        self._redis_url = redis_url
        self._own_name = own_name
        self._secret = secret
        self._arrivals = arrivals

    def connect(self, worker: WorkerId, purpose: str) -> SpanConnection:
        with connect(self._redis_url, one_connection=True) as client:
            found = SpanRecords(client, self._secret).read([worker])
        if not found:
            raise SpanUnreachable(f"span worker {worker} is not registered; it has left")
        return dial(
            found[0].address,
            key=found[0].key,
            own_name=self._own_name,
            purpose=purpose,
            arrivals=self._arrivals,
            timeout_s=DIAL_TIMEOUT_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanWorkerSettings:
    """Settings of a span worker's process.

    `serves`: role of the worker. `access`: listening address and secret of connections.
    `fingerprint`: fingerprint of the checkpoint. `build`: function that loads a span; None for the
    builder that the graph names.
    """

    config: FleetConfig
    serves: Role
    options: BuildOptions
    access: PeerAccess
    fingerprint: str = ""
    build: SpanBuilder | None = None


class SpanWorkerProcess(RegisteredProcess):
    """The process of a span worker, which computes layers for an anchor and owns no task. Joins the
    fleet again after a lost lease, and keeps its loaded span.
    """

    def __init__(
        self,
        redis_url: str,
        settings: SpanWorkerSettings,
        *,
        labels: Labels | None = None,
        when_joined: Callable[[], None] = lambda: None,
    ) -> None:
        config, serves, options = settings.config, settings.serves, settings.options
        super().__init__(config, serves.name, redis_url, labels)
        self._serves, self._options = serves, options
        self._access, self._fingerprint = settings.access, settings.fingerprint
        self._when_joined = when_joined
        build = settings.build or span_builder(config.graph_declaration(), serves.stage)
        self._where = open_device(
            device=options.device,
            dtype=options.dtype,
            numerics=options.config.numerics,
            threads=options.own.threads,
        )
        self._device_monitor = DeviceMonitor(options.device)
        self._spans = LoadedSpans(lambda span: build(options, span))
        spans = config.stage(serves.stage).spans
        memory_mib = spans.memory_mib if spans is not None else None
        self._memory = (
            memory_mib << 20
            if memory_mib
            else available_bytes(self._where.device, options.gpu_memory_utilization)
        )
        self._availability = Availability()
        self._hosting: SpanHosting | None = None
        self._agents = AgentReport()
        self._leave_by_s: float | None = None

    def drop_work(self) -> None:
        if self._hosting is not None:
            self._hosting.close()

    def live(self, worker: WorkerId, client: redis.Redis, lease_client: redis.Redis) -> None:
        token = new_token()
        key = span_connection_key(self._access.secret, token)
        arrivals = SpanArrivals(block_reads(self.config, self._serves.stage, self._access.reach))
        listener = SpanListener(
            self._access.listening_place(self.config), arrivals=arrivals, key=key, own_name=worker
        )
        neighbours = RedisNeighbours(self.redis_url, worker, self._access.secret, arrivals)
        try:
            order = self._availability.order_in_force()
            self._availability = Availability()
            self._availability.standing_by = self._register(client, worker, listener.address, token)
            if order is not None:
                run(client, scripts.order(worker, order))
            self._when_joined()
            lease = Lease(
                lease_client,
                worker,
                self.config.lease.worker_ttl_s,
                lambda: self._vitals(arrivals),
                max_step_s=self.config.lease.max_step_s,
            )
            self._hosting = SpanHosting(
                self._where, self._spans, neighbours, lambda: lease.progress(LOADING_S)
            )
            self._leave_by_s = None
            self._serve(worker, client, lease, arrivals)
            run(client, scripts.fence_worker("", worker))
            check_agents(self._agents)
        finally:
            listener.close()
            if self._hosting is not None:
                self._hosting.close()
            arrivals.close_connections()

    def _vitals(self, arrivals: SpanArrivals) -> dict[str, int | str]:
        hosting = self._hosting
        assert hosting is not None
        total, recent = hosting.tally.sums()
        received, sent = arrivals.num_bytes
        figures = SpanFigures(
            weight_bytes=hosting.weight_bytes,
            received_bytes=received,
            sent_bytes=sent,
            total=total,
            recent=recent,
        )
        memory = psutil.Process().memory_info().rss
        vitals = Vitals(
            memory_bytes=memory, span_figures=figures, stalled_agents=len(self._agents.stalled)
        )
        return {**self._device_monitor.read(), **vitals.encode()}

    def _serve(
        self, worker: WorkerId, client: redis.Redis, lease: Lease, arrivals: SpanArrivals
    ) -> None:
        """Handle arrivals and operators' orders until the process may end or its lease is lost. The
        lease and the orders are looked after between any two arrivals of a long backlog.
        """
        hosting, link = self._hosting, RedisLink(client, worker, self.role)
        assert hosting is not None
        lease.start()
        log.info(
            "span worker %s %s",
            worker,
            "stands by" if self._availability.standing_by else "is ready",
        )
        polled_s, backlog = 0.0, SpanBacklog(hosting, arrivals)
        try:
            while not lease.lost.is_set() and not self._may_end(worker, client, hosting):
                backlog.handle_next(IDLE_S)
                lease.progress()
                if time.monotonic() - polled_s >= INBOX_POLL_S:
                    polled_s = time.monotonic()
                    self._agents = WATCH.observe()
                    self._follow_orders(link)
        finally:
            lease.stop()
        if lease.lost.is_set():
            log.warning("this incarnation's lease is lost: it was fenced; the worker joins again")

    def _may_end(self, worker: WorkerId, client: redis.Redis, hosting: SpanHosting) -> bool:
        """Return True if the process is to stop, and has left its route or waited `DRAIN_S` for its
        anchor. Sets `stop` if an order or a stuck NIXL agent demands it, and then drains the worker
        in Redis, once.
        """
        if self._agents.stuck or self._availability.may_leave(holds_anything=hosting.is_in_route):
            self.stop.set()
        if not self.stop.is_set():
            return False
        if self._leave_by_s is None:
            run(client, scripts.drain(worker))
            self._leave_by_s = time.monotonic() + DRAIN_S
        return not hosting.is_in_route or time.monotonic() > self._leave_by_s

    def _follow_orders(self, link: RedisLink) -> None:
        for notice in link.exchange((), free_slots=0, block_ms=0).notices:
            if isinstance(notice, OrderNotice):
                self._availability.apply_order(notice.order)
            elif isinstance(notice, PromotionNotice):
                assert self.last_id is not None
                self._availability.promote(self.last_id)

    def _register(
        self, client: redis.Redis, worker: WorkerId, address: SpanAddress, token: bytes
    ) -> bool:
        """Register the worker in Redis; return True if it is a standby.

        Raises: VersionSkew if the worker's version or checkpoint does not fit the fleet.
        """
        options, secret = self._options, self._access.secret
        fields = process_fields(
            self.config,
            self._serves,
            fingerprint=self._fingerprint,
            device=options.device,
            dtype=options.dtype,
        )
        record: dict[str, str | bytes] = {
            **fields,
            "role": self.role,
            "capacity": "0",
            **endpoint_fields("span", address, token),
            "span": self._spans.loaded,
            "memory": str(self._memory),
        }
        if secret is not None:
            record = secret.signed(worker, record)
        return register_worker(client, self.config, self._serves, worker, record)
