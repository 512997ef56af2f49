"""One worker process: loads its stage's weights, joins its role and serves until it is stopped. The
graph names the builder.
"""

import hashlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import redis

from fleet.config import FleetConfig
from fleet.config.placement import for_role
from fleet.config.roles import DECODE_HALF, PREFILL_HALF, Role
from fleet.control import scripts
from fleet.control.connect import run
from fleet.core.errors import ConfigError, EngineStopped
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.core.log_labels import Labels
from fleet.drafts.exchange.follower import HeadFollower, HeadMemory, head_settings
from fleet.drafts.exchange.records import RedisRecords
from fleet.process.gc_freeze import freeze_gc
from fleet.spans.route.entry import AnchorRoute, check_spans
from fleet.stages.base import BuiltStage
from fleet.stages.builders import build_options, stage_builder
from fleet.stages.options import Half
from fleet.transfer.base import Transfer
from fleet.transfer.inline import REDIS
from fleet.worker.arena_size import arena_size, check_inline
from fleet.worker.loop.loop import WorkerLoop
from fleet.worker.process.device import DeviceMonitor
from fleet.worker.process.lease import Lease
from fleet.worker.process.load_progress import LoadProgress
from fleet.worker.process.peers import PeerAccess, read_peer_access
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.process.registered_process import RegisteredProcess
from fleet.worker.process.registration import process_fields, register_worker
from fleet.worker.sessions.service import SessionService
from fleet.worker.task.hand_off import pool_on_gpu, share_pool

log = logging.getLogger(__name__)

DRAIN_S = 2.0
FINGERPRINT_BYTES = 1024 * 1024
NEEDS_NIXL = (
    "training.enabled: rows for training never pass through Redis, and NIXL is not "
    "available here; install it, or set false"
)


def half_of(config: FleetConfig, serves: Role) -> Half:
    if config.stage(serves.stage).split is None:
        return ""
    return PREFILL_HALF if serves.next else DECODE_HALF


def build_stage(
    config: FleetConfig,
    stage: StageName,
    checkpoint: Path,
    progress: Callable[[float], None] = lambda _: None,
    *,
    half: Half = "",
    address: str = "127.0.0.1",
) -> BuiltStage:
    """Import the stage's builder and run it. Raises: ConfigError in one line if the checkpoint
    cannot be used.

    `progress` is called with the share of the weights that is loaded, 0 to 1.
    """
    if config.engine == "fake":
        from fleet.stages.fake import build

        return build(build_options(config, stage, checkpoint))
    import torch

    torch.set_num_threads(config.stage(stage).threads)
    builder = stage_builder(config.graph_declaration(), stage)
    return builder(build_options(config, stage, checkpoint, progress, half=half, address=address))


class WorkerProcess(RegisteredProcess):
    """A worker that owns tasks."""

    def __init__(
        self,
        config: FleetConfig,
        role: RoleName,
        redis_url: str,
        built: BuiltStage,
        *,
        fingerprint: str = "",
        device: str = "",
        dtype: str = "",
        labels: Labels | None = None,
        when_joined: Callable[[], None] = lambda: None,
        access: PeerAccess | None = None,
        route: AnchorRoute | None = None,
    ) -> None:
        """`access`: the access of peers; None: read from the configuration. `route`: route of
        an anchor.

        `fingerprint`: of the checkpoint that the stage was built from; "" if there is none, like
        `dtype`. `when_joined` is called by each incarnation once it is registered.
        """
        super().__init__(config, role, redis_url, labels)
        self.built, self.fingerprint, self.device, self.dtype = built, fingerprint, device, dtype
        self.route = route
        self.access = access or read_peer_access(config)
        self.arena = arena_size(config, config.role(role).stage, built)
        self.device_monitor = DeviceMonitor(device)
        self.when_joined = when_joined
        self.loop: WorkerLoop | None = None

    @property
    def has_joined(self) -> bool:
        return self.loop is not None

    def _computes(self) -> bool:
        return self.loop is not None and self.loop.computes()

    def drop_work(self) -> None:
        for request in list(self.loop.tasks) if self.loop else []:
            self.built.engine.abort(request)
        if self.built.engine.prefixes is not None:
            self.built.engine.prefixes.drop()

    def live(self, worker: WorkerId, client: redis.Redis, lease_client: redis.Redis) -> None:
        order = self.loop.availability.order_in_force() if self.loop else None
        if self.loop is not None:
            self.loop.hand_offs.close()
        from fleet.transfer.factory import open_transfer

        route = self.route.open(worker, self._computes) if self.route is not None else None
        sessions = self._session_service(worker)

        settings, engine = self.config.transfer, self.built.engine
        is_split = self.config.stage(self.config.role(self.role).stage).split is not None
        reach = replace(
            self.access.reach, gpu=is_split and pool_on_gpu(engine, settings.buffer_device)
        )
        transfer = open_transfer(
            settings.kind, worker, self.arena.arena_bytes, self.arena.request_cap_bytes, reach
        )
        try:
            if transfer.backend == REDIS:
                check_inline(self.config, self.arena)
                if self.config.training.enabled:
                    raise ConfigError(NEEDS_NIXL, param="training.enabled")
            if is_split:
                share_pool(engine, transfer, settings.buffer_device)
            head_memory = (
                HeadMemory(self.built.heads.capacity_bytes, transfer)
                if self.built.heads is not None
                else None
            )
            stands_by = self._register(client, worker, transfer, sessions)
            self.when_joined()
            if self.built.begin_training is not None:
                self.built.begin_training(
                    RedisRecords(client, worker, self.config.graph_declaration().main_stage.name)
                )
            link = RedisLink(client, worker, self.role, self.access.secret)
            self.loop = WorkerLoop(
                self.config, worker, self.role, self.built, link, transfer, self.outage
            )
            self.loop.availability.standing_by = stands_by
            self.loop.sessions = sessions
            if head_memory is not None:
                self.loop.maintenance.heads = self._head_follower(self.loop, head_memory)
            if order is not None:
                run(client, scripts.order(worker, order))
            if route is not None:
                route.start()
            self._serve(self.loop, client, lease_client)
            run(client, scripts.fence_worker("", worker))
        except EngineStopped:
            # its tasks continue elsewhere, and none is suspected
            run(client, scripts.fence_worker("", worker))
            raise
        finally:
            if self.loop is not None and self.loop.maintenance.heads is not None:
                self.loop.maintenance.heads.close()
            if route is not None:
                route.stop()
            if sessions is not None:
                sessions.close()
            transfer.close()

    def _head_follower(self, loop: WorkerLoop, memory: HeadMemory) -> HeadFollower:
        assert self.built.heads is not None, "a stage without a draft head"
        return HeadFollower(
            head_settings(self.config),
            self.built.heads,
            memory,
            loop.transfer,
            loop.link,
            loop.receiver.peer,
        )

    def _session_service(self, worker: WorkerId) -> SessionService | None:
        """Return the service to `fleet session`, of a worker that caches conversations and can copy
        them.
        """
        config, stage = self.config, self.config.role(self.role).stage
        is_split = config.stage(stage).split is not None
        caches = (
            config.limits.max_cached_conversations and config.lease.prefix_cache_s and not is_split
        )
        copies = self.built.engine.sessions
        if not caches or copies is None:
            return None

        def adopt(session: str) -> None:
            assert self.loop is not None
            self.loop.cached_sessions.adopt(stage, session)

        place = self.access.listening_place(self.config)
        return SessionService(
            copies,
            stage,
            self.fingerprint,
            place,
            worker,
            self.access.secret,
            adopt,
        )

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
        )
        lease.start()
        log.info(
            "worker %s %s",
            loop.worker,
            "stands by" if loop.availability.standing_by else "is ready",
        )
        try:
            loop.run(
                lambda: self.stop.is_set() or lease.lost.is_set() or loop.may_leave(),
                lease.progress,
            )
            if loop.may_leave():
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
        """Accept no new task, and finish those that end soon."""
        loop.availability.draining = True
        until = time.monotonic() + DRAIN_S
        while loop.tasks.holds_anything() and time.monotonic() < until and not lease.lost.is_set():
            loop.turn()
            lease.progress()

    def _register(
        self,
        client: redis.Redis,
        worker: WorkerId,
        transfer: Transfer,
        sessions: SessionService | None,
    ) -> bool:
        """Register the worker; return True if it must stand by. Raises: VersionSkew."""
        serves = self.config.role(self.role)
        fields: dict[str, str | bytes] = {
            **(self.route.record_fields if self.route is not None else {}),
            **process_fields(
                self.config,
                serves,
                fingerprint=self.fingerprint,
                device=self.device,
                dtype=self.dtype,
            ),
            "capacity": str(self.config.stage(serves.stage).max_batch),
            "backend": transfer.backend,
            "registered_address": str(transfer.registered_address),
            "registered_bytes": str(transfer.registered_bytes),
            **(sessions.fields if sessions is not None else {}),
        }
        return register_worker(
            client,
            self.config,
            serves,
            worker,
            self.access.record(worker, self.role, fields, transfer),
        )


def fingerprint_of(folder: Path) -> str:
    """Hash a checkpoint's configuration and the size and first bytes of each weight file, without
    reading them whole.
    """
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        with file.open("rb") as data:
            digest.update(
                f"{file.name} {file.stat().st_size} ".encode() + data.read(FINGERPRINT_BYTES)
            )
    return digest.hexdigest()[:16]


def run_worker(
    config: FleetConfig,
    role: str,
    redis_url: str,
    checkpoint: Path | None,
    labels: Labels | None = None,
    when_joined: Callable[[], None] = lambda: None,
    when_loaded: Callable[[float], None] = lambda _: None,
    replica: int = 1,
) -> None:
    """Serve `role` until SIGTERM or SIGINT. Raises: ConfigError if the graph has no such role.

    `when_loaded` is called with the share of the stage's weights that is loaded, repeatedly until
    all are. `replica` chooses the device of a list.
    """
    serves = config.role(role)
    config = for_role(config, serves, replica)
    access = read_peer_access(config)
    folder = checkpoint or Path(config.checkpoint)
    check_spans(config, serves.stage, folder)
    if serves.hosts_spans:
        from fleet.spans.host.process import SpanWorkerProcess, SpanWorkerSettings

        options = build_options(config, serves.stage, folder)
        settings = SpanWorkerSettings(
            config=config,
            serves=serves,
            options=options,
            access=access,
            fingerprint=fingerprint_of(folder),
        )
        run_until_stopped(
            SpanWorkerProcess(redis_url, settings, labels=labels, when_joined=when_joined)
        )
        return
    fake = config.engine == "fake"
    if half_of(config, serves) and config.engine_of(serves.stage) == "vllm":
        on_gpu = build_options(config, serves.stage, folder).device != "cpu"
        replace(access.reach, gpu=on_gpu).enforce()  # vLLM's transfers begin while it loads
    built = build_stage(
        config,
        serves.stage,
        folder,
        LoadProgress(role, when_loaded),
        half=half_of(config, serves),
        address=access.reach.address,
    )
    fingerprint = "" if fake else fingerprint_of(folder)
    options = build_options(config, serves.stage, folder)
    device, dtype = ("fake", "") if fake else (options.device, options.dtype)
    slot = built.route
    process = WorkerProcess(
        config,
        RoleName(role),
        redis_url,
        built,
        fingerprint=fingerprint,
        device=device,
        dtype=dtype,
        labels=labels,
        when_joined=when_joined,
        access=access,
        route=AnchorRoute(config, options, slot, redis_url, access) if slot is not None else None,
    )
    run_until_stopped(process)


def run_until_stopped(process: RegisteredProcess) -> None:
    """Run a process until SIGTERM or SIGINT."""

    def stop(_signum: int, _frame: object) -> None:
        process.stop.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    freeze_gc()
    process.run()
