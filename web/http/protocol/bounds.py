"""Limits of every connection, far beyond the needs of any API client; the deployment's limits are
in `WebConfig`.
"""

MAX_HEAD_BYTES = 64 * 1024
"""Size of a request's head: its first line, its header fields, and the trailer fields of its
body.
"""
MAX_URL_BYTES = 16 * 1024
MAX_FIELDS = 128
"""Header and trailer fields. Source: the bound of `websockets`, for the same request with an
upgrade.
"""
MAX_PIPELINED = 32
"""Requests on one connection that wait for an earlier answer."""
MAX_FRAMING_BYTES = 16 * 1024
"""Bytes of a chunked body that are neither content nor ordinary chunk sizes: extensions, trailers.
Source: Go's net/http.
"""
CHUNK_FRAMING_BYTES = 16
"""A chunk's size and its two line ends."""
MAX_DISCARDED_BYTES = 256 * 1024
"""Bytes dropped after a refused head, or while another answer is sent."""
MAX_DROPPED_BODY_BYTES = 32 * 1024 * 1024
"""Rest of a body that is dropped after its answer: many clients read the answer only after sending
everything, and then reuse the connection. Beyond this limit the connection is aborted.
"""
MAX_DROPPED_DECLARED_BYTES = 16 * MAX_DROPPED_BODY_BYTES
"""The same limit for a request with a declared length: its end is known, and it must be as fast as
any body.
"""
MIN_BYTES_PER_S = 500
"""Minimum rate of a body, and of an answer to a slow reader. Source: Apache's mod_reqtimeout."""
LARGE_BODY_BYTES, LARGE_BYTES_PER_S = 1024 * 1024, 8 * 1024
"""Minimum rate of a body that is larger than `LARGE_BODY_BYTES`."""
SMALL_MESSAGE_BYTES = 64 * 1024
"""Size of an unfinished WebSocket message that is allowed even when
`ConnectionTable.max_unfinished_bytes` is reached.
"""
LINGER_S = 2.0
"""Time for which input after a refusal is dropped: closing with unread input would reset the
connection before the peer reads the answer.
"""
