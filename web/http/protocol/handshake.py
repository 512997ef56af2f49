"""TLS on a connection that was accepted without it, so that it is counted and timed before its handshake is over."""

import asyncio
import ssl
from collections.abc import Awaitable, Coroutine, Generator
from types import coroutine
from typing import Any


def begin_tls(
    loop: asyncio.AbstractEventLoop,
    transport: asyncio.Transport,
    protocol: asyncio.Protocol,
    tls: ssl.SSLContext,
    timeout_s: float,
) -> Awaitable[asyncio.Transport | None]:
    """Begin the handshake, and return what to await for its end. To be called within `connection_made`.

    uvloop reads from the socket right after `connection_made`, so a task would begin too late: the client's first bytes would
    go to the protocol, and not to TLS. Raises, when awaited: OSError (also for TLS errors and the time-out).
    """
    handshake = loop.start_tls(transport, protocol, tls, server_side=True, ssl_handshake_timeout=timeout_s)
    return _rest_of(handshake, handshake.send(None))


@coroutine
def _rest_of(begun: Coroutine[Any, Any, asyncio.Transport | None], awaited: Any) -> Generator[Any, Any, asyncio.Transport | None]:
    """Continue a coroutine whose first step was made already and awaits something."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # a cancellation of the task goes to the coroutine, as it would without this function
            step, given = begun.throw, error
        else:
            step, given = begun.send, None
        try:
            awaited = step(given)  # pyright: ignore[reportArgumentType, reportCallIssue]
        except StopIteration as end:
            return end.value
