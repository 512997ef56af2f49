"""Memory that a span worker may occupy, by which an anchor chooses its layers."""

import resource
from pathlib import Path

import psutil
import torch

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, for cgroup versions 2 and 1."""


def available_bytes(device: torch.device, gpu_share: float) -> int:
    """Return the memory that this process may occupy, in bytes. On a GPU: `gpu_share` of its
    memory; on a CPU: what the host has free, within the limits of the container and the process.
    Processes that start later are not taken into account.
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
