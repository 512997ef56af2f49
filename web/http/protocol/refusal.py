"""Answers of the connection layer to requests that reach no route, in OpenAI's error shape. The
connection ends after the answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from web.http.errors import ErrorBody, ErrorEnvelope, type_of
from web.http.protocol.bounds import MAX_FIELDS, MAX_HEAD_BYTES, MAX_PIPELINED, MAX_URL_BYTES


@dataclass(frozen=True, slots=True)
class ConnectionRefusal:
    """Refusal of a request by the connection layer. `code` and `message` go to the client; `kind`
    names the refusal in the log, which counts refusals of each kind.
    """

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


_BAD, _LARGE = "bad_request", "header_too_large"

MALFORMED = ConnectionRefusal(
    400, _BAD, "malformed requests", "what was sent is not a valid HTTP request"
)
NOT_ONE_HOST = ConnectionRefusal(
    400,
    _BAD,
    "requests without exactly one Host",
    "the request has no Host field, or several; send exactly one",
)
INVALID_HOST = ConnectionRefusal(
    400,
    _BAD,
    "requests with an invalid Host",
    "the Host field is not a name or address with an optional port",
)
INVALID_TARGET = ConnectionRefusal(
    400,
    _BAD,
    "requests with an invalid target",
    "the request's target is neither a path nor the address of an http server",
)
NO_PROXY = ConnectionRefusal(
    400, _BAD, "requests for a tunnel", "CONNECT is refused: this server is not a proxy"
)
UNKNOWN_CODING = ConnectionRefusal(
    501,
    _BAD,
    "requests with an unknown transfer coding",
    "the only transfer coding served is chunked; send the body uncompressed",
)
VERSION = ConnectionRefusal(
    505, _BAD, "requests of other versions of HTTP", "this server speaks HTTP/1.1 and HTTP/1.0 only"
)
LONG_URL = ConnectionRefusal(
    414,
    "url_too_long",
    "requests with too long a URL",
    f"the URL is longer than {MAX_URL_BYTES} bytes; send large input in the body",
)
LARGE_HEAD = ConnectionRefusal(
    431,
    _LARGE,
    "requests with too large a head",
    f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send fewer or shorter "
    "header fields",
)
MANY_FIELDS = ConnectionRefusal(
    431,
    _LARGE,
    "requests with too many header fields",
    f"the request has more than {MAX_FIELDS} header fields; send fewer",
)
MUCH_FRAMING = ConnectionRefusal(
    400,
    _BAD,
    "chunked bodies that are mostly not content",
    "the chunked body has too many bytes of chunk extensions or trailer fields; leave them out",
)
PIPELINED = ConnectionRefusal(
    429,
    "rate_limit_exceeded",
    "connections with too many pipelined requests",
    f"more than {MAX_PIPELINED} requests wait on this connection; read the answers first",
)
UPGRADE_TOO_SOON = ConnectionRefusal(
    400,
    _BAD,
    "upgrades within a request",
    "a WebSocket was asked for before the answer to the request before it had ended; "
    "use another connection",
)
LONG_WEBSOCKET_URL = ConnectionRefusal(
    414,
    "url_too_long",
    "WebSockets with too long a URL",
    "the URL of the WebSocket is longer than 8 KiB; send settings in events once it is open",
)
LARGE_WEBSOCKET_HEAD = ConnectionRefusal(
    431,
    _LARGE,
    "WebSockets with too large a header field",
    "a header field of the WebSocket's request is longer than 8 KiB; send a shorter one",
)
BAD_HANDSHAKE = ConnectionRefusal(
    400,
    _BAD,
    "malformed WebSocket handshakes",
    "the request for a WebSocket is not a valid handshake, or has a body",
)
FULL = ConnectionRefusal(
    503,
    "overloaded",
    "connections beyond the bound",
    "this server has as many connections as it may have (web.max_connections, "
    "web.max_connections_per_address); "
    "try again shortly",
)


def slow_head(timeout_s: float) -> ConnectionRefusal:
    return ConnectionRefusal(
        408,
        "request_timeout",
        "requests whose head did not arrive in time",
        f"the request's head did not arrive within {timeout_s:g} s (web.header_timeout_s)",
    )


def slow_body(timeout_s: float) -> ConnectionRefusal:
    return ConnectionRefusal(
        408,
        "request_timeout",
        "requests whose body did not arrive in time",
        f"the request's body came too slowly, or not at all, for {timeout_s:g} s "
        "(web.body_timeout_s)",
    )
