"""The processes of `fleet up`: one keeper for each command, their output on one terminal, and their
common end.

A keeper is a fork of `fleet up` that starts and restarts one command. Every keeper watches a pipe
whose other end only `fleet up` holds; nothing is ever written to it. The pipe closes when `fleet
up` stops its fleet or this command, and also when `fleet up` is killed; when all close, the keepers
stop their commands in order: workers leave, Redis stops last, and a command that does not end in
time is killed, frozen or not. A pipe does this on every system. Linux's parent-death signal alone
would not: it kills all commands at the same moment, and Redis cannot watch a pipe itself. The
signal covers the case of a killed keeper.
"""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import psutil
from honcho.colour import get_colours
from honcho.printer import Message, Printer

from fleet.cli.keeper import STOP_SIGNALS, ProcessStarter, kill_all, use_one_thread
from fleet.cli.supervise import Surroundings, open_keeper

SYSTEM = "system"
"""Process name under which the manager prints its own lines."""
PREDECESSOR_TIMEOUT_S = 5.0
POLL_S = 0.1
KILL_AFTER_S = 5.0
"""Time after the first process ended until the commands still running are killed; equal to
honcho's.
"""

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class KeptCommand:
    """`fleet ARGUMENTS`, run under the process name `name`. `is_added`: True if the command was
    added to a running fleet; the end of such a command does not stop the fleet.
    """

    name: str
    arguments: list[str]
    env: Mapping[str, str]
    starter: ProcessStarter
    is_added: bool


@dataclass(frozen=True, slots=True)
class KeeperPipe:
    """Pipe whose closing stops a keeper. `watched`: read end, which the keeper watches.
    `held_ends`: write ends of the pipes of all keepers, by process name; each keeper closes its
    copies.
    """

    watched: int
    held_ends: Mapping[str, int]


class KeeperProcess:
    """A keeper that runs in a forked process, and its state according to its messages to the
    manager.

    `pid`: process of the command; None before its first start. `status`: exit status of the keeper;
    None while it runs. `has_ended`: True if the command ended by itself and is not restarted.
    `is_retired`: True once `FleetManager.retire` was called for the command.
    """

    def __init__(
        self, command: KeptCommand, pipe: KeeperPipe, surroundings: Surroundings, colour: str
    ) -> None:
        self.name, self.is_added = command.name, command.is_added
        self.pid: int | None = None
        self.status: int | None = None
        self.has_ended = self.is_retired = False
        self._command = command
        self._pipe = pipe
        self._surroundings = surroundings
        self._colour = colour

    def fork(self, messages: Any, predecessor: int | None = None) -> None:
        """Start the keeper in a forked process. `predecessor`: pid of the command left by a keeper
        that was killed; the command is ended first.
        """
        self._messages = messages
        self._predecessor = predecessor
        self._process = _fork.Process(name=self.name, target=self._run)
        self._process.start()

    @property
    def exit_status(self) -> int | None:
        """Exit status of the forked process; None while it is running."""
        return self._process.exitcode

    def _run(self) -> None:
        for held in self._pipe.held_ends.values():
            os.close(held)
        for signum in STOP_SIGNALS:
            # A handler that does nothing, not SIG_IGN, which the command would inherit.
            signal.signal(signum, lambda _signum, _frame: None)
        status = asyncio.run(self._keep())
        manager = multiprocessing.parent_process()
        if manager is None or os.getppid() != manager.pid:
            # The manager is gone: the queue's thread would wait forever for a reader.
            self._messages.cancel_join_thread()
        self._send("stop", status)

    async def _keep(self) -> int:
        use_one_thread()
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_close() -> None:
            loop.remove_reader(self._pipe.watched)
            stop.set()

        loop.add_reader(self._pipe.watched, on_close)
        keeper = open_keeper(
            self._command.arguments,
            stop,
            self._surroundings,
            starter=self._command.starter,
            output=self,
            env=self._command.env,
        )
        if self._predecessor is not None:
            await asyncio.to_thread(_end, self._predecessor)
            if keeper.when_dead:
                await keeper.when_dead(self._predecessor, "lost with its keeper")
        return await keeper.run()

    def line(self, line: bytes) -> None:
        self._send("line", line)

    def say(self, text: str, *, error: bool = False) -> None:
        self._send("line", f"fleet: {text}\n")

    def started(self, pid: int) -> None:
        self._send("start", pid)

    def ended(self) -> None:
        self._send("ended", None)

    def _send(self, kind: str, data: object) -> None:
        self._messages.put(
            Message(type=kind, data=data, time=datetime.now(), name=self.name, colour=self._colour)
        )


def _end(pid: int) -> None:
    """Wait up to `PREDECESSOR_TIMEOUT_S` for the end of the command whose keeper was killed. On
    systems other than Linux, which have no parent-death signal, kill it first.
    """
    if sys.platform != "linux":
        kill_all(pid)
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(timeout=PREDECESSOR_TIMEOUT_S)


class FleetFollower(Protocol):
    """Changes the commands of a running fleet. `follow` is called several times per second, `end`
    before the fleet is stopped.
    """

    def follow(self) -> None: ...
    def end(self) -> None: ...


class FleetManager:
    """Runs commands, each with a keeper, until a signal arrives or a command ends for good; then
    stops all. `follower`: adds and retires commands while the fleet runs.

    `culprit`: name of the process whose end stopped the fleet; None after a signal. `when_started`:
    called once, when all commands run.
    """

    def __init__(self, surroundings: Surroundings, when_started: Callable[[], None]) -> None:
        self.culprit: str | None = None
        self.follower: FleetFollower | None = None
        self._surroundings = surroundings
        self._when_started = when_started
        self._keepers: dict[str, KeeperProcess] = {}
        self._messages: Any = _fork.Queue()
        self._colours = get_colours()
        self._printer = Printer(sys.stdout, width=len(SYSTEM))
        self._held_ends: dict[str, int] = {}
        self._signal: signal.Signals | None = None
        self._has_started = self._stopping = False
        self._kill_s: float | None = None

    def keep(
        self, name: str, arguments: list[str], env: Mapping[str, str], starter: ProcessStarter
    ) -> None:
        """Add a command: `loop` will run `fleet ARGUMENTS` under the process name `name`. A running
        fleet starts it at once.
        """
        watched, self._held_ends[name] = os.pipe()
        keeper = self._keepers[name] = KeeperProcess(
            KeptCommand(name, arguments, env, starter, is_added=self._has_started),
            KeeperPipe(watched, self._held_ends),
            self._surroundings,
            next(self._colours),
        )
        self._printer.width = max(self._printer.width, len(name))
        if self._has_started:
            keeper.fork(self._messages)

    def find(self, name: str) -> KeeperProcess | None:
        """Return the keeper of a command; None if there is none, or if the command was retired, or
        added to the running fleet, and has ended.
        """
        return self._keepers.get(name)

    def retire(self, name: str) -> None:
        """Begin to stop one command while the fleet runs on; the manager forgets it once it has
        ended. Idempotent until then.
        """
        keeper = self._keepers[name]
        if not keeper.is_retired:
            keeper.is_retired = True
            os.close(self._held_ends.pop(name))

    def loop(self) -> None:
        """Start all processes; return once they have ended and their output is printed."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._note_signal)
        for keeper in self._keepers.values():
            keeper.fork(self._messages)
        while self._handle_message() or not self._all_ended():
            if self._signal is not None and not self._stopping:
                self.say(f"{self._signal.name} received")
                self._stop()
            if not self._stopping:
                self._check_keepers()
                self._report_start()
            if self.follower is not None and self._has_started and not self._stopping:
                self.follower.follow()
            self._kill_overdue()

    def _note_signal(self, signum: int, _frame: object) -> None:
        self._signal = self._signal or signal.Signals(signum)

    def _handle_message(self) -> bool:
        """Handle the next message of a keeper; return False if none arrived in time."""
        try:
            message: Message = self._messages.get(timeout=POLL_S)
        except queue.Empty:
            return False
        keeper = self._keepers.get(message.name)
        if message.type == "line":
            self._write(message)
        elif keeper is None:
            return True
        elif message.type == "start":
            if self._has_started:
                self.say(f"{keeper.name} started (pid={message.data})")
            keeper.pid = message.data
        elif message.type == "ended":
            keeper.has_ended = True
        else:
            self.say(f"{keeper.name} stopped (rc={message.data})")
            self._end_keeper(keeper, message.data)
        return True

    def _check_keepers(self) -> None:
        """Start keepers that a signal killed again, with their commands. Record the end of keepers
        that ended in other ways without a message.
        """
        for keeper in list(self._keepers.values()):
            status = keeper.exit_status
            if keeper.status is not None or status is None or status == 0:
                continue  # running, or its last message is on its way
            if status > 0 or keeper.is_retired:
                self._end_keeper(keeper, status)
                return
            killed_by = signal.Signals(-status).name
            self.say(
                f"the keeper of {keeper.name} was lost (killed by {killed_by}); starting both again"
            )
            keeper.fork(self._messages, predecessor=keeper.pid)

    def _report_start(self) -> None:
        """Call `when_started` once all commands run, not earlier: a thread that the callback starts
        could hold a lock while this process forks.
        """
        if not self._has_started and all(
            keeper.pid is not None for keeper in self._keepers.values()
        ):
            self._has_started = True
            self._when_started()

    def _end_keeper(self, keeper: KeeperProcess, status: int) -> None:
        keeper.status = status
        if not self._stopping and (keeper.is_retired or keeper.is_added):
            del self._keepers[keeper.name]
            if not keeper.is_retired:
                os.close(self._held_ends.pop(keeper.name))
            return
        if not self._stopping:
            self.culprit = keeper.name
            self._stop()
        self._kill_s = self._kill_s or time.monotonic() + KILL_AFTER_S

    def _stop(self) -> None:
        """Stop all keepers by closing the pipes that they watch."""
        if self._stopping:
            return
        self._stopping = True
        self.say("stopping the fleet")
        if self.follower is not None:
            self.follower.end()
        for held in self._held_ends.values():
            os.close(held)

    def _kill_overdue(self) -> None:
        if self._kill_s is None or time.monotonic() < self._kill_s:
            return
        self._kill_s = time.monotonic() + KILL_AFTER_S
        for keeper in self._keepers.values():
            if keeper.status is None and keeper.pid is not None and keeper.exit_status is None:
                self.say(f"sending SIGKILL to {keeper.name} (pid {keeper.pid})")
                kill_all(keeper.pid)

    def _all_ended(self) -> bool:
        return self._stopping and all(
            keeper.status is not None or keeper.exit_status is not None
            for keeper in self._keepers.values()
        )

    def say(self, text: str) -> None:
        """Print a line of the manager itself."""
        self._write(Message(type="line", data=text, time=datetime.now(), name=SYSTEM, colour=None))

    def _write(self, message: Message) -> None:
        """Print a message. If stdout's reader is gone (`fleet up | head`), stop the fleet and drop
        all further output.
        """
        try:
            self._printer.write(message)
        except BrokenPipeError:
            # The descriptor itself, or the last flush at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stop()
