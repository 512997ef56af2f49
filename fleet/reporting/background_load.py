"""How busy everybody else on the machine is while something is measured: what decides whether a number means anything."""

import time

import psutil


class BackgroundLoad:
    """Cores kept busy by processes that are not ours, from here to `cores()`. Ours: this process and all it started.

    A fleet that was not started here counts as a neighbour.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._others_s = _busy_s() - _ours_s()

    def cores(self) -> float:
        """Processes that start or end while it counts can make it a little wrong, never negative."""
        others_s = _busy_s() - _ours_s() - self._others_s
        return max(0.0, round(others_s / (time.monotonic() - self._began_s), 2))


def _busy_s() -> float:
    """CPU seconds of all processes since the machine started, and those that a virtual machine's host kept for itself."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)


def _ours_s() -> float:
    """Children that have ended count through the parent that waited for them."""
    me = psutil.Process()
    return sum(_used_s(process) for process in (me, *me.children(recursive=True)))


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
