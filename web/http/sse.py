"""Server-sent events: encoding, and a response that sends them. Knows no event of any route."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.types import Send

PING_S = 15.0
"""Interval of the pings that keep proxies from closing a silent stream."""
PING = b" \n"
"""Ping of a silent stream, as a line that clients skip: event stream parsers ignore it as a field
of unknown name, load tools that read single lines as empty; the usual comment would be parsed by
such tools as JSON. No blank line follows, since it would end an event, even an empty one, for some
clients (openai's).
"""
_encode = msgspec.json.Encoder().encode


def event(value: msgspec.Struct) -> bytes:
    """Encode a struct as one server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: msgspec.Struct) -> bytes:
    """Encode a struct as one server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(value)


async def send_stream(send: Send, headers: dict[str, str], lines: AsyncIterator[bytes]) -> None:
    """Send a response of server-sent events, and `PING` after every `PING_S` without an event.
    `lines` yields encoded events.
    """
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    fixed = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": [*fixed, *raw]})
    # wait() and not wait_for(): a time-out must not cancel the pending step of the answer
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
