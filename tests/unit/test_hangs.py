"""A keeper and a process that hangs, with real processes and signals: the process is killed with
its process group, and started again; one that loads or computes is left alone.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
import pytest

from fleet.cli.hangs import HangWatch
from fleet.cli.keeper import ChildProcess, Keeper
from fleet.process.beat import OPTION, UNBOUNDED_S, Beat, BeatRecord
from fleet.process.silence import Silence
from tests.support import await_until, cli_env

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

LEASE_S = 0.4
COMMAND = "tests.beating_command"


class Commands:
    """Process starter that runs `tests.beating_command` in place of `fleet`."""

    async def start(
        self,
        arguments: Sequence[str],
        output: int,
        env: Mapping[str, str] | None,
        beat: int | None = None,
    ) -> ChildProcess:
        assert beat is not None
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-X",
            f"{OPTION}={beat}",
            "-m",
            COMMAND,
            *arguments,
            stdout=output,
            stderr=output,
            env=cli_env(env),
            start_new_session=True,
            pass_fds=(beat,),
        )

    async def close(self) -> None:
        return


@dataclass(slots=True)
class Kept:
    """A kept command: its output, the keeper's messages, the pids of its runs, and the causes of
    its deaths.
    """

    lines: list[str] = field(default_factory=list[str])
    said: list[str] = field(default_factory=list[str])
    pids: list[int] = field(default_factory=list[int])
    causes: list[str] = field(default_factory=list[str])

    def line(self, line: bytes) -> None:
        self.lines.append(line.decode())

    def say(self, text: str, *, error: bool = False) -> None:
        self.said.append(text)

    def ended(self) -> None:
        return

    def started(self, pid: int) -> None:
        self.pids.append(pid)

    async def dead(self, pid: int, cause: str) -> bool:
        self.causes.append(cause)
        return True

    @property
    def children(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"child=(\d+)", "".join(self.lines))]

    async def wait(self, condition: Callable[[], bool], description: str) -> None:
        async def holds() -> bool:
            return condition()

        await await_until(holds, f"{description}; {self.said}, {self.lines}", timeout_s=60.0)


@asynccontextmanager
async def kept(*arguments: str, starting_s: float = UNBOUNDED_S) -> AsyncIterator[Kept]:
    """Keep a command until the end of the block; yield it once it runs."""
    found, stop = Kept(), asyncio.Event()
    keeper = Keeper(
        arguments=[*arguments],
        stop=stop,
        output=found,
        when_dead=found.dead,
        starter=Commands(),
        hangs=HangWatch(lease_s=LEASE_S, starting_s=starting_s),
    )
    running = asyncio.create_task(keeper.run())
    try:
        await found.wait(lambda: bool(found.children), "the command to run")
        yield found
    finally:
        stop.set()
        for pid in found.pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
        await running
        for group in found.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)  # the child of a run that ended by SIGTERM


async def test_stopped_process_is_killed_with_its_group_and_started_again() -> None:
    async with kept("beats") as command:
        os.kill(command.pids[0], signal.SIGSTOP)
        await command.wait(lambda: len(command.children) == 2, "another run")
        first, second = command.children
        assert (
            not psutil.pid_exists(first)
            or not psutil.Process(first).is_running()
            or (psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
        )
        assert psutil.pid_exists(second)
        assert re.match(r"SIGKILL by its keeper: it has been stopped for \d", command.causes[0])
        assert re.search(
            r"beats hangs: it has been stopped for .*state T, in", command.said[0], re.S
        )
        await command.wait(lambda: "restarting it in 0.1 s" in command.said[1], "one restart")


@pytest.mark.parametrize(
    ("kind", "cause", "function"),
    [
        ("waits", "has stood still for", "hung_function"),
        ("computes", "has computed for", "compute"),
    ],
)
async def test_loop_that_hangs_is_killed_after_its_stacks_are_written(
    kind: str, cause: str, function: str
) -> None:
    async with kept(kind) as command:
        await command.wait(lambda: len(command.children) == 2, "another run")
        assert f"its loop {cause}" in command.said[0]
        assert f"in {function}" in "".join(command.lines)


@pytest.mark.parametrize("arguments", [("loads",), ("pauses", "3"), ("beats",)], ids=" ".join)
async def test_loading_computing_and_beating_processes_are_left_alone(
    arguments: tuple[str, ...],
) -> None:
    """A process that loads, computes or beats outlives two others that are stopped one after the
    other, each of which is killed meanwhile.
    """
    async with kept(*arguments) as healthy, kept("beats") as witness:
        for number in range(2):
            os.kill(witness.pids[-1], signal.SIGSTOP)
            await witness.wait(
                lambda runs=number + 2: len(witness.children) == runs,
                "the stopped one to be killed",
            )
        assert len(healthy.pids) == 1 and not healthy.said and not healthy.causes


async def test_process_that_is_stopped_while_it_loads_is_killed() -> None:
    async with kept("loads") as command:
        os.kill(command.pids[0], signal.SIGSTOP)
        await command.wait(lambda: len(command.children) == 2, "another run")


async def test_start_without_progress_is_killed_after_its_time() -> None:
    async with kept("loads", starting_s=1.5) as command:
        await command.wait(lambda: len(command.children) == 2, "another run")
        assert "its loop has stood still for" in command.said[0]


def test_process_that_drops_its_secrets_keeps_its_beat() -> None:
    """A process that restarts itself without the secrets of its environment beats in the same
    record.
    """
    record, descriptor = BeatRecord.create()
    code = (
        "from fleet.cli.environment import restart_without_secrets; "
        "restart_without_secrets(['worker']); import os; "
        "from fleet.process.beat import adopt_inherited, beat; adopt_inherited(); "
        "beat(); assert 'FLEET_API_KEY' not in os.environ"
    )
    command = [sys.executable, "-X", f"{OPTION}={descriptor}", "-c", code]
    env = cli_env({"FLEET_API_KEY": "secret"})
    subprocess.run(command, env=env, pass_fds=[descriptor], check=True, timeout=60)
    os.close(descriptor)
    assert record.read().count == 1
    record.close()


def silence(*, total_s: float = 0.0, waiting_s: float = 0.0, stopped_s: float = 0.0) -> Silence:
    found = Silence(0.25)
    found.total_s = total_s
    found.waiting_s = waiting_s
    found.stopped_s = stopped_s
    return found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (silence(total_s=2.4, waiting_s=2.4, stopped_s=2.4), ""),
        (silence(total_s=2.6, waiting_s=2.6, stopped_s=2.6), "stopped"),
        (silence(total_s=7.0, waiting_s=7.0), ""),
        (silence(total_s=9.0, waiting_s=8.0), "stood still"),
        (silence(total_s=99.0), ""),
        (silence(total_s=100.0), "computed"),
    ],
)
def test_limits_are_two_leases_or_what_the_process_announced(found: Silence, words: str) -> None:
    announced = Beat(count=1, waiting_s=8.0, computing_s=100.0, thread=1)
    complaint = HangWatch(lease_s=1.25).complaint(found, announced)
    assert words in complaint and bool(words) == bool(complaint)
    nothing = Beat(count=1, waiting_s=0.0, computing_s=0.0, thread=1)
    assert bool(HangWatch(lease_s=1.25).complaint(found, nothing)) == (found.total_s >= 2.5)
