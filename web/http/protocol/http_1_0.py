"""Answers to HTTP/1.0 clients, which do not support chunked bodies: the end of the connection ends
an answer.

Source: RFC 9112 section 6.1.
"""

from functools import partial

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HTTP_1_0 = "1.0"


class WithoutChunks:
    """ASGI wrapper that makes uvicorn's `cycle` send a streamed answer without chunk sizes.

    Uvicorn closes the connection of an HTTP/1.0 client after any answer.
    """

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._is_open_ended = False
        """True once an answer has begun that does not declare its length."""

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        await self._app(scope, receive, partial(self._send, send))

    async def _send(self, send: ASGISendCallable, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", [])):
                self._cycle.chunked_encoding = False
                self._is_open_ended = True
        elif message["type"] == "http.response.body" and self._is_open_ended:
            # to uvicorn, each piece is as long as announced
            self._cycle.expected_content_length = len(message.get("body", b""))
        await send(message)
