"""honcho's process manager over kept processes: safe to stop at any moment, and nothing of it outlives it.

It builds on the internals of honcho 2 (`_start`, `_processes`), which `pyproject.toml` pins to that major version.

How the processes learn that `fleet up` is gone: each keeper (a fork of `fleet up` that starts and restarts one command) watches a
pipe whose other end only `fleet up` holds, and nothing is ever written to it. It closes when `fleet up` stops its fleet, and just
so when `fleet up` is killed; either way the keepers stop their commands in order: workers say goodbye, Redis leaves last, what
does not end in time is killed, frozen or not. A pipe does this on every system. Linux's parent-death signal alone would not: it
is SIGKILL for all at once, and Redis, not being ours, could not watch a pipe itself. It stands behind this for a killed keeper.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil
from honcho.manager import Manager
from honcho.printer import Printer
from honcho.process import Process

from fleet.cli.keeper import Keeper, kill_all
from fleet.cli.supervise import WorkerStarts, make_alone_check, make_fence
from fleet.core.ids import RoleName

ALONE = "redis"
"""The command that is stopped only once nobody else is connected to Redis."""
WORKER = "worker"
REGISTERED = (WORKER, "web", "conductor")
"""The commands that hold a right in Redis, which is ended when they die."""
END_PATIENCE_S = 5.0


class OpenEndedPrinter(Printer):
    """Prints until nobody reads any more (`fleet up | head`), then says so once and stays silent."""

    def __init__(self, when_unread: Callable[[], None]) -> None:
        super().__init__(sys.stdout)
        self._when_unread = when_unread

    def write(self, message: Any) -> None:
        try:
            super().write(message)
        except BrokenPipeError:
            # The descriptor itself, or the last flush at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._when_unread()


class KeptProcess(Process):
    """One keeper: `run` is the whole life of the forked process. Its lines, starts and end are messages to the manager."""

    def __init__(self, arguments: list[str], *, redis_url: str, watched: int, held: int, **options: Any) -> None:
        super().__init__(arguments, **options)
        self._redis_url, self._watched, self._held = redis_url, watched, held
        self.predecessor: int | None = None

    def run(self, events: Any = None, ignore_signals: bool = False) -> None:
        # Our copy of the end that must close when `fleet up` does.
        os.close(self._held)
        self._events = events
        for signum in (signal.SIGINT, signal.SIGTERM):
            # A handler that does nothing, not SIG_IGN: that one the command would inherit.
            signal.signal(signum, lambda _signum, _frame: None)
        status = asyncio.run(self._keep())
        # Whom would it be told to? The queue's thread would wait for ever for somebody to read it.
        if os.getppid() != self._manager_pid:
            events.cancel_join_thread()
        self._send_message({"returncode": status}, type="stop")

    @property
    def _manager_pid(self) -> int:
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None, "a keeper is a fork of the manager"
        return parent.pid

    async def _keep(self) -> int:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def closed() -> None:
            loop.remove_reader(self._watched)
            stop.set()

        loop.add_reader(self._watched, closed)
        role = RoleName(self.cmd[1]) if self.cmd[0] == WORKER else None
        fence = make_fence(self._redis_url, self.cmd[0], role or "") if self.cmd[0] in REGISTERED else None
        if self.predecessor is not None:
            await asyncio.to_thread(_end, self.predecessor)
            if fence:
                await fence(self.predecessor, "lost with its keeper")
        return await Keeper(
            arguments=self.cmd,
            stop=stop,
            output=self,
            env=self.env,
            alone=make_alone_check(self._redis_url) if self.cmd[0] == ALONE else None,
            when_dead=fence,
            starts=WorkerStarts(self._redis_url, role) if role else None,
        ).run()

    def line(self, line: bytes) -> None:
        self._send_message(line)

    def say(self, text: str, *, error: bool = False) -> None:
        self._send_message(f"fleet: {text}\n".encode())

    def started(self, pid: int) -> None:
        self._send_message({"pid": pid}, type="start")


def _end(pid: int) -> None:
    """The command of a lost keeper: dead already where there is a parent-death signal, else still at work."""
    if sys.platform != "linux":
        kill_all(pid)
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(timeout=END_PATIENCE_S)


class FleetManager(Manager):
    """`culprit` is the first process that ended by itself; None when a signal ended them all.

    honcho 2.0 fails on a signal that arrives before every process has reported its pid, so that signal is kept until then.
    """

    _processes: dict[str, dict[str, Any]]

    def __init__(self, redis_url: str, when_started: Callable[[], None]) -> None:
        super().__init__(OpenEndedPrinter(self.terminate))
        self.culprit: str | None = None
        self._when_started = when_started
        self._stop_when_started = False
        watched, held = os.pipe()
        self._held: int | None = held
        self._process_ctor = partial(KeptProcess, redis_url=redis_url, watched=watched, held=held)

    def keep(self, name: str, arguments: list[str], env: Mapping[str, str]) -> None:
        """Run `fleet ARGUMENTS` as process `name` once `loop` runs."""
        self.add_process(name, arguments, env=dict(env))

    def _start(self) -> None:
        for name in self._processes:
            self._fork(name)
        while not self._all_started():
            message = self.events.get()
            if message.type == "start":
                self._processes[message.name]["pid"] = message.data["pid"]
            elif message.type == "stop":
                self._processes[message.name]["returncode"] = message.data["returncode"]
            else:
                self._printer.write(message)
        if self._stop_when_started:
            self.terminate()
        # Only now: a thread started earlier could hold a lock while this process forks.
        self._when_started()

    def _fork(self, name: str) -> None:
        kept = self._processes[name]
        kept["process"] = multiprocessing.get_context("fork").Process(name=name, target=kept["obj"].run, args=(self.events, True))
        kept["process"].start()

    def _any_stopped(self) -> bool:
        """Asked at every turn of honcho's loop; a keeper that was killed did not say so itself."""
        for name, kept in self._processes.items():
            if "returncode" not in kept and not self._terminating and not kept["process"].is_alive():
                self._replace(name, kept)
        return super()._any_stopped()

    def _replace(self, name: str, kept: dict[str, Any]) -> None:
        status = kept["process"].exitcode
        if status == 0:
            # It ended in order; its last message is on its way.
            return
        if status > 0:
            kept["returncode"] = status
            return
        self._system_print(f"the keeper of {name} was lost (killed by {signal.Signals(-status).name}); starting both again\n")
        kept["obj"].predecessor = kept["pid"]
        self._fork(name)

    def _all_stopped(self) -> bool:
        return all("returncode" in kept or not kept["process"].is_alive() for kept in self._processes.values())

    def _killall(self, force: bool = False) -> None:
        """Asking is closing the pipe; see the top of this file. Honcho asks once and forces until all have ended."""
        if self._held is not None:
            self._system_print("stopping the fleet\n")
            os.close(self._held)
            self._held = None
        if force:
            super()._killall(force=True)

    def terminate(self) -> None:
        if not self._all_started():
            self._stop_when_started = True
            return
        if not self._terminating:
            self.culprit = next((name for name, process in self._processes.items() if "returncode" in process), None)
        super().terminate()
