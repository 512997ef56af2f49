"""A fixed computation beside a measurement. Its CPU time shows how fast the machine's cores are meanwhile.

The CPU time of the same work differs within one run: busy cores share caches, memory, and on many hosts the execution units of
one core. Run as a module, it is the process that computes, about 2 % of the time, until its standard input ends.
"""

import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Self

import msgspec

PERIOD_S = 0.05
NUM_ENTRIES = 30_000
"""Entries of the table that is summed in a scattered order: about 1 MB, as a process's own working set."""
STRIDE = 7919


class FixedWorkResult(msgspec.Struct, frozen=True, kw_only=True):
    units: int
    cpu_s: float


class FixedWork:
    """Runs the computation from entry to exit; then `unit_us` is the CPU time of one unit in microseconds."""

    def __init__(self) -> None:
        self.unit_us = 0.0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        printed, _ = self._process.communicate()
        if kind is None:
            result = msgspec.json.decode(printed, type=FixedWorkResult)
            self.unit_us = result.cpu_s / result.units * 1e6


def _unit(table: list[int], order: list[int]) -> int:
    return sum(table[place] for place in order)


def main() -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    table = list(range(1 << 20, (1 << 20) + NUM_ENTRIES))
    order = [number * STRIDE % NUM_ENTRIES for number in range(NUM_ENTRIES)]
    units, cpu_s = 0, 0.0
    while not units or not ended.wait(PERIOD_S):
        began_s = time.thread_time()
        _unit(table, order)
        cpu_s += time.thread_time() - began_s
        units += 1
    sys.stdout.buffer.write(msgspec.json.encode(FixedWorkResult(units=units, cpu_s=cpu_s)))


if __name__ == "__main__":
    main()
