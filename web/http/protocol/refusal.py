"""Answers of the connection layer to requests that reach no route: OpenAI's error envelope, then
the connection ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from web.http.errors import ErrorBody, ErrorEnvelope, type_of
from web.http.protocol.bounds import MAX_FIELDS, MAX_HEAD_BYTES, MAX_PIPELINED, MAX_URL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRefusal:
    """`kind`: refusals of one kind are counted together in the log."""

    status: int
    code: str
    kind: str
    message: str

    def response(self, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        body = msgspec.json.encode(
            ErrorEnvelope(
                ErrorBody(message=self.message, type=type_of(self.status), code=self.code)
            )
        )
        status = HTTPStatus(self.status)
        lines = [b"HTTP/1.1 %d %s" % (self.status, status.phrase.encode())]
        lines += [name + b": " + value for name, value in default_headers]
        lines += [
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            lines.append(b"retry-after: 1")
        return b"\r\n".join([*lines, b"", body])


MALFORMED = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="malformed requests",
    message="what was sent is not a valid HTTP request",
)
NOT_ONE_HOST = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="requests without exactly one Host",
    message="the request has no Host field, or several; send exactly one",
)
INVALID_HOST = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="requests with an invalid Host",
    message="the Host field is not a name or address with an optional port",
)
INVALID_TARGET = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="requests with an invalid target",
    message="the request's target is neither a path nor the address of an http server",
)
NO_PROXY = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="requests for a tunnel",
    message="CONNECT is refused: this server is not a proxy",
)
UNKNOWN_CODING = ConnectionRefusal(
    status=501,
    code="bad_request",
    kind="requests with an unknown transfer coding",
    message="the only transfer coding served is chunked; send the body uncompressed",
)
VERSION = ConnectionRefusal(
    status=505,
    code="bad_request",
    kind="requests of other versions of HTTP",
    message="this server speaks HTTP/1.1 and HTTP/1.0 only",
)
LONG_URL = ConnectionRefusal(
    status=414,
    code="url_too_long",
    kind="requests with too long a URL",
    message=f"the URL is longer than {MAX_URL_BYTES} bytes; send large input in the body",
)
LARGE_HEAD = ConnectionRefusal(
    status=431,
    code="header_too_large",
    kind="requests with too large a head",
    message=f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send fewer or shorter "
    "header fields",
)
MANY_FIELDS = ConnectionRefusal(
    status=431,
    code="header_too_large",
    kind="requests with too many header fields",
    message=f"the request has more than {MAX_FIELDS} header fields; send fewer",
)
MUCH_FRAMING = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="chunked bodies that are mostly not content",
    message="the chunked body has too many bytes of chunk extensions or trailer fields; leave "
    "them out",
)
PIPELINED = ConnectionRefusal(
    status=429,
    code="rate_limit_exceeded",
    kind="connections with too many pipelined requests",
    message=f"more than {MAX_PIPELINED} requests wait on this connection; read the answers first",
)
UPGRADE_TOO_SOON = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="upgrades within a request",
    message="a WebSocket was asked for before the answer to the request before it had ended; "
    "use another connection",
)
LONG_WEBSOCKET_URL = ConnectionRefusal(
    status=414,
    code="url_too_long",
    kind="WebSockets with too long a URL",
    message="the URL of the WebSocket is longer than 8 KiB; send settings in events once it is "
    "open",
)
LARGE_WEBSOCKET_HEAD = ConnectionRefusal(
    status=431,
    code="header_too_large",
    kind="WebSockets with too large a header field",
    message="a header field of the WebSocket's request is longer than 8 KiB; send a shorter one",
)
BAD_HANDSHAKE = ConnectionRefusal(
    status=400,
    code="bad_request",
    kind="malformed WebSocket handshakes",
    message="the request for a WebSocket is not a valid handshake, or has a body",
)
FULL = ConnectionRefusal(
    status=503,
    code="overloaded",
    kind="connections beyond the bound",
    message="this server has as many connections as it may have (web.max_connections, "
    "web.max_connections_per_address); "
    "try again shortly",
)


def slow_head(timeout_s: float) -> ConnectionRefusal:
    return ConnectionRefusal(
        status=408,
        code="request_timeout",
        kind="requests whose head did not arrive in time",
        message=f"the request's head did not arrive within {timeout_s:g} s (web.header_timeout_s)",
    )


def slow_body(timeout_s: float) -> ConnectionRefusal:
    return ConnectionRefusal(
        status=408,
        code="request_timeout",
        kind="requests whose body did not arrive in time",
        message=f"the request's body came too slowly, or not at all, for {timeout_s:g} s "
        "(web.body_timeout_s)",
    )
