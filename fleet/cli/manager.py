"""honcho's process manager, safe to stop at any moment and able to name the process whose end ended the others.

It builds on the internals of honcho 2 (`_start`, `_processes`), which `pyproject.toml` pins to that major version.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from honcho.manager import Manager
from honcho.printer import Printer


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


class FleetManager(Manager):
    """`culprit` is the first process that ended by itself; None when a signal ended them all.

    honcho 2.0 fails on a signal that arrives before every process has reported its pid, so that signal is kept until then.
    """

    _processes: dict[str, dict[str, Any]]

    def __init__(self, when_started: Callable[[], None]) -> None:
        super().__init__(OpenEndedPrinter(self.terminate))
        self.culprit: str | None = None
        self._when_started = when_started
        self._stop_when_started = False

    def _start(self) -> None:
        super()._start()
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

    def terminate(self) -> None:
        if not self._all_started():
            self._stop_when_started = True
            return
        if not self._terminating:
            self.culprit = next((name for name, process in self._processes.items() if "returncode" in process), None)
        super().terminate()
