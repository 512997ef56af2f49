"""Background load: the CPU that other processes of the machine use during a measurement."""

import time

import psutil


class BackgroundLoad:
    """Mean number of CPU cores used by other processes, from the construction of the object on.
    This process and its descendants do not count.

    A fleet that is not a descendant of this process counts as background load.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._others_s = _all_cpu_s() - _own_cpu_s()

    def cores(self) -> float:
        """Return the mean number of cores since the construction. The value is slightly wrong if
        processes start or end meanwhile; never negative.
        """
        others_s = _all_cpu_s() - _own_cpu_s() - self._others_s
        return max(0.0, round(others_s / (time.monotonic() - self._began_s), 2))


def _all_cpu_s() -> float:
    """Return the CPU seconds of all processes since boot, including time stolen by a virtual
    machine's host.
    """
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)


def _own_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, and of ended children for which
    they have waited.
    """
    me = psutil.Process()
    return sum(_cpu_s_of(process) for process in (me, *me.children(recursive=True)))


def _cpu_s_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
