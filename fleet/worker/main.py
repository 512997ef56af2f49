"""One worker process: load the stage's weights, join the role, loop until told to stop. The graph names the builder."""

import hashlib
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import cast

import redis
from redis.exceptions import RedisError, ResponseError

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import connect, run, text
from fleet.core.errors import ConfigError, RedisUnreachable, VersionSkew
from fleet.core.gc_freeze import freeze_gc
from fleet.core.ids import RoleName, StageName, WorkerId, new_worker_id
from fleet.core.log_labels import Labels
from fleet.core.telemetry import WorkerOrder
from fleet.stages.base import Builder, BuildOptions, BuiltStage
from fleet.transfer.base import Transfer
from fleet.worker.device import Gauge
from fleet.worker.hand_off import share_pool
from fleet.worker.lease import Lease
from fleet.worker.link import Link
from fleet.worker.loop import WorkerLoop
from fleet.worker.peers import PeerAccess, read_peer_access

log = logging.getLogger(__name__)

DRAIN_S = 2.0
PROTOCOL_VERSION = "1"
FINGERPRINT_BYTES = 1024 * 1024
SKEW_FIX = "run one version and one checkpoint in one fleet, and set one dtype and page_size_tokens for both halves of a stage"


def build_options(config: FleetConfig, stage: StageName, checkpoint: Path) -> BuildOptions:
    """Resolve one stage's part of the configuration into what its builder may know."""
    mine, graph = config.stage(stage), config.graph_declaration()
    ramps = [config.window_ramp(edge.name) for edge in graph.edges_to(stage) if edge.policy.kind == "ramp"]
    device = mine.device or config.device
    device = _auto_device(config) if device == "auto" else _checked_device(device)
    dtype = ("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    if config.numerics == "invariant" and (device != "cpu" or dtype != "float32"):
        raise ConfigError("numerics: invariant runs on cpu in float32; set device: cpu and dtype: float32", param="numerics")
    defaults = BuildOptions(stage=stage, checkpoint=checkpoint)
    return BuildOptions(
        stage=stage,
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        numerics=config.numerics,
        max_batch=mine.max_batch,
        prefill_chunk_tokens=mine.prefill_chunk_tokens,
        kv_pages=mine.kv_pages,
        page_size_tokens=mine.page_size_tokens,
        threads=mine.threads,
        window_ramp=ramps[0] if ramps else defaults.window_ramp,
        extra=dict(mine.extra),
    )


def _auto_device(config: FleetConfig) -> str:
    if config.numerics == "invariant":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked_device(device: str) -> str:
    """Raises: ConfigError for a device this machine does not have."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return device
    import torch

    there = torch.cuda.device_count() if kind == "cuda" else 0
    if not there or (number and (not number.isdigit() or int(number) >= there)):
        raise ConfigError(f"device: {device!r} is not here ({there} CUDA devices); use auto or cpu", param="device")
    return device


def build_stage(config: FleetConfig, stage: StageName, checkpoint: Path) -> BuiltStage:
    """Import the stage's builder and run it. Raises: ConfigError in one line when the checkpoint will not do."""
    if config.engine == "fake":
        from fleet.stages.fake import build

        return build(build_options(config, stage, checkpoint), config.graph_declaration())
    import torch

    torch.set_num_threads(config.stage(stage).threads)
    module, _, function = config.graph_declaration().stage(stage).builder.partition(":")
    builder = cast(Builder, getattr(importlib.import_module(module), function))
    return builder(build_options(config, stage, checkpoint))


class WorkerProcess:
    """Incarnations one after another: each has its own id, lease, transfer agent and loop; the engine outlives them."""

    def __init__(
        self, config: FleetConfig, role: RoleName, redis_url: str, built: BuiltStage, *, fingerprint: str = "",
        device: str = "", dtype: str = "", labels: Labels | None = None, when_joined: Callable[[], None] = lambda: None,
        access: PeerAccess | None = None,
    ) -> None:  # fmt: skip
        """`access`: from where peers may read, and the fleet's secret; None: read from the configuration.

        `fingerprint` says which checkpoint the stage was built from, `dtype` in what it computes; "" where it needs none.
        `when_joined` is called by each incarnation once it is registered.
        """
        self.config, self.role, self.redis_url, self.built = config, role, redis_url, built
        self.fingerprint, self.device, self.dtype = fingerprint, device, dtype
        self.access = access or read_peer_access(config)
        self.gauge = Gauge(device)
        self.labels = labels or Labels("worker")
        self.when_joined = when_joined
        self.stop = threading.Event()
        self.loop: WorkerLoop | None = None
        self.last: WorkerId | None = None

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._incarnation()
            except ResponseError as error:
                log.warning("this incarnation's inbox is gone (%s): it was fenced; joining anew", error)
                self._drop_tasks()
            except (RedisError, RedisUnreachable) as error:
                if self.loop is None:
                    raise
                log.warning("redis is away (%s); joining anew", error)
                self._drop_tasks()
                self.stop.wait(0.5)

    def _drop_tasks(self) -> None:
        for request in list(self.loop.tasks) if self.loop else []:
            self.built.engine.abort(request)
        self.built.engine.forget()

    def _incarnation(self) -> None:
        worker = new_worker_id(self.role, socket.gethostname(), os.getpid())
        self.labels.worker, self.labels.stage = worker, self.config.role(self.role).stage
        client, lease_client = connect(self.redis_url, one_connection=True), connect(self.redis_url)
        if self.last is not None:
            # Nobody need wait for the lease of an incarnation that we know to be over.
            run(client, scripts.fence_worker("", self.last))
        in_force = _order_of(self.loop)
        if self.loop is not None:
            self.loop.passing.close()
        self.last = worker
        from fleet.transfer.factory import open_transfer

        settings = self.config.transfer
        transfer = open_transfer(
            settings.kind, worker, settings.arena_mib * 1024 * 1024, settings.request_cap_mib * 1024 * 1024, self.access.reach
        )
        try:
            if self.config.stage(self.config.role(self.role).stage).split is not None:
                share_pool(self.built.engine, transfer)
            stands_by = self._register(client, worker, transfer)
            self.when_joined()
            link = Link(client, worker, self.role, self.access.secret)
            loop = WorkerLoop(self.config, worker, self.role, self.built, link, transfer)
            loop.standing_by = stands_by
            self.loop = loop
            if in_force is not None:
                run(client, scripts.order(worker, in_force))
            lease = Lease(lease_client, worker, self.config.lease.worker_ttl_s, lambda: {**loop.vitals, **self.gauge.read()})
            lease.start()
            log.info("worker %s %s", worker, "stands by" if stands_by else "is ready")
            try:
                loop.run(lambda: self.stop.is_set() or lease.lost.is_set() or loop.may_leave(), lease.progress)
                if loop.may_leave():
                    self.stop.set()
                if lease.lost.is_set():
                    log.warning("this incarnation's lease is gone: it was fenced; joining anew")
                if self.stop.is_set() and not lease.lost.is_set():
                    run(client, scripts.drain(worker))
                    self._drain(loop, lease)
            finally:
                lease.stop()
                self._drop_tasks()
            run(client, scripts.fence_worker("", worker))
        finally:
            transfer.close()
            client.close()
            lease_client.close()

    def _drain(self, loop: WorkerLoop, lease: Lease) -> None:
        """Told to stop: take nothing new, finish what can be finished soon."""
        loop.draining = True
        until = time.monotonic() + DRAIN_S
        while loop.holds_anything() and time.monotonic() < until and not lease.lost.is_set():
            loop.turn()
            lease.progress()

    def _register(self, client: redis.Redis, worker: WorkerId, transfer: Transfer) -> bool:
        """Whether it is to stand by. Raises: VersionSkew."""
        serves = self.config.role(self.role)
        fields: dict[str, str | bytes] = {
            "kind": "worker",
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "capacity": str(self.config.stage(serves.stage).max_batch),
            "running": "0",
            "protocol": PROTOCOL_VERSION,
            "package": version("fleet-serving"),
            "checkpoint": self.fingerprint,
            "device": self.device,
            "backend": transfer.backend,
            "registered_bytes": str(transfer.registered_bytes),
            **self._must_agree(serves.stage),
        }
        lease_us = int(self.config.lease.worker_ttl_s * 1e6)
        record = self.access.record(worker, self.role, fields, transfer)
        call = scripts.register(worker, self.role, lease_us, record, replicas=serves.replicas, standby=serves.standby)
        answer = run(client, call)
        if isinstance(answer, list):
            kind, why = (text(part) for part in cast("list[bytes]", answer))
            raise VersionSkew(f"worker {self.role} is refused: {why}" + (f"; {SKEW_FIX}" if kind == "skew" else ""))
        return text(answer) == "standby"

    def _must_agree(self, stage: StageName) -> dict[str, str]:
        """In what both halves of a split stage must be alike beside their checkpoint, to read each other's keys and values."""
        mine = self.config.stage(stage)
        if mine.split is None:
            return {}
        return {"stage": stage, "dtype": self.dtype, "page_size_tokens": str(mine.page_size_tokens)}


def fingerprint_of(folder: Path) -> str:
    """Tells checkpoints apart without reading them whole: the configuration, and of each weight file its size and first bytes."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        with file.open("rb") as data:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + data.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def _order_of(loop: WorkerLoop | None) -> WorkerOrder | None:
    """What the last incarnation was bidden, and this one still is."""
    if loop is None or not loop.draining:
        return None
    return "stop" if loop.leaving else "drain"


def run_worker(
    config: FleetConfig, role: str, redis_url: str, checkpoint: Path | None, labels: Labels | None = None,
    when_joined: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Serve `role` until SIGTERM or SIGINT. Raises: ConfigError for a role the graph does not have."""
    serves = config.role(role)
    config = config.for_role(serves)
    access = read_peer_access(config)
    folder = checkpoint or Path(config.checkpoint)
    built = build_stage(config, serves.stage, folder)
    fake = config.engine == "fake"
    fingerprint = "" if fake else fingerprint_of(folder)
    options = build_options(config, serves.stage, folder)
    device, dtype = ("fake", "") if fake else (options.device, options.dtype)
    process = WorkerProcess(
        config, RoleName(role), redis_url, built, fingerprint=fingerprint, device=device, dtype=dtype, labels=labels,
        when_joined=when_joined, access=access,
    )  # fmt: skip

    def stop(_signum: int, _frame: object) -> None:
        process.stop.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    freeze_gc()
    process.run()
