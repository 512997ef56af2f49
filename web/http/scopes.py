"""The scope that each route requires of an API key, in one table. An app with a route that is not
in the table does not start. Knows no route's work.
"""

import logging
from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from fleet.config import api_keys
from fleet.config.api_keys import SCOPES
from web.http.callers import ApiCaller, caller_of
from web.http.errors import MissingScope
from web.http.guard import RefuseSocket
from web.http.protocol.abuse import TimedAbuseLog
from web.http.wrong_keys import address_of

log = logging.getLogger("fleet.web")

Required = tuple[api_keys.Scope, ...]
"""Scopes of which a key needs one; () for a route that needs no key."""
SOCKET = "WS"
MAX_SHOWN = 200
_TABLE = """
TALK    POST    /v1/chat/completions
TALK    POST    /v1/completions
TALK    POST    /v1/responses
TALK    GET     /v1/responses/{response_id}
TALK    DELETE  /v1/responses/{response_id}
TALK    GET     /v1/responses/{response_id}/input_items
TALK    POST    /v1/responses/{response_id}/cancel
TALK    POST    /v1/decisions
TALK    POST    /v1/audio/speech
TALK    WS      /v1/audio/speech/stream
TALK    GET     /v1/audio/speech/stream
TALK    POST    /v1/audio/transcriptions
TALK    POST    /v1/audio/translations
TALK    GET     /v1/audio/voices
TALK    GET     /v1/audio/models
TALK    GET     /v1/models
TALK    GET     /v1/models/{model}
TALK    GET     /v1/realtime
TALK    WS      /v1/realtime
OPEN    WS      /v1/telephone/twilio
TALK    POST    /v1/realtime/client_secrets
TALK    POST    /v1/realtime/calls
OWN     POST    /v1/realtime/calls/{call_id}/hangup
TALK    GET     /v1/files
TALK    POST    /v1/files
TALK    GET     /v1/files/{file_id}
TALK    DELETE  /v1/files/{file_id}
TALK    GET     /v1/files/{file_id}/content
TALK    GET     /v1/batches
TALK    POST    /v1/batches
TALK    GET     /v1/batches/{batch_id}
TALK    POST    /v1/batches/{batch_id}/cancel
OWN     GET     /v1/fleet/requests/{request_id}/stream
OWN     DELETE  /v1/fleet/requests/{request_id}
WATCH   GET     /v1/fleet/requests
WATCH   GET     /v1/fleet/kept
WATCH   GET     /v1/fleet/kept/sessions
WATCH   GET     /v1/fleet/requests/{request_id}
WATCH   GET     /v1/fleet/requests/{request_id}/audio
WATCH   GET     /v1/fleet/requests/{request_id}/trace
WATCH   GET     /v1/fleet/requests/{request_id}/bundle
OPERATE POST    /v1/fleet/requests/{request_id}/retry
OPERATE POST    /v1/fleet/requests/{request_id}/pin
OPERATE DELETE  /v1/fleet/requests/{request_id}/pin
OPERATE POST    /v1/fleet/requests/{request_id}/tasks/{stage}/redeliver
WATCH   GET     /v1/fleet/workers
OPERATE POST    /v1/fleet/workers/{worker_id}/{order}
OPERATE PUT     /v1/fleet/roles/{role}
WATCH   GET     /v1/fleet/drafters
OPERATE POST    /v1/fleet/drafters/{stage}/{drafter}
WATCH   GET     /v1/fleet/training
OPERATE POST    /v1/fleet/training/forget
OPERATE POST    /v1/fleet/draft-versions/rollback
OPERATE POST    /v1/fleet/draft-versions/{number}/promote
WATCH   GET     /v1/fleet/queues
WATCH   GET     /v1/fleet/dead-letters
OPERATE POST    /v1/fleet/dead-letters/{request_id}/retry
OPERATE DELETE  /v1/fleet/dead-letters/{request_id}
WATCH   GET     /v1/fleet/transfers
WATCH   GET     /v1/fleet/routes
WATCH   GET     /v1/fleet/series
WATCH   GET     /v1/fleet/journal
WATCH   GET     /v1/fleet/logs
WATCH   GET     /v1/fleet/jobs
OPERATE POST    /v1/fleet/jobs
WATCH   GET     /v1/fleet/jobs/{job_id}
OPERATE DELETE  /v1/fleet/jobs/{job_id}
WATCH   GET     /v1/fleet/jobs/{job_id}/files/{name}
OPERATE POST    /v1/fleet/jobs/{job_id}/retry
OPERATE POST    /v1/fleet/jobs/{job_id}/stop
WATCH   GET     /v1/fleet/sessions
WATCH   GET     /v1/fleet/sessions/{session_id}
WATCH   GET     /v1/fleet/sessions/{session_id}/turns/{number}/speech
OPERATE DELETE  /v1/fleet/sessions/{session_id}
WATCH   GET     /metrics
ANY     GET     /openapi.json
OPEN    GET     /health
OPEN    GET     /ready
OPEN    GET     /console/login
OPEN    POST    /console/login
OPEN    POST    /console/logout
TALK    WS      /console/ws
ANY     WS      /{path}
WATCH   GET     /
WATCH   GET     /docs
WATCH   GET     /now
WATCH   GET     /overview
WATCH   GET     /incidents
WATCH   GET     /incidents/{id}
WATCH   GET     /orders
WATCH   GET     /requests
WATCH   GET     /requests/{id}
WATCH   GET     /requests/{id}/compare
WATCH   GET     /requests/{id}/older
WATCH   GET     /requests/{id}/newer
WATCH   GET     /fleet
WATCH   GET     /workers
WATCH   GET     /workers/{id}
WATCH   GET     /queues
WATCH   GET     /transfers
WATCH   GET     /training
WATCH   GET     /sessions
WATCH   GET     /sessions/{id}
WATCH   GET     /kept
WATCH   GET     /jobs
WATCH   GET     /logs
WATCH   GET     /console/events
WATCH   GET     /console/live/logs
WATCH   GET     /console/live/{key}
"""
_NAMES: dict[str, Required] = {
    "TALK": ("talk",),
    "WATCH": ("watch",),
    "OPERATE": ("operate",),
    "OWN": ("talk", "operate"),
    "ANY": SCOPES,
    "OPEN": (),
}
"""Scopes by the first word of a table row. OWN: `talk` for the key's own answers and calls,
`operate` for answers and calls of other keys; the route compares the names. ANY: every key. OPEN:
no key; a telephone call sends its key once it is connected.
"""
TABLE: dict[tuple[str, str], Required] = {
    (method, path): _NAMES[name]
    for name, method, path in (line.split() for line in _TABLE.strip().splitlines())
}


def scope_of(method: str, path: str) -> Required:
    """Return the scopes of which a key needs one for a route. Raises: AssertionError for a route
    without a row.
    """
    row = (method, path.replace(":path", ""))
    assert row in TABLE, f"web/http/scopes.py: {method} {path} has no row in the table"
    return TABLE[row]


def require_scopes(
    routes: Iterable[BaseRoute], refuse_socket: RefuseSocket, lines: TimedAbuseLog
) -> None:
    """Wrap each route, so that the key's scopes are checked before anything of the request is read.
    `lines` logs refused requests. Raises: AssertionError for a route without a row in the table.
    """
    for route in routes:
        if isinstance(route, Mount):
            assert route.path == "/static", "static files are open"
            continue
        assert isinstance(route, Route | WebSocketRoute)
        methods = {SOCKET} if isinstance(route, WebSocketRoute) else (route.methods or {"GET"})
        required = {method: scope_of(method, route.path) for method in methods - {"HEAD"}}
        route.app = _ScopedApp(route.app, required, refuse_socket, lines)


class _ScopedApp:
    """ASGI app of a route that refuses keys without the scope that the method requires, and logs
    by whose key the fleet is changed.
    """

    def __init__(
        self,
        app: ASGIApp,
        required: Mapping[str, Required],
        refuse_socket: RefuseSocket,
        lines: TimedAbuseLog,
    ) -> None:
        self._app = app
        self._required = required
        self._refuse_socket = refuse_socket
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = SOCKET if scope["type"] == "websocket" else str(scope["method"])
        required = self._required[method if method in self._required else "GET"]
        caller = caller_of(scope)
        if required and (caller is None or not caller.may(*required)):
            error = missing_scope(caller, required, f"{method} {scope['path'][:MAX_SHOWN]}")
            if method == SOCKET:
                await self._refuse_socket(WebSocket(scope, receive, send), error)
                return
            self._lines.note("missing scopes", address_of(scope), error.message)
            raise error
        if caller is not None and caller.name and "operate" in required and method != "GET":
            path, sender = str(scope["path"])[:MAX_SHOWN], address_of(scope)
            log.info("key %s: %s %r, from %s", caller.name, method, path, sender)
        await self._app(scope, receive, send)


def missing_scope(caller: ApiCaller | None, required: Required, what: str) -> MissingScope:
    name = caller.name if caller is not None else ""
    scopes = " or ".join(required)
    return MissingScope(
        f"{what!r} needs the scope {scopes}, which the key {name!r} does not have; use another key "
        "(`fleet keys list` shows their scopes)"
    )
