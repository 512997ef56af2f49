"""Errors as HTTP responses in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.
Knows no route.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleet.core import errors
from fleet.core.errors import BadInput, FleetError, Overloaded, UnsupportedValue
from web.http.unknown_routes import advice_for_path

log = logging.getLogger("fleet.web")

MAX_SHOWN_PATH = 200
_CODES = {405: "method_not_allowed", 413: "input_too_large"}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class Unauthorized(BadInput):
    """Error: the request has no API key, or a wrong key."""

    code = "invalid_api_key"


class TooManyWrongKeys(BadInput):
    """The request has a wrong key, like many earlier requests from the same address."""

    code = "too_many_wrong_keys"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Forbidden(BadInput):
    """A browser sent the request for a page of another site."""

    code = "cross_site_request"


class MissingScope(BadInput):
    """The request's API key is valid, and does not have the scope that the route requires."""

    code = "missing_scope"


class ForeignHost(BadInput):
    """The Host header has a name that is not the gateway's."""

    code = "host_not_allowed"


class ReadOnly(BadInput):
    """The gateway is read-only: it refuses changes of the fleet."""

    code = "read_only"


class SessionEndedByOperator(BadInput):
    """An operator ended the voice session."""

    code = "session_ended"


class SessionExpired(BadInput):
    """The voice session has reached its maximum duration. Code and wording are OpenAI's."""

    code = "session_expired"


class SessionIdle(BadInput):
    """The client of the voice session has sent nothing for `voice.idle_s`."""

    code = "session_idle"


class BodiesTooLarge(Overloaded):
    """The bodies of all running requests together have reached their memory limit."""

    code = "overloaded"


class UpgradeRequired(BadInput):
    code = "upgrade_required"


class UnknownSocket(BadInput):
    """No WebSocket is served at this path. The code is not `not_found`, which means an ended
    session.
    """

    code = "unknown_url"


REFUSALS = {
    error.code
    for error in (
        BadInput,
        errors.InputTooLarge,
        errors.ContextLengthExceeded,
        UnsupportedValue,
        Overloaded,
        errors.NoWorker,
    )
}
"""Codes of the errors that refuse a request before the fleet admits it."""
STATUSES: dict[type[FleetError], int] = {
    BadInput: 400,
    errors.ContextLengthExceeded: 400,
    errors.OutOfPages: 400,
    Unauthorized: 401,
    Forbidden: 403,
    MissingScope: 403,
    ReadOnly: 403,
    errors.ModelNotFound: 404,
    errors.NotFound: 404,
    UnknownSocket: 404,
    errors.Aborted: 409,
    errors.Conflict: 409,
    errors.ResumedElsewhere: 409,
    SessionEndedByOperator: 410,
    errors.InputTooLarge: 413,
    ForeignHost: 421,
    UpgradeRequired: 426,
    Overloaded: 429,
    errors.SecretInUse: 429,
    TooManyWrongKeys: 429,
    BodiesTooLarge: 503,
    errors.GatewayStopping: 503,
    errors.NoWorker: 503,
    errors.OutOfMemory: 503,
    errors.RedisUnreachable: 503,
    errors.TransferError: 503,
    errors.WorkerLost: 503,
}
"""HTTP status of each error class. A class that is not listed has the status of its base class,
otherwise 500.
"""


def status_of(error: FleetError) -> int:
    return next((STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES), 500)


def envelope_of(error: FleetError) -> ErrorEnvelope:
    body = ErrorBody(
        message=error.message, type=error_type(error), param=error.param, code=error.code
    )
    return ErrorEnvelope(body)


def type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def error_type(error: FleetError) -> str:
    return type_of(status_of(error))


def error_response(
    envelope: ErrorEnvelope,
    status: int,
    headers: Mapping[str, str] | None = None,
    *,
    retry_after_s: int = 1,
) -> Response:
    extra = {"retry-after": str(retry_after_s)} if status in (429, 503) else {}
    if status == HTTPStatus.UNAUTHORIZED:
        extra["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(envelope),
        status,
        media_type="application/json",
        headers={**extra, **(headers or {})},
    )


def internal_error_response() -> Response:
    body = ErrorBody(
        message="the server failed; its log has the reason",
        type="server_error",
        code="server_error",
    )
    return error_response(ErrorEnvelope(body), 500)


def refusal_response(error: FleetError, headers: Mapping[str, str] | None = None) -> Response:
    return error_response(
        envelope_of(error), status_of(error), headers, retry_after_s=error.retry_after_s
    )


async def on_fleet_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, FleetError)
    if status_of(error) >= 500 and not error.retryable:
        log.error("request failed: %s: %s", error.code, error.message)
    return refusal_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the response to an error of Starlette's router: unknown path, wrong method.

    Known routes that are not served are refused with 400: from 404, proxies conclude that the model
    is gone, and send no more requests for a while.
    """
    assert isinstance(error, HTTPException)
    status, reason = error.status_code, error.detail
    code = _CODES.get(status, "http_error")
    allowed = Headers(error.headers).get("allow")
    if status == HTTPStatus.NOT_FOUND:
        code, advice = advice_for_path(request.url.path)
        status = HTTPStatus.BAD_REQUEST if code == UnsupportedValue.code else status
        reason = f"no such route; {advice}" if advice else "no such route"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
        reason = f"this route takes {allowed} only"
    path = request.url.path[:MAX_SHOWN_PATH]
    body = ErrorBody(message=f"{request.method} {path}: {reason}", type=type_of(status), code=code)
    return error_response(ErrorEnvelope(body), status, error.headers)
