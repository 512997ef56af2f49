"""The keeper of a command: restarts it when it crashes or is killed, but not when it ends with
status 0; and kills it when it hangs. Knows nothing about the fleet.

honcho ends all processes when one ends; a keeper outlives the command that it runs.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import psutil

from fleet.cli.hangs import HangWatch, write_stacks
from fleet.process import background
from fleet.process.beat import OPTION, BeatRecord
from fleet.process.parent_death import signalled_with_parent

CANNOT_START_S = 60.0
STABLE_AFTER_S = 10.0
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
"""Longest pause before a restart, well below `lease.no_worker_timeout_s`: if the start of a role's
only worker cannot be announced, requests wait no longer than that setting.
"""
LAST_LINES = 5
ALONE_TIMEOUT_S = 3.0
ALONE_POLL_S = 0.05
STOP_TIMEOUT_S = 10.0
READER_TIMEOUT_S = 1.0
NOT_STARTED = 1
UNKNOWN_STATUS = -1000
"""Status of a command whose end was seen, but neither its signal nor its exit status."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WhenDead = Callable[[int, str], Awaitable[bool]]
"""Callback for the death of a command, with its pid and the signal or exit status as text; returns
True if the command had been serving.
"""


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Decides whether and when a command is restarted after it has ended. Units: seconds on one
    monotonic clock.

    If the first run ends with an error after less than `CANNOT_START_S`, the command cannot start
    and is given up, unless a signal killed it or it has `served`. After any other death it is
    restarted. The pause doubles from death to death up to `MAX_PAUSE_S`, and is short again after
    `STABLE_AFTER_S` of running.
    """

    first_started_s: float
    deaths: int = 0

    def pause_s(
        self, exit_status: int, started_s: float, now_s: float, *, served: bool = False
    ) -> float | None:
        """Count the end of a run; return the seconds until the next start, or None to give up.
        `exit_status` is as in `subprocess`, negative for a signal; `started_s`: start of the run
        that ended; `served`: whether the command had been serving.
        """
        failed_at_once = (
            exit_status > 0
            and started_s == self.first_started_s
            and now_s - started_s < CANNOT_START_S
        )
        if failed_at_once and not served:
            return None
        self.deaths = 1 if now_s - started_s >= STABLE_AFTER_S else self.deaths + 1
        return min(FIRST_PAUSE_S * 2.0 ** min(self.deaths - 1, 32), MAX_PAUSE_S)


class KeeperOutput(Protocol):
    """Destination of a command's output lines and of the keeper's own messages. `line` is called
    from a separate thread. `ended`: the command ended with status 0 and is not restarted.
    """

    def line(self, line: bytes) -> None: ...
    def say(self, text: str, *, error: bool = False) -> None: ...
    def started(self, pid: int) -> None: ...
    def ended(self) -> None: ...


class StartAnnouncer(Protocol):
    """Announces the starts of a worker, so that requests wait for it and do not fail."""

    def begin(self, pause_s: float, *, stopped: bool = False) -> None: ...
    def spawned(self, pid: int) -> None: ...
    async def end(self, *, failed: bool) -> None: ...


class ChildProcess(Protocol):
    """A process that was started for a command."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...


class ProcessStarter(Protocol):
    """Starts `fleet ARGUMENTS` in a process session of its own; the process dies with the keeper.

    `output`: file descriptor for its stdout and stderr. `env`: environment of the process; None for
    the keeper's. `beat`: file descriptor of its `BeatRecord`; None for a process that nobody
    watches. Raises: OSError.
    """

    async def start(
        self,
        arguments: Sequence[str],
        output: int,
        env: Mapping[str, str] | None,
        beat: int | None = None,
    ) -> ChildProcess: ...
    async def close(self) -> None: ...


class NewProcesses:
    """Process starter that runs each command in a new Python process."""

    async def start(
        self,
        arguments: Sequence[str],
        output: int,
        env: Mapping[str, str] | None,
        beat: int | None = None,
    ) -> ChildProcess:
        # Python's own option, so that the command line of `fleet` stays as it was typed.
        options = () if beat is None else ("-X", f"{OPTION}={beat}")
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *options,
            "-m",
            "fleet.cli",
            *arguments,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
            pass_fds=() if beat is None else (beat,),
            preexec_fn=signalled_with_parent(signal.SIGKILL),
        )

    async def close(self) -> None:
        return


class TerminalOutput:
    """Keeper output that prints to the standard output of this process."""

    def line(self, line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    def say(self, text: str, *, error: bool = False) -> None:
        print(f"fleet: {text}", file=sys.stderr if error else sys.stdout, flush=True)

    def started(self, pid: int) -> None:
        return

    def ended(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class Keeper:
    """Runs `fleet ARGUMENTS` until `stop` is set, and restarts it after each failure. After an end
    with exit status 0 the command is not restarted, and the keeper waits for `stop`.

    `alone`: check that must be True before the command is stopped; the wait for it is bounded.
    Redis has such a check, so that it stops last and the other processes can deregister.
    `when_dead`: called first after each death. `starts`: announces each start before it begins.
    `starter`: performs the start. `hangs`: watch that decides when the command hangs and is killed,
    to be restarted; None kills none.
    """

    arguments: list[str]
    stop: asyncio.Event
    output: KeeperOutput = field(default_factory=TerminalOutput)
    env: Mapping[str, str] | None = None
    alone: Callable[[], Awaitable[bool]] | None = None
    when_dead: WhenDead | None = None
    starts: StartAnnouncer | None = None
    starter: ProcessStarter = field(default_factory=NewProcesses)
    hangs: HangWatch | None = None
    _served: bool = False
    _complaint: str = ""
    """Why the last run was killed as hung; "" if it was not."""
    _last_lines: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=LAST_LINES))

    @property
    def name(self) -> str:
        return " ".join(argument for argument in self.arguments[:2] if not argument.startswith("-"))

    async def run(self) -> int:
        """Run the command until `stop` is set or it cannot start; return the exit status for the
        keeper.
        """
        try:
            return await self._run_repeatedly()
        finally:
            await self._end_starts(failed=not self.stop.is_set())
            await self.starter.close()

    async def _run_repeatedly(self) -> int:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        policy = RestartPolicy(first_started_s=started_s)
        self._announce_start(0.0)
        while True:
            status = await self._run_once()
            if self.stop.is_set():
                return max(status, 0) if status != -signal.SIGTERM else 0
            if status == 0:
                await self._end_starts(failed=False)
                self.output.ended()
                self.output.say(
                    f"{self.name} ended and is not restarted; start another one with `fleet "
                    f"{self.name}`"
                )
                await self.stop.wait()
                return 0
            pause_s = policy.pause_s(status, started_s, loop.time(), served=self._served)
            if pause_s is None:
                self._report_death(f"{describe_end(status)} and is not restarted", error=True)
                return status
            self._announce_start(pause_s, stopped=-status in STOP_SIGNALS)
            self._report_death(f"{describe_end(status)}; restarting it in {pause_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), pause_s)
                return 0
            started_s = loop.time()

    def _announce_start(self, pause_s: float, *, stopped: bool = False) -> None:
        if self.starts:
            self.starts.begin(pause_s, stopped=stopped)

    async def _end_starts(self, *, failed: bool) -> None:
        if self.starts:
            await self.starts.end(failed=failed)

    def _report_death(self, event: str, *, error: bool = False) -> None:
        """Print a death and the command's last output lines as one message, since those lines are
        hard to find among the output of other processes.
        """
        last = [f"  {line.decode('utf-8', 'replace').rstrip()}" for line in self._last_lines]
        lines = f"; its last lines:\n{chr(10).join(last)}" if last else ""
        self.output.say(f"{self.name} {event}{lines}", error=error)

    async def _run_once(self) -> int:
        """Run the command once and return its exit status. The command has a process session of its
        own, so signals to the keeper's process group do not reach it.
        """
        self._last_lines.clear()
        self._complaint = ""
        read_end, write_end = os.pipe()
        record, beat = BeatRecord.create(self.hangs.starting_s) if self.hangs else (None, None)
        try:
            process = await self._unless_stopped(
                self.starter.start(self.arguments, write_end, self.env, beat)
            )
        except OSError as error:
            # The machine has no memory or processes to spare: counts as a death, and is tried
            # again.
            os.close(read_end)
            self._last_lines.append(str(error).encode())
            return NOT_STARTED
        finally:
            os.close(write_end)
            if beat is not None:
                os.close(beat)
        if process is None:
            os.close(read_end)
            return -signal.SIGTERM
        # A pipe and a thread, not the process's own stream: a fork of the command may hold the pipe
        # open after its death.
        reader = threading.Thread(
            target=self._forward, args=(os.fdopen(read_end, "rb"),), daemon=True
        )
        reader.start()
        self.output.started(process.pid)
        if self.starts:
            self.starts.spawned(process.pid)
        status = await self._until_ended(process, record)
        if self.when_dead and status != 0 and not self.stop.is_set():
            # First of all: clients wait for the tasks that it held.
            cause = cause_of(status)
            cause = f"{cause} by its keeper: {self._complaint}" if self._complaint else cause
            self._served = await self.when_dead(process.pid, cause)
        await asyncio.to_thread(reader.join, READER_TIMEOUT_S)
        return status

    def _forward(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._last_lines.append(line)
                # The reader may be gone; the command must not block on a full pipe.
                with contextlib.suppress(OSError):
                    self.output.line(line)

    async def _unless_stopped(
        self, starting: Coroutine[Any, Any, ChildProcess]
    ) -> ChildProcess | None:
        """Wait for a start and return its process, or None if the keeper is stopped first: a start
        through the fork server may take long.
        """
        started = asyncio.create_task(starting)
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({started, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not started.done():
            started.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await started
        return None

    async def _until_ended(self, process: ChildProcess, record: BeatRecord | None) -> int:
        """Wait for the end of a process, and bring it about if the keeper is stopped or the process
        hangs.
        """
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(self.stop.wait())
        watch = self._end_if_hung(process.pid, record)
        hung = background.start(watch, f"the watch of {self.name}")
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, hung):
            task.cancel()
        await asyncio.gather(hung, return_exceptions=True)
        if not ended.done():
            if self.alone:
                await _wait_until_alone(self.alone)
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait({ended}, timeout=STOP_TIMEOUT_S)
        if not ended.done():
            kill_all(process.pid)
        return await ended

    async def _end_if_hung(self, pid: int, record: BeatRecord | None) -> None:
        """Watch a process, and kill it with its whole process group once it hangs. Its stacks are
        written to its output first, and a process that beats meanwhile is left alone.
        """
        if self.hangs is None or record is None:
            return
        with contextlib.closing(record):
            last, complaint, stacks = None, "", ""
            while last != record.read():
                complaint = await self.hangs.until_hung(pid, record)
                last = record.read()
                stacks = await write_stacks(pid, last)
        self._complaint = complaint
        kill_all(pid)
        self.output.say(f"{self.name} hangs: {complaint}; it is killed. Its threads:\n{stacks}")


def use_one_thread() -> None:
    """Limit the running event loop's executor to one thread, since the blocking calls of a keeper
    never overlap.

    The default executor would grow to its limit: it starts a thread whenever a call arrives before
    the previous thread is known to be idle.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


def kill_all(pid: int) -> None:
    """Send SIGKILL to a process, its process group, and all its descendants, also to those in
    sessions of their own.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        descendants = process.children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
        for member in (process, *descendants):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def cause_of(status: int) -> str:
    """Return the signal's name, or the exit status, as text. `status` is as in `subprocess`;
    real-time signals have only a number.
    """
    if status == UNKNOWN_STATUS:
        return "an unknown cause"
    if status >= 0:
        return f"exit status {status}"
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


def describe_end(status: int) -> str:
    if status == UNKNOWN_STATUS:
        return "ended with an unknown status"
    return f"was killed by {cause_of(status)}" if status < 0 else f"ended with status {status}"


async def _wait_until_alone(alone: Callable[[], Awaitable[bool]]) -> None:
    deadline = asyncio.get_running_loop().time() + ALONE_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline and not await alone():
        await asyncio.sleep(ALONE_POLL_S)
