"""Memory that a span worker may occupy, where its layers follow from it, and the sizes of the
layers.
"""

import resource
from pathlib import Path

import psutil
import torch

from fleet.config import FleetConfig
from fleet.engine.torch.build import DTYPES
from fleet.spans.protocol.buffers import PassLimits
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.plan import ModelSizes
from fleet.stages.options import BuildOptions
from fleet.stages.span_sizes import process_sizes

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Limit of the memory of a container, of cgroup version 2 and 1."""


def available_bytes(device: torch.device, gpu_share: float) -> int:
    """Return the memory that this process may occupy: its share of a GPU, or on a CPU what the host
    has free, within the limits of its container and of the process. Other processes that start
    later are not known.
    """
    if device.type == "cuda":
        return int(gpu_share * torch.cuda.mem_get_info(device)[1])
    limits = [
        psutil.virtual_memory().available,
        *(resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)),
    ]
    for file in CGROUP_LIMITS:
        if file.exists() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def layer_sizes(
    config: FleetConfig, options: BuildOptions, slot: RouteSlot | None
) -> ModelSizes | None:
    """Return the sizes of the layers of an anchor whose span workers divide them by their memory;
    None of any other worker.

    Raises: ConfigError for a checkpoint that cannot be read.
    """
    spans = config.stage(options.stage).spans
    if slot is None or spans is None or not spans.is_auto:
        return None
    limits = PassLimits(
        max_batch=options.own.max_batch,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        num_positions=slot.num_pages * slot.page_size,
        window=spans.window or spans.num_workers + 2,
        keep_bytes=spans.keep_mib << 20,
    )
    return process_sizes(
        config.graph,
        options.stage,
        options.checkpoint,
        DTYPES[options.dtype],
        limits=limits,
        page_size=slot.page_size,
        device_kind=options.device.partition(":")[0],
    )
