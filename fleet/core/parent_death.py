"""Child processes that end with their parent, even if it is killed. Linux only; elsewhere children of a killed parent remain."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def signalled_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` for `subprocess`: the child receives `signum` when this process dies. Called by the parent.

    If the parent has died before the child's request, the child exits without running its command.
    """
    if sys.platform != "linux":
        return None
    # Loaded before the fork: in the child, a lock of the loader could be held by a thread that no longer exists.
    libc, parent = ctypes.CDLL(None), os.getpid()

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os._exit(1)

    return request_signal
