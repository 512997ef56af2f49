"""The process of a worker that owns tasks, as one incarnation after another."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import redis

from fleet.control import scripts
from fleet.control.connect import run
from fleet.core.errors import ConfigError, EngineStopped, TransferStopped
from fleet.core.ids import WorkerId
from fleet.core.log_labels import Labels
from fleet.transfer.base import Transfer
from fleet.transfer.inline import REDIS
from fleet.transfer.watch import check_agents
from fleet.worker.arena_size import arena_size, check_inline
from fleet.worker.context import WorkerContext, WorkerSettings
from fleet.worker.loop.loop import WorkerLoop
from fleet.worker.open_worker import open_worker
from fleet.worker.process.device import DeviceMonitor
from fleet.worker.process.lease import Lease
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.process.registered_process import RegisteredProcess
from fleet.worker.task.hand_off import pool_on_gpu

log = logging.getLogger(__name__)

DRAIN_S = 2.0
NEEDS_NIXL = (
    "training.enabled: rows for training never pass through Redis, and NIXL is not "
    "available here; install it, or set false"
)


class WorkerProcess(RegisteredProcess):
    """Process of a worker that owns tasks. `when_joined`: function that each incarnation calls once
    it is registered.
    """

    def __init__(
        self,
        redis_url: str,
        settings: WorkerSettings,
        *,
        labels: Labels | None = None,
        when_joined: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(settings.config, settings.role, redis_url, labels)
        self.settings = settings
        self.arena = arena_size(settings.config, settings.stage, settings.built)
        self.device_monitor = DeviceMonitor(settings.device)
        self.when_joined = when_joined
        self.loop: WorkerLoop | None = None

    @property
    def has_joined(self) -> bool:
        return self.loop is not None

    def drop_work(self) -> None:
        engine = self.settings.built.engine
        for request in list(self.loop.tasks) if self.loop else []:
            engine.abort(request)
        if engine.prefixes is not None:
            engine.prefixes.drop()

    def live(self, worker: WorkerId, client: redis.Redis, lease_client: redis.Redis) -> None:
        order = self.loop.availability.order_in_force() if self.loop else None
        if self.loop is not None:
            self.loop.hand_offs.close()
        with ExitStack() as closing:
            transfer = self._open_transfer(worker)
            closing.callback(self._close_transfer, transfer)
            try:
                self._check_transfer(transfer)
                context = WorkerContext(
                    settings=self.settings,
                    worker=worker,
                    client=client,
                    transfer=transfer,
                    link=RedisLink(client, worker, self.role, self.settings.access.secret),
                    outage=self.outage,
                )
                opened = open_worker(context)
                closing.callback(opened.close)
                self.loop = opened.loop
                self.when_joined()
                if order is not None:
                    run(client, scripts.order(worker, order))
                if self.settings.route is not None:
                    route = self.settings.route.open(worker, self.loop.computes)
                    closing.callback(route.stop)
                    route.start()
                self._serve(self.loop, client, lease_client)
                run(client, scripts.fence_worker("", worker))
                check_agents(self.loop.maintenance.agents)
            except EngineStopped:
                # its tasks continue elsewhere, and none is suspected
                run(client, scripts.fence_worker("", worker))
                raise

    def _open_transfer(self, worker: WorkerId) -> Transfer:
        from fleet.transfer.factory import open_transfer

        given, engine = self.config.transfer, self.settings.built.engine
        on_gpu = self.settings.is_split and pool_on_gpu(engine, given.buffer_device)
        reach = replace(self.settings.access.reach, gpu=on_gpu)
        return open_transfer(
            given.kind, worker, self.arena.arena_bytes, self.arena.request_cap_bytes, reach
        )

    def _close_transfer(self, transfer: Transfer) -> None:
        """Close an incarnation's transfer. Raises: TransferStopped if it cannot be closed, so that
        no other incarnation may begin in this process.
        """
        if not transfer.close() and not self.stop.is_set():
            raise TransferStopped("the transfer of an earlier incarnation cannot be closed")

    def _check_transfer(self, transfer: Transfer) -> None:
        """Check that a transfer through Redis can carry what this worker sends. Raises:
        ConfigError.
        """
        if transfer.backend != REDIS:
            return
        check_inline(self.config, self.arena)
        if self.config.training.enabled:
            raise ConfigError(NEEDS_NIXL, param="training.enabled")

    def _serve(self, loop: WorkerLoop, client: redis.Redis, lease_client: redis.Redis) -> None:
        """Run the loop under a lease until the process is stopped, the worker may leave, or the
        lease is lost.
        """
        ttl_s = self.config.lease.worker_ttl_s
        lease = Lease(
            lease_client,
            loop.worker,
            ttl_s,
            lambda: {**loop.maintenance.vitals, **self.device_monitor.read()},
            max_step_s=self.config.lease.max_step_s,
        )
        lease.start()
        log.info(
            "worker %s %s",
            loop.worker,
            "stands by" if loop.availability.standing_by else "is ready",
        )
        try:
            loop.run(
                lambda: (
                    self.stop.is_set() or lease.lost.is_set() or loop.may_leave() or loop.is_stuck()
                ),
                lease.progress,
                lease,
            )
            if loop.may_leave() or loop.is_stuck():
                self.stop.set()
            if lease.lost.is_set():
                log.warning(
                    "this incarnation's lease is lost: it was fenced; the worker joins again"
                )
            elif self.stop.is_set():
                run(client, scripts.drain(loop.worker))
                self._drain(loop, lease)
        finally:
            lease.stop()
            self.drop_work()

    def _drain(self, loop: WorkerLoop, lease: Lease) -> None:
        """Accept no new task, and run the loop for at most `DRAIN_S` to finish tasks."""
        loop.availability.draining = True
        until = time.monotonic() + DRAIN_S
        while loop.tasks.holds_anything() and time.monotonic() < until and not lease.lost.is_set():
            loop.turn()
            lease.progress()
