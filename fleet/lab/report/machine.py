"""Description of the machine of a measurement, stored in each report so that reports can be
compared.
"""

import importlib.metadata
import os
import platform
import sys

import msgspec
import psutil

from fleet.core.processor import processor_field

LIBRARIES = ("torch", "transformers", "redis", "nixl", "numpy", "starlette", "uvicorn", "msgspec")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware, system and library versions of the machine. `load_1min`: mean number of running
    processes in the minute before the measurement.
    """

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    libraries: dict[str, str]
    load_1min: float


def describe_machine() -> Machine:
    return Machine(
        processor=processor_field("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=sys.version.split()[0],
        libraries={name: version for name in LIBRARIES if (version := _version(name))},
        load_1min=round(os.getloadavg()[0], 2),
    )


def usable_cores() -> int:
    """Return the number of cores this process may run on: a container's share, not the host's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
