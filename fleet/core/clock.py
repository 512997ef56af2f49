"""Wall-clock time in the one unit that crosses processes. Leases use Redis's clock, never this one."""

import time


def now_us() -> int:
    """Wall-clock microseconds since 1970."""
    return time.time_ns() // 1000
