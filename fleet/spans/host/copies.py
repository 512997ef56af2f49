"""Copies of a request's keys and values out of a span worker and into it, for sessions that are
saved and loaded.
"""

import numpy as np

from fleet.core.errors import FleetError, failure_of
from fleet.engine.torch.pass_queue import FAILURES
from fleet.spans.host.compute import SpanHost
from fleet.spans.net.connection import SpanConnection
from fleet.spans.protocol.messages import (
    SpanError,
    SpanFetch,
    SpanFetched,
    SpanStore,
    SpanStored,
    encode_span_message,
)


def copy_rows(
    host: SpanHost, anchor: SpanConnection, message: SpanFetch | SpanStore, payload: memoryview
) -> None:
    """Send the anchor the rows that a `SpanFetch` names; or store `payload` as the rows of a
    `SpanStore`, and report an error or the end of the copy to the anchor.
    """
    if isinstance(message, SpanFetch):
        _send_rows(host, anchor, message)
        return
    error = None
    try:
        host.write_rows(
            message.layer,
            message.table,
            message.pages,
            message.keys,
            np.frombuffer(payload, np.uint8),
        )
    except FAILURES as failure:
        error = _as_sent(failure_of("the rows of a session cannot be stored", failure))
    if message.is_last or error is not None:
        anchor.send(
            encode_span_message(
                SpanStored(generation=message.generation, copy=message.copy, error=error)
            )
        )


def _send_rows(host: SpanHost, anchor: SpanConnection, message: SpanFetch) -> None:
    try:
        fetched = host.read_rows(message)
    except FAILURES as failure:
        error = _as_sent(failure_of("the rows of a session cannot be read", failure))
        anchor.send(
            encode_span_message(
                SpanFetched(generation=message.generation, copy=message.copy, layer=-1, error=error)
            )
        )
        return
    for layer, rows in fetched.items():
        header = SpanFetched(generation=message.generation, copy=message.copy, layer=layer)
        anchor.send(encode_span_message(header), rows.data)


def _as_sent(error: FleetError) -> SpanError:
    return SpanError(code=error.code, message=error.message)
