"""Work that is repeated on a thread of its own while something is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def polling(work: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call `work` every `interval_s` seconds for the duration of the block."""
    stopped = threading.Event()

    def repeat() -> None:
        while not stopped.wait(interval_s):
            work()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
