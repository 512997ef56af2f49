"""Messages between an anchor and the span workers of its route, and between neighbours on it; rows
follow as raw bytes.

The anchor sends `SpanSetup` to each worker, then each pass to the first one, which computes its
layers and sends the pass on. The last worker sends the result to the anchor, on the anchor's own
connection to it.
"""

from typing import Annotated, Literal

import msgspec

from fleet.core.wire_codec import WireCodec

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Number of a route, pass, copy or table; a received message with another one is refused as
damaged.
"""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Position, row, page, layer, or a number of them; the same."""
Returned = Literal["rows", "last_rows", "logits"]
"""Results of a route's last worker: all rows of a pass; the last rows of the extents that draw;
their logits.
"""


class SpanMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of the messages. `generation`: of the route to which a message belongs; messages of
    another one are not used.
    """

    generation: Number


class SpanExtent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Positions `start` to `stop` of the table numbered `table`, consecutive rows of the pass.

    `pages`: of the table, up to `stop`. `before`: hash of the rows before `start`; `keys`: of the
    extent's rows, 8 bytes each.
    `draws`: a draw follows its last row. `taps`: tapped rows of it are wanted.
    `rope_len`: length of the text by which its rows' rotary embeddings are scaled at least.
    """

    table: Number
    pages: tuple[Count, ...]
    start: Count
    stop: Count
    before: int
    keys: bytes
    draws: bool
    taps: bool = False
    rope_len: int = 0


class HopTime(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Times of one worker for a pass, in microseconds: from its arrival to the computation, and of
    that, until what is sent is in the host's memory as bytes.
    """

    waited_us: Number
    computed_us: Number


class SpanError(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An error of a worker's computation. `loses_rows`: it does not have the rows before those of
    the pass.
    """

    code: str
    message: str
    loses_rows: bool = False


class SpanPass(SpanMessage, frozen=True, kw_only=True):
    """A pass: rows follow, one for each position of the extents.

    `number`: passes are computed in the order of their numbers. `zeroed`, `closed`: see
    `PoolChanges`; they come before the computation. `completed`: the anchor has the results of
    passes up to this one. `error`: of an earlier worker; nothing else is computed. `times`: of the
    workers so far.
    """

    number: Number
    extents: tuple[SpanExtent, ...]
    zeroed: tuple[tuple[Count, Count], ...] = ()
    closed: tuple[Number, ...] = ()
    completed: Number = 0
    error: SpanError | None = None
    times: tuple[HopTime, ...] = ()


class SpanReport(SpanMessage, frozen=True, kw_only=True):
    """The part of a pass that is due although none begins: see `SpanPass`. It has no result, and is
    not sent again.
    """

    closed: tuple[Number, ...]
    completed: Number


class SpanResult(SpanMessage, frozen=True, kw_only=True):
    """Result of a pass. `tables`: those of the pass. All of their rows follow, or a row or logits
    for each that draws.
    """

    number: Number
    tables: tuple[Number, ...]
    num_rows: Count
    error: SpanError | None = None
    times: tuple[HopTime, ...] = ()


class SpanTapped(SpanMessage, frozen=True, kw_only=True):
    """The tapped rows of a pass follow, one for each position of the tables. No tables: the pass
    failed, and has none.
    """

    number: Number
    tables: tuple[Number, ...]


class SpanSetup(SpanMessage, frozen=True, kw_only=True):
    """A worker's place in a route: its span, the next worker ("" for the last one) and the pages of
    the anchor's pool.

    `returned`: what the last worker returns. `wire_dtype`: of rows between processes. `lineage`:
    the generation of the anchor's first route; a worker with the span and rows of the same lineage
    keeps them. `keep_bytes`: of sent rows.
    """

    span: str
    following: str
    num_pages: Count
    page_size: Count
    returned: Returned
    wire_dtype: str
    lineage: Number
    keep_bytes: Number


class SpanPrepare(SpanMessage, frozen=True, kw_only=True):
    """Order to load a span beside the one that a worker computes, for a later route. `generation`:
    of none.
    """

    span: str


class SpanPrepared(SpanMessage, frozen=True, kw_only=True):
    """A worker has loaded a span beside its own. `error`: why it could not, "" if it could."""

    span: str
    error: str = ""


class SpanReady(SpanMessage, frozen=True, kw_only=True):
    """A worker has loaded its span, and is connected to the next worker. `num_bytes`: of the span's
    weights.

    `last_number`: of the passes that it has computed; 0 if it has no rows. `first_layer`,
    `num_layers`: of its span.
    """

    num_bytes: Number
    last_number: Number = 0
    first_layer: Count = 0
    num_layers: Count = 0


class SpanStart(SpanMessage, frozen=True, kw_only=True):
    """All workers of the route are ready: a worker sends again what the next one lacks, which has
    computed up to `following_has`.

    `completed`: as in `SpanPass`. `tables`: the open ones; nothing of others is needed.
    """

    following_has: Number
    completed: Number
    tables: tuple[Number, ...]


class SpanFetch(SpanMessage, frozen=True, kw_only=True):
    """Order to send the keys and values of a table's first rows. `copy`: number of this copy.
    `pages`: of the table.

    `before`: hash of these rows; a worker that has others, or has lost them, refuses.
    """

    copy: Number
    table: Number
    pages: tuple[Count, ...]
    num_rows: Count
    before: int


class SpanFetched(SpanMessage, frozen=True, kw_only=True):
    """The rows of one layer follow. `error`: why those of no layer do, None if they do."""

    copy: Number
    layer: int
    error: SpanError | None = None


class SpanStore(SpanMessage, frozen=True, kw_only=True):
    """The rows of one layer of a new table follow. `keys`: of the rows, 8 bytes each. `is_last`:
    all layers have come then.
    """

    copy: Number
    layer: int
    table: Number
    pages: tuple[Count, ...]
    keys: bytes
    is_last: bool


class SpanStored(SpanMessage, frozen=True, kw_only=True):
    """A worker has stored all layers of a table. `error`: why it could not, None if it could."""

    copy: Number
    error: SpanError | None = None


class SpanRefusal(SpanMessage, frozen=True, kw_only=True):
    """A worker cannot take the place that it was given."""

    message: str


AnySpanMessage = (
    SpanPass
    | SpanReport
    | SpanResult
    | SpanTapped
    | SpanSetup
    | SpanReady
    | SpanStart
    | SpanRefusal
    | SpanFetch
    | SpanFetched
    | SpanStore
    | SpanStored
    | SpanPrepare
    | SpanPrepared
)
_CODEC: WireCodec[AnySpanMessage] = WireCodec(AnySpanMessage, "a message between span workers")
encode_span_message, decode_span_message = _CODEC.encode, _CODEC.decode

FROM_ANCHOR = "anchor"
"""Purpose of an anchor's connection to a span worker."""


def purpose_of_hop(generation: int) -> str:
    """Return the purpose of a span worker's connection to the next worker of its route."""
    return f"hop {generation}"
