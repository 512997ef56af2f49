"""Messages between an anchor and the span workers of its route, and between neighbours on it; rows follow as raw bytes.

The anchor sends `SpanSetup` to each worker, then each pass to the first one, which computes its layers and sends the pass on. The
last worker sends the result to the anchor, on the anchor's own connection to it.
"""

from typing import Literal

import msgspec

from fleet.core.errors import UnknownWireVersion

Returned = Literal["rows", "last_rows", "logits"]
"""Results of a route's last worker: all rows of a pass; the last rows of the extents that draw; their logits."""


class SpanMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of the messages. `generation`: of the route to which a message belongs; messages of another one are not used."""

    generation: int


class SpanExtent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Positions `start` to `stop` of the table numbered `table`, consecutive rows of the pass.

    `pages`: of the table, up to `stop`. `before`: hash of the rows before `start`; `keys`: of the extent's rows, 8 bytes each.
    `draws`: a draw follows its last row.
    """

    table: int
    pages: tuple[int, ...]
    start: int
    stop: int
    before: int
    keys: bytes
    draws: bool


class HopTime(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Times of one worker for a pass, in microseconds: from its arrival to the computation, and of that."""

    waited_us: int
    computed_us: int


class SpanPass(SpanMessage, frozen=True, kw_only=True):
    """A pass: rows follow, one for each position of the extents. Without extents it only has changes of the pool.

    `zeroed`, `closed`: see `PoolChanges`; they come before the computation. `times`: of the workers so far.
    """

    number: int
    extents: tuple[SpanExtent, ...]
    zeroed: tuple[tuple[int, int], ...] = ()
    closed: tuple[int, ...] = ()
    times: tuple[HopTime, ...] = ()


class SpanResult(SpanMessage, frozen=True, kw_only=True):
    """Result of a pass: rows or logits follow, none if nothing was to be returned."""

    number: int
    num_rows: int
    times: tuple[HopTime, ...]


class SpanTapped(SpanMessage, frozen=True, kw_only=True):
    """The tapped rows of a pass follow, one for each position."""

    number: int


class SpanFailure(SpanMessage, frozen=True, kw_only=True):
    """A worker could not compute a pass. `loses_rows`: it does not have the rows before those of the pass."""

    number: int
    code: str
    message: str
    loses_rows: bool = False


class SpanSetup(SpanMessage, frozen=True, kw_only=True):
    """A worker's place in a route: its span, the next worker ("" for the last one) and the pages of the anchor's pool.

    `returned`: what the last worker returns. `wire_dtype`: of rows between processes.
    """

    span: str
    following: str
    num_pages: int
    page_size: int
    returned: Returned
    wire_dtype: str


class SpanReady(SpanMessage, frozen=True, kw_only=True):
    """A worker has loaded its span, and is connected to the next worker. `num_bytes`: of the span's weights."""

    num_bytes: int


class SpanRefusal(SpanMessage, frozen=True, kw_only=True):
    """A worker cannot take the place that it was given."""

    message: str


AnySpanMessage = SpanPass | SpanResult | SpanTapped | SpanFailure | SpanSetup | SpanReady | SpanRefusal
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnySpanMessage)


def encode_span_message(message: AnySpanMessage) -> bytes:
    return _ENCODER.encode(message)


def decode_span_message(data: bytes) -> AnySpanMessage:
    """Raises: UnknownWireVersion for the message of another version."""
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise UnknownWireVersion(f"a message between span workers cannot be read: {error}; run one version of Fleet") from error
