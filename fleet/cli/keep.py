"""Keeping one command running: started again when it crashes or is killed, left alone when it ends well. Knows no fleet.

Under honcho the end of one process ends all of them; a kept process rides through the death of the command it runs.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

CANNOT_START_S = 60.0
MAX_DEATHS = 5
DEATHS_WINDOW_S = 300.0
FIRST_PAUSE_S = 0.1
LINGER_S = 3.0
LINGER_POLL_S = 0.05
PR_SET_PDEATHSIG = 1


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """When a command that ended is started again. Units: seconds on one monotonic clock.

    An exit with an error soon after the first start means that it cannot start; being killed never does. Too many deaths
    in a window end the trying either way.
    """

    first_started_s: float
    deaths: list[float] = field(default_factory=list[float])

    def pause_s(self, exit_status: int, now_s: float) -> float | None:
        """Seconds until the next start, or None to give up. Negative statuses are signals, as in `subprocess`."""
        failed_at_once = exit_status > 0 and not self.deaths and now_s - self.first_started_s < CANNOT_START_S
        self.deaths = [death for death in self.deaths if now_s - death < DEATHS_WINDOW_S] + [now_s]
        if failed_at_once or len(self.deaths) > MAX_DEATHS:
            return None
        return FIRST_PAUSE_S * 2 ** (len(self.deaths) - 1)


async def keep(arguments: list[str], alone: Callable[[], Awaitable[bool]] | None = None) -> int:
    """Run `fleet ARGUMENTS` until a stop signal; returns the exit status to end with.

    With `alone` given, a stop signal is passed on only once it is true, or after a bounded wait: Redis leaves last, so that
    the others can say goodbye.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    policy = RestartPolicy(first_started_s=loop.time())
    name = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    while True:
        status = await _run_once(arguments, stop, alone)
        if stop.is_set():
            return max(status, 0) if status != -signal.SIGTERM else 0
        if status == 0:
            print(f"fleet: {name} left; start another with `fleet {name}`", flush=True)
            await stop.wait()
            return 0
        pause_s = policy.pause_s(status, loop.time())
        if pause_s is None:
            print(f"fleet: {name} {_how(status)} and is not started again", file=sys.stderr, flush=True)
            return status if status > 0 else 1
        print(f"fleet: {name} {_how(status)}; starting it again", flush=True)
        if await _set_within(stop, pause_s):
            return 0


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


async def _run_once(arguments: list[str], stop: asyncio.Event, alone: Callable[[], Awaitable[bool]] | None) -> int:
    """In a session of its own, so that a signal to our group reaches the command once, from us, and in our order."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fleet.cli", *arguments, start_new_session=True, preexec_fn=_die_with_parent(os.getpid())
    )
    ended = asyncio.create_task(process.wait())
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not ended.done():
        if alone:
            await _linger(alone)
        process.terminate()
    return await ended


async def _linger(alone: Callable[[], Awaitable[bool]]) -> None:
    deadline = asyncio.get_running_loop().time() + LINGER_S
    while asyncio.get_running_loop().time() < deadline and not await alone():
        await asyncio.sleep(LINGER_POLL_S)


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What the child does before it becomes the command: ask Linux to kill it when this process dies, however it dies.

    Without it a killed keeper would leave a command that nobody stops. Other systems have no such request.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask
