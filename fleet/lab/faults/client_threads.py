"""Load clients, each on its own thread, so that the fleet is measured and not an event loop of the
load generator. Sends no requests itself.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ClientThreads:
    """Threads of load clients; client `number`, counted from 0, runs `run(number)`.

    `finishing`: set when clients shall begin nothing more. `cancelled`: set when clients shall stop
    immediately. `ended`: numbers of the clients that have returned without an error.
    """

    def __init__(self) -> None:
        self.finishing = threading.Event()
        self.cancelled = threading.Event()
        self.ended: set[int] = set()
        self._threads: list[threading.Thread] = []

    def start(self, count: int, run: Callable[[int], object]) -> None:
        def run_to_end(number: int) -> None:
            run(number)
            self.ended.add(number)

        # Daemons: a client whose answer never ends must not keep the command from ending.
        self._threads = [
            threading.Thread(target=run_to_end, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def running(self, count: int, run: Callable[[int], object]) -> Iterator[None]:
        """Run `run(number)` for each of `count` clients during the block, and set `finishing` at
        its end.
        """
        self.start(count, run)
        try:
            yield
        finally:
            self.finishing.set()

    def join(self, timeout_s: float) -> None:
        """Wait until all clients have ended, for at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def is_alive(self, number: int | None = None) -> bool:
        """Return True while client `number` runs; without `number`, while any client runs."""
        threads = self._threads if number is None else [self._threads[number]]
        return any(thread.is_alive() for thread in threads)
