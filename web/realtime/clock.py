"""Time of the voice sessions: one clock for deadlines, playback and timers, which tests replace by
a clock that they advance.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """The monotonic clock and the timers of the running event loop. Units: seconds."""

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await self.wait(asyncio.Event(), delay_s)

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        """Wait for an event; return False if `timeout_s` pass before it is set. With the time-out
        None, wait without limit.
        """
        if timeout_s is None:
            return await event.wait()
        try:
            async with asyncio.timeout(None) as bound:
                timer = self.call_later(timeout_s, lambda: bound.reschedule(0.0))
                try:
                    return await event.wait()
                finally:
                    timer.cancel()
        except TimeoutError:
            return False
