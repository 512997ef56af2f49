"""When a keeper restarts its command, and when it gives the command up."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest

from fleet.cli.keeper import (
    CANNOT_START_S,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    STABLE_AFTER_S,
    Keeper,
    RestartPolicy,
    TerminalOutput,
    cause_of,
    use_one_thread,
)
from fleet.config.schema import LeaseConfig
from tests.support import await_until

KILLED, FAILED = -9, 1


def policy() -> RestartPolicy:
    return RestartPolicy(first_started_s=0.0)


@pytest.mark.parametrize(
    ("status", "ended_s", "served", "pause_s"),
    [
        (FAILED, CANNOT_START_S - 1, False, None),
        (FAILED, CANNOT_START_S + 1, False, FIRST_PAUSE_S),
        (FAILED, 1.0, True, FIRST_PAUSE_S),
        (KILLED, 0.0, False, FIRST_PAUSE_S),
        (KILLED, 1.0, False, FIRST_PAUSE_S),
        (KILLED, CANNOT_START_S * 100, False, FIRST_PAUSE_S),
    ],
    ids=[
        "error soon",
        "error later",
        "error soon after serving",
        "kill at the start",
        "kill soon",
        "kill later",
    ],
)
def test_first_end_of_a_command_is_final_or_followed_by_a_restart(
    status: int, ended_s: float, served: bool, pause_s: float | None
) -> None:
    assert policy().pause_s(status, 0.0, ended_s, served=served) == pause_s


def test_pauses_after_kills_stay_below_no_worker_timeout() -> None:
    """Pauses before restarts stay below `no_worker_timeout` when the command is killed as soon as
    it serves again. A kill after a longer time of serving counts from the beginning.
    """
    restarts, now_s, patience_s = policy(), 0.0, LeaseConfig().no_worker_timeout_s
    for _ in range(20):
        pause_s = restarts.pause_s(KILLED, now_s, now_s + 3.0)
        assert pause_s is not None and pause_s <= patience_s / 2
        now_s += 3.0 + pause_s
    assert restarts.pause_s(KILLED, now_s, now_s + 12.0) == FIRST_PAUSE_S


def test_error_after_a_kill_is_restarted() -> None:
    """An error after a kill is restarted, since Redis may be gone at that moment: a command that
    started once can start again.
    """
    restarts = policy()
    assert restarts.pause_s(KILLED, 0.0, 5.0) is not None
    assert restarts.pause_s(FAILED, 5.1, 6.0) is not None


def test_pauses_double_up_to_a_bound() -> None:
    restarts, now_s, pauses = policy(), 0.0, list[float]()
    for _ in range(2000):
        pause_s = restarts.pause_s(KILLED, now_s, now_s + 0.5)
        assert pause_s is not None
        pauses.append(pause_s)
        now_s += 0.5 + pause_s
    assert pauses[:5] == [FIRST_PAUSE_S * 2**number for number in range(5)]
    assert pauses[-1] == MAX_PAUSE_S and pauses == sorted(pauses)


def test_pause_is_short_again_after_a_stable_run() -> None:
    restarts = policy()
    pauses = [restarts.pause_s(KILLED, second, second + 0.5) for second in range(1, 5)]
    assert pauses[-1] == FIRST_PAUSE_S * 8
    assert restarts.pause_s(KILLED, 10.0, 10.0 + STABLE_AFTER_S - 1) == FIRST_PAUSE_S * 16
    assert restarts.pause_s(KILLED, 100.0, 100.0 + STABLE_AFTER_S) == FIRST_PAUSE_S
    assert restarts.pause_s(KILLED, 200.0, 200.5) == FIRST_PAUSE_S * 2


async def run_until(keeper: Keeper, condition: Callable[[], bool], description: str) -> bool:
    """Run a keeper until the condition holds, then stop it; return True if the keeper was still
    running.
    """
    running = asyncio.create_task(keeper.run())

    async def holds() -> bool:
        return condition()

    await await_until(holds, description, timeout_s=60.0)
    still_running = not running.done()
    keeper.stop.set()
    await running
    return still_running


async def test_keeper_restarts_command_that_had_served() -> None:
    """A keeper restarts a command that had served; a command that fails at its first start is
    restarted only if the fleet reports that it had served.
    """
    reported: list[int] = []

    async def had_served(pid: int, cause: str) -> bool:
        assert cause == "exit status 2"
        reported.append(pid)
        return len(reported) == 1

    keeper = Keeper(arguments=["no-such-command"], stop=asyncio.Event(), when_dead=had_served)
    await run_until(keeper, lambda: len(reported) == 2, "it to be started again")


@pytest.mark.parametrize(
    ("status", "cause"),
    [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-40, "signal 40"), (3, "exit status 3")],
)
def test_cause_of_a_death_is_its_signal_or_exit_status(status: int, cause: str) -> None:
    assert cause_of(status) == cause


class Stopping(TerminalOutput):
    """Terminal output double that ends each command by SIGTERM as soon as it runs."""

    def started(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)


class Starts:
    """Double that records the announcements of a keeper."""

    def __init__(self) -> None:
        self.announced: list[str] = []

    def begin(self, pause_s: float, *, stopped: bool = False) -> None:
        self.announced.append(f"begin {pause_s}{' after a stop' if stopped else ''}")

    def spawned(self, pid: int) -> None:
        self.announced.append("spawned")

    async def end(self, *, failed: bool) -> None:
        self.announced.append("end, failed" if failed else "end")


async def test_start_is_announced_before_its_pause_and_withdrawn_on_stop() -> None:
    starts, stop = Starts(), asyncio.Event()

    async def had_served(pid: int, cause: str) -> bool:
        if starts.announced.count("spawned") == 2:
            asyncio.get_running_loop().call_soon(stop.set)
        return True

    await Keeper(
        arguments=["no-such-command"], stop=stop, when_dead=had_served, starts=starts
    ).run()
    assert (
        starts.announced[:4] == ["begin 0.0", "spawned", "begin 0.1", "spawned"]
        and starts.announced[-1] == "end"
    )


async def test_announcement_ends_with_status_0() -> None:
    starts = Starts()
    keeper = Keeper(arguments=["--help"], stop=asyncio.Event(), starts=starts)
    assert await run_until(keeper, lambda: "end" in starts.announced, "the start to be withdrawn")
    assert starts.announced[:3] == ["begin 0.0", "spawned", "end"]


async def test_announcement_ends_if_command_cannot_start() -> None:
    starts = Starts()
    assert (
        await Keeper(arguments=["no-such-command"], stop=asyncio.Event(), starts=starts).run() > 0
    )
    assert starts.announced == ["begin 0.0", "spawned", "end, failed"]


async def test_start_stopped_by_signal_is_announced_as_stopped() -> None:
    starts = Starts()
    keeper = Keeper(
        arguments=["redis", "--help"], stop=asyncio.Event(), output=Stopping(), starts=starts
    )
    await run_until(
        keeper, lambda: starts.announced.count("spawned") == 2, "the command to be started again"
    )
    assert starts.announced[2] == "begin 0.1 after a stop"


async def test_blocking_calls_of_a_keeper_share_one_thread() -> None:
    """A keeper's blocking calls share one thread; with asyncio's default pool, a keeper whose
    commands die again and again would collect threads.
    """
    use_one_thread()
    assert len({await asyncio.to_thread(threading.get_ident) for _ in range(100)}) == 1
