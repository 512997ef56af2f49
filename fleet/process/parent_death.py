"""Processes that end with the process that keeps them, even if it is killed. Linux only; elsewhere
they remain.

A child is tied to its parent by the kernel's parent-death signal, and a process with another parent
by a pipe.
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
F_SETSIG = 10
_keeper: list[int] = []


def signalled_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` for `subprocess`: the child receives `signum` when this process dies.
    Called by the parent.

    If the parent has died before the child's request, the child exits without running its command.
    """
    if sys.platform != "linux":
        return None
    # Loaded before the fork: in the child, a lock of the loader could be held by a thread that no
    # longer exists.
    libc, parent = ctypes.CDLL(None), os.getpid()

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os._exit(1)

    return request_signal


def die_with_pipe(read_end: int) -> None:
    """Let the kernel kill this process when the last write end of a pipe is closed, to which
    nothing is ever written.

    Like the parent-death signal, this needs no thread, and ends a stopped process too.
    """
    import fcntl

    os.set_inheritable(read_end, True)  # the tie remains if the process executes another program
    fcntl.fcntl(read_end, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(read_end, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    if poll.poll(0):
        os._exit(1)  # the other end was closed before


def set_keeper(pid: int) -> None:
    """Set the process that keeps this one, if it is not its parent."""
    _keeper[:] = [pid]


def keeper_pid() -> int:
    """Return the process that keeps this one; its parent, if none was set."""
    return _keeper[0] if _keeper else os.getppid()
