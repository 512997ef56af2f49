"""Copies of a table's rows out of a span worker and into it, for sessions that are saved and loaded."""

import numpy as np

from fleet.core.errors import failure_of
from fleet.core.span_messages import SpanFetch, SpanFetched, SpanStore, SpanStored, encode_span_message
from fleet.engine.torch.pass_queue import FAILURES
from fleet.engine.torch.span_host import SpanHost
from fleet.spans.connection import SpanConnection


def copy_rows(host: SpanHost, anchor: SpanConnection, message: SpanFetch | SpanStore, payload: memoryview) -> None:
    """Follow an anchor's order."""
    if isinstance(message, SpanFetch):
        for layer, rows in host.read_rows(message.pages, message.num_rows).items():
            fetched = SpanFetched(generation=message.generation, copy=message.copy, layer=layer)
            anchor.send(encode_span_message(fetched), rows.data)
        return
    error = ""
    try:
        host.write_rows(message.layer, message.table, message.pages, message.keys, np.frombuffer(payload, np.uint8))
    except FAILURES as failure:
        error = failure_of("the rows of a session cannot be stored", failure).message
    if message.is_last or error:
        anchor.send(encode_span_message(SpanStored(generation=message.generation, copy=message.copy, error=error)))
