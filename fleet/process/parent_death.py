"""Child processes that end with the process that started them, even if that process is killed.
Linux only; on other systems children survive.

A child is tied to its parent by the kernel's parent-death signal, and to a keeper that is not its
parent by a pipe.
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
    """Return a `preexec_fn` for `subprocess` by which the child receives `signum` when this process
    dies; None on other systems than Linux. Call this function in the parent.

    If the parent has died before the child asks for the signal, the child exits without running its
    command.
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
    """Let the kernel kill this process when the last write end of the pipe `read_end` is closed.
    Nothing is ever written to the pipe.

    Like the parent-death signal, this needs no thread, and kills even a process that SIGSTOP has
    stopped.
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
    """Set the process that started this one and restarts it (its keeper), if that process is not
    its parent.
    """
    _keeper[:] = [pid]


def keeper_pid() -> int:
    """Return the pid of the process that started this one and restarts it (its keeper): the parent
    if none was set.
    """
    return _keeper[0] if _keeper else os.getppid()
