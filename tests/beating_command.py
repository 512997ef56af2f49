"""A stand-in for a `fleet` command under a keeper: `python -m tests.beating_command KIND` beats, or
stands still, as KIND says. Prints its pid, and that of a child in its process group.

`beats`: beats for ever. `waits`: beats once, then waits in `hung_function`. `computes`: beats once,
then computes for ever. `loads`: never beats. `pauses N`: computes for N seconds between two beats,
again and again.
"""

import subprocess
import sys
import threading
import time

from fleet.process.beat import adopt_inherited, beat

PATIENCE_S = 1.2
"""Longest silence that the command announces: a little more than the shortest one of a keeper."""


def hung_function() -> None:
    threading.Event().wait()


def compute(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sum(range(1000))


def main() -> None:
    kind, *values = sys.argv[1:]
    adopt_inherited()
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(f"{kind} child={child.pid}", flush=True)
    pause = threading.Event()
    while kind == "beats":
        beat()
        pause.wait(0.05)
    while kind == "pauses":
        beat(0.0, 3600.0)
        compute(float(values[0]))
    if kind == "loads":
        hung_function()
    beat(PATIENCE_S, PATIENCE_S)
    if kind == "computes":
        compute(3600.0)
    hung_function()


main()
