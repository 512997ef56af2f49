"""Number of KV pages that fit into a worker's share of a GPU beside its weights. Knows no
scheduling.
"""

import math
from dataclasses import dataclass

import torch

GIB = 1 << 30
PASS_SHARE = 0.1
"""Share of the memory beside the weights that is left for the intermediate values of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a GPU once the weights are loaded. Units: bytes. `free`: the memory that any
    process can still allocate. `own`: the memory of this stage's weights.
    """

    total: int
    free: int
    own: int


def allocated_bytes(device: torch.device) -> int:
    """Return the memory in use by this process's tensors; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def read_memory(device: torch.device, allocated_before: int) -> DeviceMemory:
    """Return the memory of a GPU after the weights were loaded. `allocated_before`: value of
    `allocated_bytes` before they were loaded.
    """
    torch.cuda.empty_cache()  # the buffers of loading are free memory
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        total=total, free=free, own=torch.cuda.memory_allocated(device) - allocated_before
    )


def num_pages(memory: DeviceMemory, share: float, page_bytes: int) -> int:
    """Return the number of pages that fit into a worker's share of a GPU, less one for the pool's
    scratch page; 0 or less if no page fits.

    `share` is a share of the GPU's whole memory, so that the order in which the workers of a GPU
    start does not matter.
    """
    rest = min(int(share * memory.total) - memory.own, memory.free)
    return int(rest * (1 - PASS_SHARE)) // page_bytes - 1


def share_for(memory: DeviceMemory, pages: int, page_bytes: int) -> float:
    """Return the share of a GPU's memory in which `pages` KV pages fit, rounded up to hundredths;
    above 1 if the GPU is too small.
    """
    needed = memory.own + (pages + 1) * page_bytes / (1 - PASS_SHARE)
    return math.ceil(100 * needed / memory.total) / 100
