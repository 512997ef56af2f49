"""A clock that stands still until a test advances it, from any thread."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from web.realtime.clock import Clock

START_S = 1000.0


@dataclass(slots=True, eq=False)
class ManualTimer:
    due: float
    loop: asyncio.AbstractEventLoop
    callback: Callable[[], object]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def fire(self) -> None:
        if not self.is_cancelled:
            self.callback()


class ManualClock(Clock):
    def __init__(self) -> None:
        self._now = START_S
        self._timers: list[ManualTimer] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> ManualTimer:
        timer = ManualTimer(self._now + delay_s, asyncio.get_running_loop(), callback)
        with self._lock:
            self._timers.append(timer)
            self._fire_due()
        return timer

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`; timers that are due fire in their event loops."""
        with self._lock:
            self._now += seconds
            self._fire_due()

    def _fire_due(self) -> None:
        due = [timer for timer in self._timers if timer.due <= self._now]
        self._timers = [
            timer for timer in self._timers if timer.due > self._now and not timer.is_cancelled
        ]
        for timer in sorted(due, key=lambda timer: timer.due):
            timer.loop.call_soon_threadsafe(timer.fire)
