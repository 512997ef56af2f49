"""Wall-clock time in microseconds, the unit used between processes. Deadlines use Redis's clock,
never this one.
"""

import time


def now_us() -> int:
    """Return the wall-clock time in microseconds since 1970."""
    return time.time_ns() // 1000
