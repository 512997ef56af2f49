"""A span worker's part in a route without a process: one layer that returns its input, an anchor
that records what it is sent, and the messages of a route with one step.
"""

from typing import Any, cast

from torch import Tensor

from fleet.engine.torch.build import open_device
from fleet.engine.torch.kv_pool import KVShape
from fleet.spans.host.hosting import SpanHosting
from fleet.spans.host.loaded import LoadedSpans
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import (
    AnySpanMessage,
    SpanExtent,
    SpanPass,
    SpanSetup,
    SpanStart,
    decode_span_message,
)
from fleet.spans.torch.model import SpanRows
from fleet.stages.base import BuiltSpan

WIDTH, NUM_PAGES, PAGE_SIZE = 2, 8, 4


class EchoLayers:
    """Layers of a span with a single layer, which returns its input."""

    span = LayerSpan.parse("0:0", "span")
    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
    has_tapped_layer = False

    def forward(self, rows_NH: Tensor, layout: Any) -> SpanRows:
        return SpanRows(rows_NH=rows_NH)


class RecordingConnection:
    """Connection double of an anchor. `sent`: messages that the worker has sent to it."""

    peer, is_closed = "anchor", False

    def __init__(self) -> None:
        self.sent: list[AnySpanMessage] = []

    def send(self, header: bytes, *_: Any, **__: Any) -> None:
        self.sent.append(decode_span_message(header))

    def close(self) -> None:
        self.is_closed = True


SETUP = SpanSetup(
    generation=1,
    span="0:0",
    following="",
    num_pages=NUM_PAGES,
    page_size=PAGE_SIZE,
    returned="rows",
    wire_dtype="float32",
    lineage=1,
    keep_bytes=1000,
)
START = SpanStart(generation=1, following_has=0, completed=0, tables=())
EXTENT = SpanExtent(table=1, pages=(0,), start=0, stop=2, before=0, keys=bytes(16), draws=True)
PASS = SpanPass(generation=1, number=1, extents=(EXTENT,), zeroed=((0, 0),))
ROWS = bytes(2 * WIDTH * 4)


def echo_hosting() -> SpanHosting:
    """Return a span worker's part, outside of any route."""
    where = open_device(device="cpu", dtype="float32", numerics="fast", threads=1)
    spans = LoadedSpans(lambda _: BuiltSpan(layers=cast(Any, EchoLayers()), num_bytes=1))
    return SpanHosting(where, spans, cast(Any, None), lambda: None)
