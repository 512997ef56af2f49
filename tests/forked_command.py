"""A stand-in for the `fleet` command that a fork server imports instead of the real models; it
describes the forked process.

Every command prints the description as JSON (`fleet show` does only that); `fleet exit STATUS` then
ends with a status; `fleet wait` then waits for a signal.
"""

import json
import os
import random
import signal
import sys
import threading
from typing import Any

import numpy.random

import fleet.cli
from fleet.process.parent_death import keeper_pid


def describe() -> dict[str, Any]:
    """Return a description of this process: what it inherited (arguments, environment, folder, open
    files), its ids and threads, and random numbers that it generates.
    """
    torch = sys.modules.get("torch")
    return {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "pid": os.getpid(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "keeper": keeper_pid(),
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "links": [
            os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
        ],
        "terminates": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "draws": [random.random(), float(numpy.random.random())],
        "torch": torch and [float(torch.rand(())), _threads_of(torch)],
    }


def _threads_of(torch: Any) -> int:
    """Compute with the number of threads in the environment, and return how many threads run."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))
    return torch.get_num_threads()


def entry() -> None:
    """Print the description of this process, then run the command in `sys.argv`."""
    print(json.dumps(describe()), flush=True)
    command, *values = sys.argv[1:]
    if command == "exit":
        sys.exit(int(values[0]))
    if command == "wait":
        signal.pause()


fleet.cli.entry = entry
