"""Every failure in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. Knows no route."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleet.core.errors import BadInput, FleetError
from fleet.core.errors import UnsupportedValue as UnsupportedValue
from web.http.unknown_routes import route_refusal

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
    """The request bears no key, or a wrong one."""

    code = "invalid_api_key"
    status = 401


class TooManyWrongKeys(BadInput):
    """The request has a wrong key, as had many earlier requests from the same address."""

    code = "too_many_wrong_keys"
    status = 429

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Forbidden(BadInput):
    """A page of another site made the browser send this."""

    code = "cross_site_request"
    status = 403


class ForeignHost(BadInput):
    """The gateway is asked for by a name that is not its own."""

    code = "host_not_allowed"
    status = 421


class ReadOnly(BadInput):
    """The gateway lets people look and talk, and changes nothing of the fleet."""

    code = "read_only"
    status = 403


class SessionEnded(BadInput):
    """An operator ended the voice session."""

    code = "session_ended"
    status = 410


class SessionExpired(BadInput):
    """The voice session has lasted as long as any may. Code and wording are those of OpenAI's service."""

    code = "session_expired"


class SessionIdle(BadInput):
    """The client of the voice session has sent nothing for so long."""

    code = "session_idle"


class UnservedRoute(UnsupportedValue):
    """A route that OpenAI's API has and this server has not."""

    status = 404


def envelope_of(error: FleetError) -> ErrorEnvelope:
    """A failure of ours says only that it is ours: what went wrong inside is for the log."""
    body = ErrorBody(message=error.message, type=type_of(error.status), param=error.param, code=error.code)
    return ErrorEnvelope(body)


def type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def error_response(
    envelope: ErrorEnvelope, status: int, headers: Mapping[str, str] | None = None, *, retry_after_s: int = 1
) -> Response:
    extra = {"retry-after": str(retry_after_s)} if status in (429, 503) else {}
    if status == HTTPStatus.UNAUTHORIZED:
        extra["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(envelope), status, media_type="application/json", headers={**extra, **(headers or {})})


def internal_error_response() -> Response:
    body = ErrorBody(message="the server failed; its log tells why", type="server_error", code="server_error")
    return error_response(ErrorEnvelope(body), 500)


async def on_fleet_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, FleetError)
    if error.status >= 500 and not error.retryable:
        log.error("request failed: %s: %s", error.code, error.message)
    return error_response(envelope_of(error), error.status, retry_after_s=error.retry_after_s)


async def on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    code, reason = _CODES.get(error.status_code, "http_error"), error.detail
    allowed = Headers(error.headers).get("allow")
    if error.status_code == HTTPStatus.NOT_FOUND:
        code, advice = route_refusal(request.url.path)
        reason = f"no such route; {advice}" if advice else "no such route"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
        reason = f"this route takes {allowed} only"
    path = request.url.path[:MAX_SHOWN_PATH]
    body = ErrorBody(message=f"{request.method} {path}: {reason}", type=type_of(error.status_code), code=code)
    return error_response(ErrorEnvelope(body), error.status_code, error.headers)
