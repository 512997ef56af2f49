"""TLS handshake of an accepted connection, begun by hand so that the connection is counted and
timed before the handshake ends.
"""

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
    """Begin the TLS handshake of a new connection. The result, when awaited, is the TLS transport,
    or None if the connection was lost. Must be called in `connection_made`.

    A task would begin too late: uvloop reads from the socket right after `connection_made`, and the
    client's first bytes would go to the protocol instead of TLS. Raises, when awaited: OSError
    (also for TLS errors and the time-out).
    """
    handshake = loop.start_tls(
        transport, protocol, tls, server_side=True, ssl_handshake_timeout=timeout_s
    )
    return _rest_of(handshake, handshake.send(None))


@coroutine
def _rest_of(
    begun: Coroutine[Any, Any, asyncio.Transport | None], awaited: Any
) -> Generator[Any, Any, asyncio.Transport | None]:
    """Run the rest of the coroutine `begun`, whose first step, already done, returned `awaited`."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # a cancellation of the task is passed to the coroutine
            step, value = begun.throw, error
        else:
            step, value = begun.send, None
        try:
            awaited = step(value)  # pyright: ignore[reportArgumentType, reportCallIssue]
        except StopIteration as end:
            return end.value
