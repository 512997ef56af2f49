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
    """Base of the messages. `generation`: number of the route to which a message belongs; a
    receiver in another route ignores it.
    """

    generation: Number


class SpanExtent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Positions `start` to `stop` of the table numbered `table`, consecutive rows of the step.

    `pages`: pages of the table up to `stop`. `before`: hash of the rows before `start`. `keys`:
    keys of the extent's rows, 8 bytes each. `draws`: a token is sampled after the last row. `taps`:
    its hidden states of the tapped layer are wanted. `rope_len`: least length of the text by which
    rotary embeddings are scaled.
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
    """Times of one worker for a pass, in microseconds.

    `waited_us`: time from the arrival of the pass to the start of its computation. `computed_us`:
    time from that start until the result to send is in host memory as bytes.
    """

    waited_us: Number
    computed_us: Number


class SpanError(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An error of a span worker's computation.

    `loses_rows`: True if the worker's earlier rows are missing or differ from the anchor's; the
    anchor then computes the requests of the step again from their first row.
    """

    code: str
    message: str
    loses_rows: bool = False


class SpanPass(SpanMessage, frozen=True, kw_only=True):
    """A step. Its rows follow, one for each position of the extents.

    `number`: steps are computed in the order of their numbers. `zeroed`, `closed`: changes of the
    pool before the computation, see `PoolChanges`. `completed`: number of the last step whose
    results the anchor has. `error`: error of an earlier worker, after which nothing is computed.
    `times`: times of the workers so far.
    """

    number: Number
    extents: tuple[SpanExtent, ...]
    zeroed: tuple[tuple[Count, Count], ...] = ()
    closed: tuple[Number, ...] = ()
    completed: Number = 0
    error: SpanError | None = None
    times: tuple[HopTime, ...] = ()


class SpanReport(SpanMessage, frozen=True, kw_only=True):
    """Closed tables and completed steps, reported while no step begins; see `SpanPass`. A report
    has no result, and is not sent again.
    """

    closed: tuple[Number, ...]
    completed: Number


class SpanResult(SpanMessage, frozen=True, kw_only=True):
    """Result of a step for its `tables`. The hidden states of all their rows follow, or one
    row or logits for each table that samples.
    """

    number: Number
    tables: tuple[Number, ...]
    num_rows: Count
    error: SpanError | None = None
    times: tuple[HopTime, ...] = ()


class SpanTapped(SpanMessage, frozen=True, kw_only=True):
    """Hidden states of the tapped layer for one step, one row for each position of `tables`.
    `tables` is empty if the step failed.
    """

    number: Number
    tables: tuple[Number, ...]


class SpanSetup(SpanMessage, frozen=True, kw_only=True):
    """A worker's place in a route: its span, the next worker ("" for the last one) and the pages of
    the anchor's pool.

    `returned`: result of the last worker. `wire_dtype`: dtype of hidden states between processes.
    `lineage`: generation of the anchor's first route; a worker with the span and rows of the same
    lineage keeps them. `keep_bytes`: sent rows that are kept.
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
    """A worker has loaded its span, and is connected to the next worker.

    `num_bytes`: size of the span's weights. `last_number`: number of the last computed step; 0
    without rows. `first_layer`, `num_layers`: range of the span.
    """

    num_bytes: Number
    last_number: Number = 0
    first_layer: Count = 0
    num_layers: Count = 0


class SpanStart(SpanMessage, frozen=True, kw_only=True):
    """All workers of the route are ready: a worker sends again what the next one lacks, which has
    computed the steps up to `following_has`.

    `completed`: see `SpanPass`. `tables`: open tables; all others are closed.
    """

    following_has: Number
    completed: Number
    tables: tuple[Number, ...]


class SpanFetch(SpanMessage, frozen=True, kw_only=True):
    """Order to send the keys and values of a table's first rows. `copy`: number of this copy.
    `pages`: pages of the table.

    `before`: hash of these rows; a worker that has others, or has lost them, refuses.
    """

    copy: Number
    table: Number
    pages: tuple[Count, ...]
    num_rows: Count
    before: int


class SpanFetched(SpanMessage, frozen=True, kw_only=True):
    """The rows of one layer follow. `error`: why no layer follows; None if it does."""

    copy: Number
    layer: int
    error: SpanError | None = None


class SpanStore(SpanMessage, frozen=True, kw_only=True):
    """The rows of one layer of a new table follow. `keys`: keys of the rows, 8 bytes each.
    `is_last`: True for the last layer.
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
