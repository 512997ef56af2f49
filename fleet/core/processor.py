"""Properties of this machine's processor that the kernel gives. Knows no torch."""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def processor_field(name: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, such as "model name", "vendor_id" or
    "flags"; "" where the kernel gives none.
    """
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")
