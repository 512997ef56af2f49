"""The fork server: a process that imports the workers' modules once, and forks a worker whenever a
keeper asks for one.

`python -m fleet.cli.fork_server LISTENER FOLDER NAME MODULE...` serves on the inherited descriptor
LISTENER, whose socket is NAME in FOLDER, while a keeper is connected. The server has one thread,
and opens no GPU and no transfer agent: if an import does, the server refuses to fork, and keepers
start workers as new processes. A worker outlives the server, and is tied to its keeper by a pipe
(`die_with_pipe`).
"""

import contextlib
import gc
import importlib
import os
import selectors
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.cli.fork_protocol import (
    Ended,
    Greeting,
    Message,
    NotStarted,
    Started,
    StartRequest,
    is_own_peer,
    locked,
    receive,
    send,
)
from fleet.process.beat import adopt
from fleet.process.gc_freeze import freeze_gc
from fleet.process.parent_death import die_with_pipe, set_keeper
from fleet.process.title import set_process_title
from fleet.process.unix_sockets import address_of

IDLE_POLL_S = 0.1
MAX_DESCRIPTORS = 1 << 20
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


@dataclass(frozen=True, slots=True)
class Child:
    """Request that a forked process carries out, and the file descriptors of its output, its
    lifeline and its beats.
    """

    request: StartRequest
    output: int
    lifeline: int
    beat: int | None = None

    def close(self) -> None:
        """Close the server's copies of the descriptors."""
        for descriptor in (self.output, self.lifeline, self.beat):
            if descriptor is not None:
                os.close(descriptor)


@dataclass(slots=True)
class ForkServer:
    """Accepts connections of keepers, forks the processes that they request, and reports the exit
    statuses. `refusal`: reason why this process cannot fork; empty if it can.
    """

    listener: socket.socket
    folder: Path
    name: str
    refusal: str
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _keepers: set[socket.socket] = field(default_factory=set[socket.socket])
    _running: dict[int, tuple[int, socket.socket]] = field(
        default_factory=dict[int, tuple[int, socket.socket]]
    )
    """Pid and keeper connection of each forked process, by pidfd."""

    def run(self) -> Child | None:
        """Serve until no keeper is connected, then return None. In each forked process, return at
        once, with the request that this process must carry out.
        """
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._accept()
        while self._keepers or not self._close_if_unused():
            for key, _ in self._selector.select(None if self._keepers else IDLE_POLL_S):
                child = self._handle(key.fileobj)
                if child:
                    return child
        return None

    def _handle(self, source: object) -> Child | None:
        if source is self.listener:
            self._accept()
        elif isinstance(source, socket.socket):
            return self._serve(source)
        elif isinstance(source, int):
            self._reap(source)
        return None

    def _accept(self) -> None:
        while True:
            try:
                keeper, _ = self.listener.accept()
            except BlockingIOError:
                return
            if not is_own_peer(keeper):
                keeper.close()
                continue
            self._keepers.add(keeper)
            self._selector.register(keeper, selectors.EVENT_READ)
            self._reply(keeper, Greeting(self.refusal, os.getpid()))

    def _close_if_unused(self) -> bool:
        """Remove the server's socket and return True, unless a keeper has connected or another
        process holds the socket's lock.
        """
        with contextlib.suppress(BlockingIOError), locked(self.folder):
            self._accept()
            if self._keepers:
                return False
            with address_of(self.folder, self.name) as path:
                Path(path).unlink(missing_ok=True)
            return True
        return False

    def _serve(self, keeper: socket.socket) -> Child | None:
        try:
            message, descriptors = receive(keeper)
        except (OSError, EOFError):
            self._selector.unregister(keeper)
            self._keepers.discard(keeper)
            keeper.close()
            return None
        assert isinstance(message, StartRequest) and len(descriptors) in (2, 3), (
            "the only message of a keeper"
        )
        return self._fork(keeper, Child(message, *descriptors))

    def _fork(self, keeper: socket.socket, child: Child) -> Child | None:
        try:
            obstacle = find_obstacle()
            pid = -1 if obstacle else os.fork()
        except OSError as error:
            obstacle, pid = f"fork: {error.strerror}", -1
        if pid < 0:
            self._reply(keeper, NotStarted(obstacle))
            child.close()
            return None
        if pid == 0:
            self._close_all()
            return child
        child.close()
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = (pid, keeper)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._reply(keeper, Started(pid), [pidfd])
        return None

    def _close_all(self) -> None:
        """Close the server's own descriptors in a forked process."""
        self._selector.close()
        for one in (self.listener, *self._keepers):
            one.close()
        for pidfd in self._running:
            os.close(pidfd)

    def _reap(self, pidfd: int) -> None:
        pid, keeper = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._reply(keeper, Ended(os.waitstatus_to_exitcode(status)))

    def _reply(
        self, keeper: socket.socket, message: Message, descriptors: list[int] | None = None
    ) -> None:
        """Send a message to a keeper without blocking. Errors are ignored: a keeper that is gone,
        or does not read, is noticed when its connection ends.
        """
        with contextlib.suppress(OSError):
            keeper.setblocking(False)
            send(keeper, message, descriptors)


def load(modules: Sequence[str]) -> str:
    """Import the modules. Return the reason why this process cannot fork workers, or "" if it
    can.
    """
    # OpenMP reads these once, when torch is first imported: threads that spin while they wait
    # starve Redis and NIXL. Each worker sets the number of its threads itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()  # collections during the imports find next to nothing
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return f"its imports failed ({type(error).__name__}: {error})"
    finally:
        gc.enable()
        freeze_gc()  # collections in the workers do not write to the shared pages
    return find_obstacle()


def find_obstacle() -> str:
    """Return the reason why a fork of this process is unsafe, for example a second thread; "" if it
    is safe.
    """
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1 or threading.active_count() != 1:
        return (
            "an imported module has started a thread "
            f"({max(tasks, threading.active_count())} threads run)"
        )
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(GPU_DEVICES):
                return f"an imported module has opened the GPU ({target})"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel has no pidfd: {error.strerror}"
    return ""


def become(child: Child) -> None:
    """Give this forked process what a new child process of the keeper would have: session, output,
    beats, working directory and environment.
    """
    request = child.request
    os.setsid()
    die_with_pipe(child.lifeline)
    set_keeper(request.keeper)
    for standard in (1, 2):
        os.dup2(child.output, standard)
    os.close(child.output)
    if child.beat is not None:
        adopt(child.beat)
    os.chdir(request.folder)
    os.environb.clear()
    for entry in request.environment:
        name, _, value = entry.partition(b"=")
        os.environb[name] = value
    arguments = [os.fsdecode(argument) for argument in request.arguments]
    sys.argv = ["fleet", *arguments]
    sys.orig_argv = [sys.executable, "-m", "fleet.cli", *arguments]
    set_process_title(" ".join(sys.orig_argv))
    _seed()


def _seed() -> None:
    """Reseed random number generators from the kernel, as a new process would. Python reseeds
    `random` itself after a fork.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


def main() -> None:
    """Run the fork server; in each forked process, run the requested command instead."""
    listener, folder, name, *modules = sys.argv[1:]
    for first, end in ((3, int(listener)), (int(listener) + 1, MAX_DESCRIPTORS)):
        os.closerange(first, end)  # inherited from the first keeper, which the server may outlive
    modules = [module for module in modules if module.strip()]
    server = ForkServer(socket.socket(fileno=int(listener)), Path(folder), name, load(modules))
    child = server.run()
    if child:
        del server
        become(child)
        from fleet.cli import entry

        entry()


if __name__ == "__main__":
    main()
