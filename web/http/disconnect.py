"""Cancels the work of a request when its client disconnects. Knows no route."""

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
    """Note that the connection of this request ends because its client reads nothing."""
    scope["state"][_STALLED_KEY] = True


def is_stalled(scope: Scope) -> bool:
    """Return True if the client was disconnected because it read nothing, rather than having left."""
    return bool(scope["state"].get(_STALLED_KEY, False))


async def until_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Run `work`, cancelling it (and waiting for its clean-up) when the client goes away.

    The body must have been read: whatever still arrives is dropped.
    Raises: ClientDisconnect, and whatever `work` raises.
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
        # looked at here, or a failure that came together with the disconnect would be reported as never retrieved
        if not working.cancelled() and (error := working.exception()) is not None:
            log.debug("the work of a request ended with %r", error)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
