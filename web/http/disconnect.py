"""Cancellation of a request's work when its client disconnects. Knows no route."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

log = logging.getLogger("fleet.web")

T = TypeVar("T")
_STALLED_KEY = "fleet_client_stalled"


def set_stalled(scope: Scope) -> None:
    """Record that the connection of this request is closed because its client does not read."""
    scope["state"][_STALLED_KEY] = True


def is_stalled(scope: Scope) -> bool:
    """Return True if the gateway closed the connection because the client did not read."""
    return bool(scope["state"].get(_STALLED_KEY, False))


async def until_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Run `work` until its end. If the client disconnects first, cancel `work` and wait for its
    clean-up.

    The body must have been read before the call, since further input is dropped. Raises:
    ClientDisconnect, and the errors of `work`.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})
        # retrieve the error of work that failed as the client disconnected, or asyncio would report
        # it as never retrieved
        if not working.cancelled() and (error := working.exception()) is not None:
            log.debug("the work of a request ended with %r", error)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
