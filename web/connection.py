"""Reading a bounded body, sending events, and stopping work when the client leaves. Knows no route."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import BadInput, InputTooLarge
from web.body_memory import held_bodies

log = logging.getLogger("fleet.web")

T = TypeVar("T")
PING_S = 15.0
"""A line this often keeps proxies from closing a stream whose first words are slow."""
PING = b" \n"
"""Readers of server-sent events ignore it, as a field of an unknown name. Load tools, which read every line by itself, skip it
as empty, and would take a comment for JSON. A blank line would end an event, even an empty one, for some clients (openai's).
"""


_STALLED_KEY = "fleet_client_stalled"


def set_stalled(scope: Scope) -> None:
    """Note that the connection of this request ends because its client reads nothing."""
    scope["state"][_STALLED_KEY] = True


def is_stalled(scope: Scope) -> bool:
    """Return True if the client was disconnected because it read nothing, rather than having left."""
    return bool(scope["state"].get(_STALLED_KEY, False))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises: InputTooLarge as soon as the body is known to be too long; BodiesTooLarge; ClientDisconnect."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit():
        raise BadInput("content-length: not a number")
    if int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    held = held_bodies(request.scope)
    async for piece in request.stream():
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        held.take(len(piece))
        body += piece
    return bytes(body)


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


async def send_stream(send: Send, headers: dict[str, str], lines: AsyncIterator[bytes]) -> None:
    """Send server-sent events, and `PING` in every silence of `PING_S`."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    fixed = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": [*fixed, *raw]})
    # a shielded wait: a timeout must not cancel the step of the answer that it waits for
    pending = asyncio.ensure_future(anext(lines, None))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=PING_S)
            line = pending.result() if done else PING
            if line is None:
                break
            await send({"type": "http.response.body", "body": line, "more_body": True})
            if done:
                pending = asyncio.ensure_future(anext(lines, None))
    finally:
        pending.cancel()
        await asyncio.wait({pending})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> InputTooLarge:
    return InputTooLarge(f"the body is larger than {max_bytes} bytes, this server's limit")
