"""Refusal of WebSockets, with failures as `error` events.

Clients do not show the body of a refused handshake. A refused socket is therefore accepted, sent
one `error` event and closed with the reason. Knows no session.
"""

import asyncio
import logging

from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from fleet.core.errors import FleetError
from web.http.errors import TooManyWrongKeys, error_type, status_of
from web.http.protocol.abuse import TimedAbuseLog
from web.http.wrong_keys import address_of
from web.realtime.protocol.server_events import Error, ErrorDetail, encode_event

log = logging.getLogger("fleet.web")

UNAUTHORIZED = 3000
"""Close code for a wrong key, as OpenAI's service uses it (registered at IANA). Clients do not
reconnect.
"""
INVALID_REQUEST = 4000
"""Close code for an invalid request, as OpenAI's service uses it for a wrong model. Clients do not
reconnect.
"""
SESSION_UNKNOWN = 1008
"""Close code for a session that does not exist. The console's page opens a new session."""
TRY_AGAIN_LATER = 1013
"""Close code after which clients reconnect after a while. Also for a client secret at its session
limit, since a lost connection counts as open until its ping times out.
"""
INTERNAL_ERROR = 1011
SESSION_OVER = 1000
"""Close code for a session that was ended by an operator, or was idle for too long. Clients do not
reconnect.
"""
SESSION_EXPIRED = 1001
"""Close code for a session at its maximum duration, as OpenAI's service uses it. Clients open a new
session.
"""
BY_CODE = {
    "not_found": SESSION_UNKNOWN,
    "rate_limit_exceeded": TRY_AGAIN_LATER,
    "redis_unreachable": TRY_AGAIN_LATER,
    "session_ended": SESSION_OVER,
    TooManyWrongKeys.code: UNAUTHORIZED,
    "session_idle": SESSION_OVER,
    "session_expired": SESSION_EXPIRED,
    "secret_in_use": TRY_AGAIN_LATER,
}
UNAUTHORIZED_STATUSES = (401, 403, 421)

MAX_REASON_BYTES = 123
"""Maximum size of the reason in a close frame. Source: RFC 6455 section 5.5, less two bytes for the
close code.
"""
MAX_LOGGED = 300
REFUSE_S = 5.0
"""Seconds after which a refused client that does not read is disconnected."""


def close_code(error: FleetError) -> int:
    if status_of(error) in UNAUTHORIZED_STATUSES:
        return UNAUTHORIZED
    return BY_CODE.get(error.code, INVALID_REQUEST if status_of(error) < 500 else INTERNAL_ERROR)


def close_reason(error: FleetError) -> str:
    """Return the reason to send with the close of a WebSocket: OpenAI's `type.code`, then the
    message.
    """
    return f"{error_type(error)}.{error.code}: {error.message}"


def clipped_reason(reason: str) -> str:
    """Return the reason cut to `MAX_REASON_BYTES`."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


def error_event(error: FleetError, event_id: str | None = None) -> Error:
    """Return the `error` event of a failure; `event_id` is the client's id of the event that
    failed.
    """
    detail = ErrorDetail(
        type=error_type(error),
        code=error.code,
        message=error.message,
        param=error.param,
        event_id=event_id,
    )
    return Error(error=detail)


def log_refusal(lines: TimedAbuseLog, scope: Scope, error: FleetError) -> None:
    """Log a refused WebSocket, except for TooManyWrongKeys, which `WrongKeys` counts. Query and
    headers are left out, since they may contain a key.
    """
    if isinstance(error, TooManyWrongKeys):  # `WrongKeys` counts these
        return
    path, message = scope["path"][:MAX_LOGGED], error.message[:MAX_LOGGED]
    reason = f"refused the WebSocket {path!r}: {error.code}: {message}"
    lines.note(f"refused WebSockets ({error.code})", address_of(scope), reason)


async def refuse_socket(websocket: WebSocket, error: FleetError, lines: TimedAbuseLog) -> None:
    """Accept a WebSocket that is refused, send the error, and close it. `lines` logs the
    refusal.
    """
    log_refusal(lines, websocket.scope, error)
    try:
        async with asyncio.timeout(REFUSE_S):
            await accept(websocket)
            await websocket.send_text(encode_event(error_event(error)))
            await websocket.close(close_code(error), clipped_reason(close_reason(error)))
    except (TimeoutError, WebSocketDisconnect, RuntimeError) as gone:
        # Starlette raises RuntimeError once it has seen the disconnect.
        log.debug("a refused client disconnected before it was sent the reason: %s", gone)


async def accept(websocket: WebSocket) -> None:
    """Accept a WebSocket with the subprotocol that the client offered; otherwise a browser drops
    the connection before it reads.
    """
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
