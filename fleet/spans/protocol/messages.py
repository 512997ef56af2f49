"""Messages between an anchor and the span workers of its route, and between neighbouring workers.
Hidden states, keys and values follow a message as raw bytes, called rows.

The anchor sends `SpanSetup` to each worker, then each step to the first worker, which computes its
layers and sends the step on. The last worker sends the result to the anchor, on the anchor's own
connection to it.
"""

from typing import Annotated, Literal

import msgspec

from fleet.core.wire_codec import WireCodec

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Number of a route, step, copy or page table. A message with a number out of range is refused as
damaged.
"""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A position, row, page or layer, or a count of these. A message with a value out of range is
refused as damaged.
"""
Returned = Literal["rows", "last_rows", "logits"]
"""What the last span worker of a route returns to the anchor: hidden states of all rows of a step;
hidden states of the rows after which a token is sampled; the logits of these rows.
"""


class SpanMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base class of the messages.

    `generation`: number of the route to which the message belongs; receivers in another route
    ignore it.
    """

    generation: Number


class SpanExtent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The rows of one request in a step: positions `start` to `stop` of page table number `table`.

    `pages`: pages of the table up to `stop`. `before`: hash of the rows before `start`, by which
    workers check that they have the same prefix. `keys`: keys of the extent's rows, 8 bytes each.
    `draws`: True if a token is sampled after the last row. `taps`: True if the anchor needs the
    hidden states of the tapped layer. `rope_len`: least text length by which rotary embeddings are
    scaled.
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
    """Time that one span worker spent on a step, in microseconds.

    `waited_us`: time between the arrival of the step and the start of computation. `computed_us`:
    time between the start of computation and the result's being in host memory as bytes.
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
    """A step, sent from worker to worker. Its rows follow, one for each position of `extents`.

    `number`: position in the order of computation. `zeroed`, `closed`: changes of the KV pool
    before the computation; see `PoolChanges`. `completed`: number of the last step whose results
    the anchor has. `error`: error of an earlier worker; later workers then compute nothing.
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
    """Report of closed page tables and completed steps, sent when no new step can carry the report;
    see `SpanPass`. A report has no result, and is never sent again.
    """

    closed: tuple[Number, ...]
    completed: Number


class SpanResult(SpanMessage, frozen=True, kw_only=True):
    """The last worker's result of a step, for the requests in `tables`.

    Rows follow: hidden states of all positions, or one hidden state or logits row for each request
    that samples a token; see `Returned`.
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
    """An anchor's order to a span worker: its place in a new route.

    `following`: name of the next worker, "" for the last one. `num_pages`, `page_size`: size of the
    anchor's KV pool. `returned`: what the last worker returns. `wire_dtype`: dtype of hidden states
    between processes. `lineage`: generation of the anchor's first route; a worker that has rows of
    the same lineage and span keeps them. `keep_bytes`: see `SpanLog`.
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
    """An anchor's order to load a span for a later route, beside the span in use. `generation` is
    0, since no route is meant.
    """

    span: str


class SpanPrepared(SpanMessage, frozen=True, kw_only=True):
    """Answer to `SpanPrepare`: the span is loaded. `error`: why it could not be loaded; "" on
    success.
    """

    span: str
    error: str = ""


class SpanReady(SpanMessage, frozen=True, kw_only=True):
    """Answer to `SpanSetup`: the worker has loaded its span and is connected to the next worker.

    `num_bytes`: size of the span's weights. `last_number`: number of the last computed step; 0 if
    the worker has no rows. `first_layer`, `num_layers`: layers of the span.
    """

    num_bytes: Number
    last_number: Number = 0
    first_layer: Count = 0
    num_layers: Count = 0


class SpanStart(SpanMessage, frozen=True, kw_only=True):
    """An anchor's order to begin: all workers are ready. A worker first resends the steps that the
    next worker lacks.

    `following_has`: last step that the next worker has computed. `completed`: see `SpanPass`.
    `tables`: open page tables; workers close all others.
    """

    following_has: Number
    completed: Number
    tables: tuple[Number, ...]


class SpanFetch(SpanMessage, frozen=True, kw_only=True):
    """An anchor's order to send the keys and values of a page table's first rows.

    `copy`: number of this copy. `num_rows`: rows to send. `before`: hash of the rows; a worker
    whose rows differ or are lost refuses.
    """

    copy: Number
    table: Number
    pages: tuple[Count, ...]
    num_rows: Count
    before: int


class SpanFetched(SpanMessage, frozen=True, kw_only=True):
    """Answer to `SpanFetch`: one message for each layer, followed by the layer's keys and values;
    `error` is None. A worker that fails sends one message with `error`, and -1 as `layer`.
    """

    copy: Number
    layer: int
    error: SpanError | None = None


class SpanStore(SpanMessage, frozen=True, kw_only=True):
    """An anchor's order to store one layer of a new page table; the layer's keys and values follow.

    `copy`: number of this copy. `keys`: keys of the rows, 8 bytes each. `is_last`: True for the
    last layer of this worker.
    """

    copy: Number
    layer: int
    table: Number
    pages: tuple[Count, ...]
    keys: bytes
    is_last: bool


class SpanStored(SpanMessage, frozen=True, kw_only=True):
    """Answer to the last `SpanStore` of a copy, and to each earlier one that fails. `error`: reason
    why the layer could not be stored; None on success.
    """

    copy: Number
    error: SpanError | None = None


class SpanRefusal(SpanMessage, frozen=True, kw_only=True):
    """Answer to `SpanSetup`: the worker cannot take its place; `message` says why."""

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
"""Connection purpose that an anchor announces when it connects to a span worker."""


def purpose_of_hop(generation: int) -> str:
    """Return the connection purpose that a span worker announces to the next worker of route
    `generation`.
    """
    return f"hop {generation}"
