"""The trace of a client's call that a request joins, and the ids of its own spans. Sends nothing.

Source: W3C Trace Context, https://www.w3.org/TR/trace-context/. `tracestate` is not kept: it is for
services that call others, and the answer's spans are leaves.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

import msgspec

TRACEPARENT = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(msgspec.Struct, frozen=True, kw_only=True):
    """The span of the caller. `trace_id`: 32 hexadecimal digits. `span_id`: 16 hexadecimal digits.
    `is_sampled`: True if the caller records its spans.
    """

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def parse_traceparent(header: str) -> TraceParent | None:
    """Return the caller's span from a `traceparent` header; None if the header is invalid, which
    the specification tells to ignore. Of a header of a later version, only the fields of version 00
    are read.
    """
    found = _FORM.fullmatch(header)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if (
        version == "ff"
        or (version == "00" and rest)
        or not (int(trace_id, 16) and int(span_id, 16))
    ):
        return None
    return TraceParent(
        trace_id=trace_id, span_id=span_id, is_sampled=bool(int(flags, 16) & _SAMPLED)
    )


def trace_id_of(request: str, traceparent: str) -> str:
    """Return the trace id of a request's spans: the caller's, or without a caller a hash of the
    request's id, the same at every gateway. `traceparent`: `RequestSpec.traceparent`.
    """
    parent = parse_traceparent(traceparent)
    return parent.trace_id if parent is not None else _digest(request, 16)


def span_id_of(request: str, stage: str = "") -> str:
    """Return the id of the span of a request, or of its task in `stage`: a hash, the same in every
    process.
    """
    return _digest(f"{request} {stage}", 8)


def _digest(text: str, num_bytes: int) -> str:
    return blake2b(text.encode(), digest_size=num_bytes).hexdigest()


_current: ContextVar[TraceParent | None] = ContextVar("fleet_traceparent", default=None)


@contextmanager
def called_within(parent: TraceParent | None) -> Iterator[None]:
    """Record `parent` as the caller's span of every request that is submitted within this context,
    also by asyncio tasks that begin in it. `parent` is None if the caller has no span.
    """
    token = _current.set(parent)
    try:
        yield
    finally:
        _current.reset(token)


def current_traceparent() -> TraceParent | None:
    return _current.get()
