"""Limits of every connection, far beyond the needs of any API client; the deployment's limits are
in `WebConfig`.
"""

MAX_HEAD_BYTES = 64 * 1024
"""Limit of a request's head (request line and header fields) together with the trailer fields of
its body.
"""
MAX_URL_BYTES = 16 * 1024
MAX_FIELDS = 128
"""Limit of the number of header and trailer fields. Source: the limit of `websockets`, for the same
request with an upgrade.
"""
MAX_PIPELINED = 32
"""Limit of requests on one connection that wait for an earlier answer."""
MAX_FRAMING_BYTES = 16 * 1024
"""Limit of the bytes of a chunked body that are neither content nor ordinary chunk sizes:
extensions, trailers. Source: Go's net/http.
"""
CHUNK_FRAMING_BYTES = 16
"""Bytes of ordinary framing for each chunk of a body: the chunk's size and two line ends."""
MAX_DISCARDED_BYTES = 256 * 1024
"""Limit of input that is dropped after a refused head, or while the answer to an earlier request is
sent.
"""
MAX_DROPPED_BODY_BYTES = 32 * 1024 * 1024
"""Limit of the rest of a chunked body that is dropped after the answer: many clients read the
answer only after sending everything, and then reuse the connection. Beyond this limit the
connection is aborted.
"""
MAX_DROPPED_DECLARED_BYTES = 16 * MAX_DROPPED_BODY_BYTES
"""Limit of the rest of a body with a declared length that is dropped after the answer. Higher than
for a chunked body, since the end is known and the minimum rate applies.
"""
MIN_BYTES_PER_S = 500
"""Minimum rate at which a client must send a body, and read an answer. Source: Apache's
mod_reqtimeout.
"""
LARGE_BODY_BYTES, LARGE_BYTES_PER_S = 1024 * 1024, 8 * 1024
"""Minimum rate at which a client must send a body that is larger than `LARGE_BODY_BYTES`."""
SMALL_MESSAGE_BYTES = 64 * 1024
"""Size up to which an unfinished WebSocket message is always allowed, even when
`ConnectionTable.max_unfinished_bytes` is reached.
"""
LINGER_S = 2.0
"""Seconds for which input is dropped after a refusal, before the connection is closed: closing with
unread input would reset the connection before the peer reads the answer.
"""
