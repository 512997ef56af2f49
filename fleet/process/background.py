"""Background tasks of an event loop, none of which ends by an unexpected exception unnoticed."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

RESTART_S = 1.0


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run work whose result no task awaits. An exception is logged with its stack. `name`: name of
    the work in the log.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: _log_failure(ended, name))
    return task


def keep_running(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, *, pause_s: float = RESTART_S
) -> asyncio.Task[None]:
    """Run endless work, and start it again after an exception, which is logged with its stack. The
    task ends when `work` returns.
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
