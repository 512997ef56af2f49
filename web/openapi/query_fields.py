"""Middleware that refuses query parameters which a route does not read: a misspelled filter would
list the wrong rows.

`OPERATIONS` lists the parameters of each route. Knows no value.
"""

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fleet.core.errors import SHOWN_CHARS, UnsupportedValue
from web.http.errors import refusal_response
from web.openapi.operations import OPERATIONS

PREFIX = "/v1/"
IGNORED: dict[str, str] = {
    "api-version": "names the version of Azure's API; the routes here have one"
}
"""Parameters that every route accepts -> the reason why they change no answer."""
_ROUTES = [
    (op.method, re.compile(re.sub(r"{\w+}", "[^/]+", op.path) + "/?"), frozenset(op.query))
    for op in OPERATIONS
    if op.statuses and op.path.startswith(PREFIX)
]


class QueryFields:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        error = unread_parameter(Request(scope)) if is_api and scope["query_string"] else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await refusal_response(error)(scope, receive, send)


def unread_parameter(request: Request) -> UnsupportedValue | None:
    """Return the refusal of the first non-empty query parameter that the route does not read; None
    if there is none, or the route is unknown.
    """
    known = next(
        (
            names
            for method, path, names in _ROUTES
            if method == request.method and path.fullmatch(request.url.path)
        ),
        None,
    )
    if known is None:
        return None
    for name, value in request.query_params.multi_items():
        if value and name not in known and name not in IGNORED:
            shown = name[:SHOWN_CHARS]
            advice = (
                f"use one of {', '.join(sorted(known))}"
                if known
                else "send the fields of a request in its body"
            )
            return UnsupportedValue(
                f"{shown}: this route has no such query parameter; {advice}", param=shown
            )
    return None
