"""Compression (gzip) of what browsers and operators read: pages, JSON and live pages' streams.

Answers to POST, audio and the API's event streams are sent as they are: they are small, do not
shrink, or must not wait. Pages hold the CSRF token masked anew in each response
(`web/http/csrf_mask.py`), so that the length of a response tells nothing about it (BREACH); no
other secret is in the answer to a GET.
"""

from starlette.datastructures import Headers
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

LEVEL = 5
THREAD_BYTES = 64 * 1024
"""Size from which a piece of a response is compressed in a thread; smaller pieces take at most 2 ms
in the event loop.
"""
STREAMS = "/console/"
"""Path below which event streams are compressed, each event flushed at once."""
EVENT_STREAM = "text/event-stream"


class Compression:
    """ASGI middleware that compresses responses to GET for clients that accept gzip."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._others = GZipMiddleware(app, compresslevel=LEVEL, thread_minimum_size=THREAD_BYTES)
        self._streams = GZipMiddleware(
            app,
            compresslevel=LEVEL,
            thread_minimum_size=THREAD_BYTES,
            exclude_content_types=tuple(
                kind for kind in DEFAULT_EXCLUDED_CONTENT_TYPES if kind != EVENT_STREAM
            ),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] == "GET" and _accepts_gzip(scope):
            app = self._streams if scope["path"].startswith(STREAMS) else self._others
        await app(scope, receive, send)


def _accepts_gzip(scope: Scope) -> bool:
    """Return True if the client's Accept-Encoding has gzip with a weight other than 0."""
    for offer in Headers(scope=scope).get("accept-encoding", "").lower().split(","):
        name, _, weight = (part.strip() for part in offer.partition(";"))
        if name == "gzip":
            return weight.replace(" ", "").rstrip("0").rstrip(".") not in ("q=", "q=0")
    return False
