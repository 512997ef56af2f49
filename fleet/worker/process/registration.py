"""Registration of a worker in Redis, and the fields of its record. Knows no engine and no
transfer.
"""

import os
import socket
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version

import redis

from fleet.config import FleetConfig
from fleet.config.roles import Role
from fleet.control import scripts
from fleet.control.connect import run, texts
from fleet.core.errors import VersionSkew
from fleet.core.ids import StageName, WorkerId

PROTOCOL_VERSION = "5"
MOST_STANDBY = 256
SKEW_FIX = (
    "run one version and one checkpoint in one fleet, and set one engine, dtype, numerics and "
    "page_size_tokens, with vllm also "
    "one section vllm and one kind of device, for all workers of a stage that is split or "
    "divided into spans"
)
KERNELS, GPU_KERNELS = "kernels", "gpu_kernels"
KERNEL_FIXES = {
    KERNELS: "with numerics: invariant all workers need CPUs with the same instructions and one "
    "build of torch, without ATEN_CPU_CAPABILITY or with one value of it; or set numerics: fast",
    GPU_KERNELS: "with numerics: invariant all workers of a stage need GPUs of one kind, and one "
    "build of torch and of Triton; or set numerics: fast",
}


def process_fields(
    config: FleetConfig, serves: Role, *, fingerprint: str, device: str, dtype: str
) -> dict[str, str | bytes]:
    """Return the fields that every worker's record has. `fingerprint`: hash of the checkpoint.
    `dtype`: dtype of the model, "" if there is no checkpoint.
    """
    return {
        "kind": "worker",
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "running": "0",
        "protocol": PROTOCOL_VERSION,
        "package": version("fleet-serving"),
        "checkpoint": fingerprint,
        **_checkpoint_of(config, serves.stage),
        "device": device,
        **_kernels(config),
        **_shared_settings(config, serves.stage, device, dtype),
    }


def _checkpoint_of(config: FleetConfig, stage: StageName) -> dict[str, str]:
    """Return the record field that names the stage whose checkpoint the worker has read; empty if
    all stages share one.
    """
    return {"checkpoint_of": stage} if config.graph_declaration().has_stage_checkpoints else {}


def _kernels(config: FleetConfig) -> dict[str, str]:
    """Return a record field naming the kernels (CPU capability, torch version) that decide the last
    bits of results; empty where results need not be the same on every worker.
    """
    if not _is_invariant(config):
        return {}
    import torch

    return {KERNELS: f"{torch.backends.cpu.get_cpu_capability()} of torch {torch.__version__}"}


def _is_invariant(config: FleetConfig) -> bool:
    return config.numerics == "invariant" and config.engine != "fake"


def _gpu_kernels(config: FleetConfig, device: str) -> dict[str, str]:
    """Return the same as `_kernels` for the kernels of a GPU; empty without one."""
    if not _is_invariant(config) or device.partition(":")[0] != "cuda":
        return {}
    import torch

    triton, gpu = import_module("triton"), torch.cuda.get_device_name(device)
    built = f"torch {torch.__version__} and triton {triton.__version__}"
    return {GPU_KERNELS: f"{gpu} with {built}"}


def _shared_settings(
    config: FleetConfig, stage: StageName, device: str, dtype: str
) -> dict[str, str]:
    """Return the settings that must be equal in all workers of a stage which read each other's keys
    and values or hidden states, or which compute invariantly on GPUs; empty for other stages.
    """
    kernels = _gpu_kernels(config, device)
    if kernels:
        kernels |= {"stage": stage, "dtype": dtype}
    return kernels | _exchanged_settings(config, stage, device, dtype)


def _exchanged_settings(
    config: FleetConfig, stage: StageName, device: str, dtype: str
) -> dict[str, str]:
    own, engine = config.stage(stage), config.engine_of(stage)
    if own.spans is not None:
        return {"stage": stage, "dtype": dtype, "engine": engine, "numerics": config.numerics}
    if own.split is None:
        return {}
    shared = {
        "stage": stage,
        "dtype": dtype,
        "page_size_tokens": str(own.page_size_tokens),
        "engine": engine,
    }
    if engine != "vllm":
        return shared
    return {
        **shared,
        "tensor_parallel_size": str(own.vllm.tensor_parallel_size),
        "quantization": own.vllm.quantization or "none",
        "device_kind": device.partition(":")[0],
    }


def register_worker(
    client: redis.Redis,
    config: FleetConfig,
    serves: Role,
    worker: WorkerId,
    record: Mapping[str, str | bytes],
    *,
    lease_us: int | None = None,
) -> bool:
    """Register a worker; return True if it must stand by. `record`: fields of its record;
    `lease_us`: lease of the registration, the configured lease if None.

    Raises: VersionSkew if the worker is refused, naming the difference from the registered workers
    and the remedy.
    """
    lease_us = int(config.lease.worker_ttl_s * 1e6) if lease_us is None else lease_us
    active, standby = (1, MOST_STANDBY) if serves.optional else (serves.replicas, serves.standby)
    call = scripts.register(
        worker, serves.name, lease_us, dict(record), replicas=active, standby=standby
    )
    answer, *reason = texts(run(client, call))
    if reason:
        fixes = [fix for field, fix in KERNEL_FIXES.items() if f"its {field} " in reason[0]]
        remedies = (fixes or [SKEW_FIX]) if answer == "skew" else []
        raise VersionSkew("; ".join([f"worker {serves.name} is refused: {reason[0]}", *remedies]))
    return answer == "standby"
