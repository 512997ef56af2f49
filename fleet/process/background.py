"""Background tasks of an event loop, with logging of their unexpected exceptions, and thread pools
of constant size.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)

RESTART_S = 1.0
_running: set[asyncio.Task[None]] = set()
"""Started tasks until they end: an event loop itself refers to tasks only weakly."""


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start `work` as a task whose result nobody awaits. An exception is logged with its stack.
    `name`: name of the work in the log.
    """
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    task.add_done_callback(lambda ended: _log_failure(ended, name))
    return task


def keep_running(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, *, pause_s: float = RESTART_S
) -> asyncio.Task[None]:
    """Start endless work as a task. After an exception, which is logged with its stack, pause
    `pause_s` seconds and call `work` again. The task ends when `work` returns. `name`: name of the
    work in the log.
    """
    return asyncio.create_task(_keep_running(work, name, pause_s))


async def _keep_running(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, pause_s: float
) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed; it starts again in %g s", name, pause_s)
            await asyncio.sleep(pause_s)
        else:
            return


def _log_failure(task: asyncio.Task[None], name: str) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s failed", name, exc_info=error)


def full_thread_pool(size: int, name: str) -> ThreadPoolExecutor:
    """Return a thread pool whose `size` threads are all started: a burst starts no further thread,
    so that a growing number of threads means a leak.
    """
    pool = ThreadPoolExecutor(size, thread_name_prefix=name)
    together = threading.Barrier(size + 1)
    for _ in range(size):
        pool.submit(together.wait)
    together.wait()
    return pool
