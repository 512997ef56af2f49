"""Counters of one incoming HTTP message: its sizes, and the rate of its body. Knows no socket."""

from web.http.protocol import refusal
from web.http.protocol.bounds import (
    CHUNK_FRAMING_BYTES,
    LARGE_BODY_BYTES,
    LARGE_BYTES_PER_S,
    MAX_FIELDS,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_URL_BYTES,
    MIN_BYTES_PER_S,
)
from web.http.protocol.refusal import ConnectionRefusal

FIELD_FRAMING_BYTES = 4
"""Bytes of a header field beside name and value: `: ` and the line end."""


class MessageSize:
    """Counter of the bytes of one incoming HTTP message, with the refusals of messages that are too
    large. Parsed input is counted exactly; for an unfinished head all bytes read are counted, since
    the parser holds back the beginning of a field.
    """

    __slots__ = (
        "_body_of_read",
        "_ended",
        "_field_bytes",
        "_framing",
        "_num_fields",
        "_read",
        "_url_bytes",
        "num_chunks",
        "num_discarded",
        "num_head_bytes",
    )

    def __init__(self) -> None:
        self._read = 0
        self._framing = 0
        self._body_of_read = 0
        self._url_bytes = 0
        self._field_bytes = 0
        self._num_fields = 0
        self._ended = False
        self.num_head_bytes = 0
        """Bytes read of an unfinished head."""
        self.num_chunks = 0
        """Chunks of a chunked body in the current read."""
        self.num_discarded = 0
        """Bytes of a body that arrived after the answer to its request was sent."""

    def begin_message(self) -> None:
        self._url_bytes = 0
        self._field_bytes = 0
        self._num_fields = 0
        self.num_discarded = 0
        self._framing = 0

    def add_url(self, num_bytes: int) -> ConnectionRefusal | None:
        self._url_bytes += num_bytes
        return refusal.LONG_URL if self._url_bytes > MAX_URL_BYTES else None

    def add_field(self, num_bytes: int) -> ConnectionRefusal | None:
        """Count a header or trailer field; return the refusal of a head that is too large, or
        None.
        """
        self._num_fields += 1
        self._field_bytes += num_bytes + FIELD_FRAMING_BYTES
        if self._num_fields > MAX_FIELDS:
            return refusal.MANY_FIELDS
        return refusal.LARGE_HEAD if self._url_bytes + self._field_bytes > MAX_HEAD_BYTES else None

    def set_complete(self) -> None:
        """Record that the head, or the whole message, has been received completely."""
        self.num_head_bytes, self._ended = 0, True

    def add_body(self, num_bytes: int, *, discarded: bool) -> None:
        self._body_of_read += num_bytes
        if discarded:
            self.num_discarded += num_bytes

    def begin_read(self, num_bytes: int, *, in_head: bool) -> None:
        self._read = num_bytes
        self._body_of_read = self.num_chunks = 0
        self._ended = False
        if in_head:
            self.num_head_bytes += num_bytes

    def end_read(self, *, in_head: bool) -> ConnectionRefusal | None:
        """End a read; return the refusal of an unfinished head or body that is too large, or
        None.
        """
        if self._ended:
            return None
        if in_head:
            if self.num_head_bytes <= MAX_HEAD_BYTES:
                return None
            return refusal.LONG_URL if self._url_bytes > MAX_URL_BYTES else refusal.LARGE_HEAD
        allowed = CHUNK_FRAMING_BYTES * self.num_chunks + 2 * self._body_of_read
        self._framing = max(0, self._framing + self._read - self._body_of_read - allowed)
        return refusal.MUCH_FRAMING if self._framing > MAX_FRAMING_BYTES else None


class BodyPace:
    """Check of the minimum rate of a body. Some content must arrive within each time-out; and in
    each period as long as the time-out, `MIN_BYTES_PER_S` on average, or `LARGE_BYTES_PER_S` once
    the body is large, since a large body occupies shared memory.

    `num_bytes` is the content received in the current period; the caller increases it.
    """

    __slots__ = ("_last", "_seen", "_since", "_total", "num_bytes")

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self._since = self._last = now
        self._seen = 0
        self.num_bytes = 0
        self._total = 0

    def is_too_slow(self, now: float, timeout_s: float) -> bool:
        if self.num_bytes > self._seen:
            self._seen, self._last = self.num_bytes, now
        if now - self._last > timeout_s:
            return True
        if now - self._since < timeout_s:
            return False
        self._total += self.num_bytes
        pace = LARGE_BYTES_PER_S if self._total > LARGE_BODY_BYTES else MIN_BYTES_PER_S
        slow = self.num_bytes < pace * (now - self._since)
        self._since = now
        self._seen = self.num_bytes = 0
        return slow
