"""Placement of workers on devices, and the workers' shares of GPU memory, assuming that all
replicas run on one host. Opens no device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet.config.roles import Role
from fleet.config.schema import FleetConfig
from fleet.config.stage_schema import StageConfig

SHARED = 0.9
"""Part of a GPU's memory that is divided among workers without a share of their own; the rest is
for the CUDA contexts and for stages without KV pages.
"""
FIRST_GPU = "cuda:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorkers:
    """The workers of one role on one device.

    `number`: how many workers. `share`: configured share of the GPU's memory per worker; None: an
    equal part of the memory that configured shares leave. `has_pages`: the workers have a KV pool,
    which fills their share.
    """

    role: Role
    device: str
    number: int
    share: float | None
    has_pages: bool


def device_of(config: FleetConfig, own: StageConfig, replica: int) -> str:
    """Return the device of replica `replica`, counted from 1, of the stage with settings `own`."""
    given = own.device or config.device
    return given if isinstance(given, str) else given[(replica - 1) % len(given)]


def first_replica(own: StageConfig, role: Role) -> int:
    """Return the number of a role's first replica among all workers of its stage, counted from 1.
    Anchors come first, span workers after them.
    """
    return own.replicas + own.standby + 1 if role.hosts_spans else 1


def place_workers(config: FleetConfig) -> Iterator[PlacedWorkers]:
    """Yield the workers of the deployment, standby ones too, by role and device."""
    for role in config.roles():
        own = config.of_role(role)
        first = first_replica(own, role)
        devices = [
            device_of(config, own, first + number) for number in range(role.replicas + role.standby)
        ]
        for device in dict.fromkeys(devices):
            yield PlacedWorkers(
                role=role,
                device=device,
                number=devices.count(device),
                share=own.gpu_memory_utilization,
                has_pages=bool(config.graph_declaration().stage(role.stage).default_sampling),
            )


def gpu_of(config: FleetConfig, device: str) -> str | None:
    """Return the name of the GPU that a configured device stands for; None for a CPU. `auto` counts
    as the first GPU unless numerics are invariant.
    """
    if device == "cpu" or (device == "auto" and config.numerics == "invariant"):
        return None
    return device if ":" in device else FIRST_GPU


def workers_by_gpu(config: FleetConfig) -> dict[str, list[PlacedWorkers]]:
    """Return the workers on each GPU."""
    found: dict[str, list[PlacedWorkers]] = {}
    for placed in place_workers(config):
        gpu = gpu_of(config, placed.device)
        if gpu is not None:
            found.setdefault(gpu, []).append(placed)
    return found


def configured_shares(workers: Sequence[PlacedWorkers]) -> float:
    """Return the sum of the memory shares that the configuration sets for these workers; 0.9 is 90
    % of a GPU.
    """
    return round(
        sum(placed.number * placed.share for placed in workers if placed.share is not None), 6
    )


def default_share(config: FleetConfig, device: str) -> float:
    """Return the memory share of a worker on `device` that has no configured share: an equal part
    of what configured shares leave; 0 if nothing is left.
    """
    workers = workers_by_gpu(config).get(gpu_of(config, device) or "", [])
    number = sum(placed.number for placed in workers if placed.share is None and placed.has_pages)
    return max(0.0, SHARED - configured_shares(workers)) / max(1, number)


def for_role(config: FleetConfig, role: Role, replica: int = 1) -> FleetConfig:
    """Return the deployment's configuration as worker `replica` (counted from 1) of a role sees it:
    the section of its stage has the role's settings, a single device, and the worker's memory
    share.
    """
    own = config.of_role(role)
    device = device_of(config, own, first_replica(own, role) + replica - 1)
    share = own.gpu_memory_utilization or default_share(config, device)
    own = own.model_copy(update={"device": device, "gpu_memory_utilization": share})
    return config.model_copy(update={"stages": {**config.stages, role.stage: own}})
