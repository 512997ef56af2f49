"""What a worker's process takes of its machine and of its GPU, as people look at it: read aside, never by the engine's thread.

A GPU is asked by NVML, which the driver answers even while kernels run or a graph is captured. Knows no engine.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

import psutil

log = logging.getLogger(__name__)

EVERY_S = 1.0
Vitals = Mapping[str, int | str]


class DeviceMonitor:
    """`read` is cheap and never waits; what the GPU says is read by a thread of its own, for a driver may be slow to answer."""

    def __init__(self, device: str) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first answer is of no time at all
        self._on_device: Vitals = {}
        self._closing = threading.Event()
        kind, _, number = device.partition(":")
        if kind == "cuda":
            ask = _cuda(int(number or 0))
            threading.Thread(target=self._follow, args=(ask,), name="gauge", daemon=True).start()

    def read(self) -> Vitals:
        """`cpu_percent` of one core, since the last time; of a GPU its name, memory (all, used, reserved here), how busy."""
        return {"cpu_percent": round(self._process.cpu_percent()), **self._on_device}

    def close(self) -> None:
        self._closing.set()

    def _follow(self, ask: Callable[[], Vitals]) -> None:
        while not self._closing.is_set():
            try:
                self._on_device = ask()
            except Exception as error:  # the thread's loop: a GPU that cannot be asked (no NVML, MIG) still computes
                log.warning("what the GPU does cannot be read, and will not be shown: %s", error)
                return
            self._closing.wait(EVERY_S)


def _cuda(index: int) -> Callable[[], Vitals]:
    import torch

    about = torch.cuda.get_device_properties(index)
    name, total = str(about.name), int(about.total_memory)
    refused = cast("type[Exception]", importlib.import_module("pynvml").NVMLError)

    def ask() -> Vitals:
        told: dict[str, int | str] = {
            "gpu": name,
            "gpu_total_bytes": total,
            "gpu_used_bytes": int(torch.cuda.device_memory_used(index)),
            "gpu_own_bytes": int(torch.cuda.memory_reserved(index)),
        }
        with suppress(refused):  # a slice of a GPU has no number of its own
            told["gpu_percent"] = int(torch.cuda.utilization(index))
        return told

    return ask
