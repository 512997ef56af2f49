"""A worker process: loads its stage's weights, joins its role and serves until it is stopped. The
graph names the function that builds the stage.
"""

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fleet.config import FleetConfig
from fleet.config.checkpoints import checkpoint_of
from fleet.config.placement import for_role
from fleet.config.roles import DECODE_HALF, PREFILL_HALF, Role
from fleet.core.ids import StageName
from fleet.core.log_labels import Labels
from fleet.process.gc_freeze import freeze_gc
from fleet.spans.route.entry import AnchorRoute, check_spans
from fleet.stages.base import BuiltStage
from fleet.stages.builders import build_options, stage_builder
from fleet.stages.options import Half
from fleet.worker.context import WorkerSettings
from fleet.worker.process.load_progress import LoadProgress
from fleet.worker.process.peers import PeerAccess, read_peer_access
from fleet.worker.process.registered_process import RegisteredProcess
from fleet.worker.worker_process import WorkerProcess

MPS_BELOW_NORMAL = ("CUDA_MPS_CLIENT_PRIORITY", "1")
"""Environment variable with which a process's kernels give way to other processes' on the same GPU,
under NVIDIA's Multi-Process Service. Source: docs.nvidia.com/deploy/mps.
"""
FINGERPRINT_BYTES = 1024 * 1024
FINGERPRINTED = ("config.json", "voice.json", "*.safetensors", "*.onnx")


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
    """Import the builder function of a stage and return the stage that it builds. Raises:
    ConfigError in one line if the checkpoint cannot be used.

    `progress`: function that is called with the loaded share of the weights, 0 to 1.
    """
    if config.engine == "fake":
        from fleet.stages.fake import build

        return build(build_options(config, stage, checkpoint))
    import torch

    torch.set_num_threads(config.stage(stage).threads)
    builder = stage_builder(config.graph_declaration(), stage)
    return builder(build_options(config, stage, checkpoint, progress, half=half, address=address))


def fingerprint_of(folder: Path) -> str:
    """Return a hash of a checkpoint's configuration and of the size and first bytes of each weight
    file, without reading the files whole.
    """
    digest = hashlib.sha256()
    for file in sorted(file for pattern in FINGERPRINTED for file in folder.glob(pattern)):
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

    `when_joined`: function that is called once the worker is registered; `when_loaded`: function
    that is called repeatedly with the loaded share of the stage's weights, 0 to 1. `replica`:
    number of this worker in its role, which selects its device from the configured list.
    """
    serves = config.role(role)
    if config.graph_declaration().stage(serves.stage).gives_way:
        # the driver reads it when CUDA is first used
        os.environ.setdefault(*MPS_BELOW_NORMAL)
    config = for_role(config, serves, replica)
    access = read_peer_access(config)
    folder = checkpoint or Path(config.checkpoint)
    check_spans(config, serves.stage, checkpoint_of(config, serves.stage, folder))
    if serves.hosts_spans:
        process = _span_worker(config, serves, redis_url, folder, access, labels, when_joined)
    else:
        progress = LoadProgress(role, when_loaded)
        settings = load_worker(config, serves, redis_url, folder, access, progress)
        process = WorkerProcess(redis_url, settings, labels=labels, when_joined=when_joined)
    run_until_stopped(process)


def _span_worker(
    config: FleetConfig,
    serves: Role,
    redis_url: str,
    checkpoint: Path,
    access: PeerAccess,
    labels: Labels | None,
    when_joined: Callable[[], None],
) -> RegisteredProcess:
    from fleet.spans.host.process import SpanWorkerProcess, SpanWorkerSettings

    options = build_options(config, serves.stage, checkpoint)
    settings = SpanWorkerSettings(
        config=config,
        serves=serves,
        options=options,
        access=access,
        fingerprint=fingerprint_of(options.checkpoint),
    )
    return SpanWorkerProcess(redis_url, settings, labels=labels, when_joined=when_joined)


def load_worker(
    config: FleetConfig,
    serves: Role,
    redis_url: str,
    checkpoint: Path,
    access: PeerAccess,
    progress: Callable[[float], None],
) -> WorkerSettings:
    """Load a stage's weights and return the settings of its worker. Raises: ConfigError."""
    options = build_options(config, serves.stage, checkpoint)
    half, is_fake = half_of(config, serves), config.engine == "fake"
    if half and config.engine_of(serves.stage) == "vllm":
        # vLLM's transfers begin while it loads
        replace(access.reach, gpu=options.device != "cpu").enforce()
    built = build_stage(
        config, serves.stage, checkpoint, progress, half=half, address=access.reach.address
    )
    route = (
        AnchorRoute(config, options, built.route, redis_url, access)
        if built.route is not None
        else None
    )
    return WorkerSettings(
        config=config,
        role=serves.name,
        built=built,
        access=access,
        fingerprint="" if is_fake else fingerprint_of(options.checkpoint),
        device="fake" if is_fake else options.device,
        dtype="" if is_fake else options.dtype,
        route=route,
    )


def run_until_stopped(process: RegisteredProcess) -> None:
    """Run a registered process until SIGTERM or SIGINT."""

    def stop(_signum: int, _frame: object) -> None:
        process.stop.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    freeze_gc()
    process.run()
