"""The bounds of every connection: those of the deployment, and constants that no client of the API comes near."""

from dataclasses import dataclass

from fleet.config.schema import WebConfig

MAX_HEAD_BYTES = 64 * 1024
"""Size of a request's head: its first line, its header fields, and the trailer fields of its body."""
MAX_URL_BYTES = 16 * 1024
MAX_FIELDS = 128
"""Header and trailer fields. Source: the bound of `websockets`, for the same request with an upgrade."""
MAX_PIPELINED = 32
"""Requests that wait for the answer before them on one connection."""
MAX_FRAMING_BYTES = 16 * 1024
"""Bytes of a chunked body that are neither content nor ordinary chunk sizes: extensions, trailers. Source: Go's net/http."""
CHUNK_FRAMING_BYTES = 16
"""A chunk's size and its two line ends."""
MAX_DISCARDED_BYTES = 256 * 1024
"""Bytes that are read and dropped after a refused head, or while another answer is sent."""
MAX_DROPPED_BODY_BYTES = 32 * 1024 * 1024
"""The rest of a body that is read and dropped after its answer: many clients read an answer only once they have sent everything.
One that could send all of it takes the connection for usable again, so it is kept up to here, and broken off beyond.
"""
MAX_DROPPED_DECLARED_BYTES = 16 * MAX_DROPPED_BODY_BYTES
"""The same where the request declared its length: its end is in sight, it costs no memory, and must keep the pace of a body."""
MIN_BYTES_PER_S = 500
"""A body, or an answer on its way to a slow reader, must move this fast. Source: Apache's mod_reqtimeout."""
LARGE_BODY_BYTES, LARGE_BYTES_PER_S = 1024 * 1024, 8 * 1024
"""A body of so many bytes must move so fast."""
SMALL_MESSAGE_BYTES = 64 * 1024
"""Bytes of an unfinished WebSocket message that each connection may hold, independent of the others."""
LINGER_S = 2.0
"""Time for which input after a refusal is dropped: closing before it is read would reset the connection under the answer."""
MAX_SWEEP_S, MIN_SWEEP_S = 1.0, 0.02
SWEEPS_PER_TIMEOUT = 5
"""A time-out is noticed late by a fifth of it, and by a second at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Units: seconds; numbers of connections; bytes. `max_unfinished_bytes`: of all unfinished WebSocket messages together."""

    header_timeout_s: float
    body_timeout_s: float
    send_timeout_s: float
    max_connections: int
    max_connections_per_address: int
    max_unfinished_bytes: int

    @staticmethod
    def of(web: WebConfig, max_connections: int) -> "Bounds":
        """`max_connections`: the limit of the process, if it is below that of the deployment."""
        return Bounds(
            header_timeout_s=web.header_timeout_s,
            body_timeout_s=web.body_timeout_s,
            send_timeout_s=web.send_timeout_s,
            max_connections=max_connections,
            max_connections_per_address=web.max_connections_per_address,
            max_unfinished_bytes=web.body_memory_mib * 1024 * 1024,
        )

    @property
    def sweep_s(self) -> float:
        """Pause between two looks at all connections."""
        shortest_s = min(self.header_timeout_s, self.body_timeout_s, self.send_timeout_s)
        return min(MAX_SWEEP_S, max(MIN_SWEEP_S, shortest_s / SWEEPS_PER_TIMEOUT))
