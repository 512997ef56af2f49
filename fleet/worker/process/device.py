"""CPU and GPU use of a worker's process, for display; measured outside the engine's thread. Knows
no engine.

GPU numbers come from NVML, which answers even while kernels run or a graph is captured.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

import psutil

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
Vitals = Mapping[str, int | str]


class DeviceMonitor:
    """Monitor of the CPU and GPU use of this process. A thread of its own queries the GPU, whose
    driver may be slow to answer, so that `read` never waits.
    """

    def __init__(self, device: str) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call has no interval to measure
        self._on_device: Vitals = {}
        self._closing = threading.Event()
        kind, _, number = device.partition(":")
        if kind == "cuda":
            query = _cuda_query(int(number or 0))
            threading.Thread(
                target=self._follow, args=(query,), name="device-monitor", daemon=True
            ).start()

    def read(self) -> Vitals:
        """Return `cpu_percent`, the CPU use since the previous call in percent of one core, and the
        GPU's name, utilisation and memory (total, used, used by this process) if there is a GPU.
        """
        return {"cpu_percent": round(self._process.cpu_percent()), **self._on_device}

    def close(self) -> None:
        self._closing.set()

    def _follow(self, query: Callable[[], Vitals]) -> None:
        while not self._closing.is_set():
            try:
                self._on_device = query()
            # the thread's loop: a GPU without NVML (or under MIG) still computes
            except Exception as error:
                log.warning("GPU use cannot be read and will not be shown: %s", error)
                return
            self._closing.wait(INTERVAL_S)


def _cuda_query(index: int) -> Callable[[], Vitals]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    name, total = str(properties.name), int(properties.total_memory)
    refused = cast("type[Exception]", importlib.import_module("pynvml").NVMLError)

    def query() -> Vitals:
        vitals: dict[str, int | str] = {
            "gpu": name,
            "gpu_total_bytes": total,
            "gpu_used_bytes": int(torch.cuda.device_memory_used(index)),
            "gpu_own_bytes": int(torch.cuda.memory_reserved(index)),
        }
        with suppress(refused):  # a MIG slice has no utilisation of its own
            vitals["gpu_percent"] = int(torch.cuda.utilization(index))
        return vitals

    return query
