"""Children that end with their parent, however it ends. A request to Linux; elsewhere a killed parent leaves its children."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def signalled_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """For `subprocess`'s `preexec_fn`: the child is sent `signum` when this process dies. Called by the parent.

    Where the parent is gone before the child could ask, the child never becomes its command.
    """
    if sys.platform != "linux":
        return None
    # Loaded before the fork: the child may hold a lock that nobody will release.
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os._exit(1)

    return ask
