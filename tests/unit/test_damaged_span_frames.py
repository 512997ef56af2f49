"""Damaged frames on the connections of a divided model: the peer is refused or dropped, and the
process continues.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.core.errors import BadInput, SessionInterrupted
from fleet.engine.torch.kv_pool import PageTable, PoolChanges
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.pass_queue import PassEntry
from fleet.spans.anchor.copies import COPY_S, SpanCopies, SpanCopy
from fleet.spans.anchor.running import RunningEntry, RunningStep
from fleet.spans.net.connection import ConnectionOpened, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.net.frames import SpanFrame
from fleet.spans.protocol.chain import SpanChain
from fleet.spans.protocol.messages import (
    FROM_ANCHOR,
    AnySpanMessage,
    SpanFetch,
    SpanFetched,
    SpanPrepare,
    SpanReady,
    SpanReport,
    SpanResult,
    SpanStore,
    encode_span_message,
)
from fleet.spans.route.connections import ConnectedChain
from tests.echo_span import (
    EXTENT,
    NUM_PAGES,
    PASS,
    ROWS,
    SETUP,
    START,
    RecordingConnection,
    echo_hosting,
)
from tests.span_peers import WAIT_S, dial_as, serving

LAYER = bytes(2 * 2 * 4)
STORE = SpanStore(generation=1, copy=1, layer=0, table=2, pages=(1,), keys=bytes(16), is_last=True)
FETCH = SpanFetch(generation=1, copy=2, table=1, pages=(0,), num_rows=2, before=0)
REPORT = SpanReport(generation=1, closed=(1,), completed=1)


class Hosted:
    """A span worker in a route with an anchor."""

    def __init__(self) -> None:
        self.hosting = echo_hosting()
        self.connect()

    def connect(self) -> None:
        self.anchor = RecordingConnection()
        self.hosting.handle(ConnectionOpened(cast(SpanConnection, self.anchor), FROM_ANCHOR))

    def receive(self, header: bytes, payload: bytes = b"") -> None:
        frame = SpanFrame(header, memoryview(bytearray(payload)))
        if not self.anchor.is_closed:
            self.hosting.handle(FrameReceived(cast(SpanConnection, self.anchor), frame, 0.0))

    def send(self, *messages: tuple[AnySpanMessage, bytes]) -> None:
        for message, payload in messages:
            self.receive(encode_span_message(message), payload)

    def still_works(self, generation: int = 2) -> bool:
        """Set up a new route, and check that the worker computes a pass in it."""
        self.connect()
        renumbered = [
            msgspec.structs.replace(each, generation=generation) for each in (SETUP, START, PASS)
        ]
        renumbered[0] = msgspec.structs.replace(renumbered[0], lineage=generation)
        self.send((renumbered[0], b""), (renumbered[1], b""), (renumbered[2], ROWS))
        last = self.anchor.sent[-1]
        return (
            isinstance(self.anchor.sent[0], SpanReady)
            and isinstance(last, SpanResult)
            and last.error is None
        )


def in_route() -> Hosted:
    hosted = Hosted()
    hosted.send((SETUP, b""), (START, b""), (PASS, ROWS))
    assert isinstance(hosted.anchor.sent[-1], SpanResult) and hosted.anchor.sent[-1].error is None
    return hosted


BIG = 10**12
NEXT_PASS = msgspec.structs.replace(PASS, number=2)
NEXT_SETUP = msgspec.structs.replace(SETUP, generation=2, lineage=2)
Damaged = list[tuple[AnySpanMessage, bytes]]


def changed(message: AnySpanMessage, payload: bytes, *changes: Mapping[str, Any]) -> Damaged:
    return [(msgspec.structs.replace(message, **each), payload) for each in changes]


EXTENTS: list[dict[str, Any]] = [
    {"pages": (NUM_PAGES + 1,)},
    {"pages": (-1,)},
    {"pages": (2**64 - 1,)},
    {"pages": ()},
    {"start": 2, "stop": 0},
    {"start": -1},
    {"stop": BIG},
    {"keys": bytes(7)},
    {"keys": b""},
]
DAMAGED: dict[str, Damaged] = {
    "pass": [
        *changed(
            NEXT_PASS,
            ROWS,
            *({"extents": (msgspec.structs.replace(EXTENT, **each),)} for each in EXTENTS),
            {"zeroed": ((BIG, 0),)},
        ),
        *changed(NEXT_PASS, ROWS * 2, {"extents": (EXTENT, EXTENT)}),
        (NEXT_PASS, b""),
        (NEXT_PASS, ROWS[:-3]),
    ],
    "store": [
        *changed(STORE, LAYER, {"layer": -1}, {"layer": 7}, {"keys": bytes(7)}, {"pages": (BIG,)}),
        (STORE, LAYER[:-1]),
        (STORE, b""),
    ],
    "fetch": changed(FETCH, b"", {"pages": (NUM_PAGES + 1,)}, {"num_rows": BIG}),
    "setup": changed(
        NEXT_SETUP,
        b"",
        {"num_pages": BIG},
        {"num_pages": -1},
        {"page_size": 0},
        {"num_pages": 2**31 - 1, "page_size": 2**31 - 1},
        {"wire_dtype": "f"},
        {"span": "x"},
    ),
    "preparation": [(SpanPrepare(generation=0, span="\0"), b"")],
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_span_worker_refuses_each_damaged_message_of_a_kind(kind: str) -> None:
    for message, payload in DAMAGED[kind]:
        hosted = in_route()
        num_sent = len(hosted.anchor.sent)
        hosted.send((message, payload))
        answers = hosted.anchor.sent[num_sent:]
        errors = [
            getattr(answer, "error", None) or getattr(answer, "message", None) for answer in answers
        ]
        assert hosted.anchor.is_closed or any(errors) or kind == "preparation", (message, answers)
        assert hosted.still_works(generation=3), message


def damaged(headers: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    def overwritten(header: bytes, at: int, put: bytes) -> bytes:
        at %= len(header)
        return header[:at] + put + header[at + len(put) :]

    return st.builds(
        overwritten,
        st.sampled_from(headers),
        st.integers(0, 200),
        st.binary(min_size=1, max_size=9),
    )


HEADERS = [encode_span_message(message) for message in (NEXT_PASS, STORE, FETCH, REPORT, START)]


@given(
    frames=st.lists(
        st.tuples(
            st.one_of(damaged(HEADERS), st.binary(max_size=60)),
            st.sampled_from([b"", ROWS, LAYER, ROWS[:-1]]),
        ),
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None)
def test_span_worker_survives_damaged_frames(frames: list[tuple[bytes, bytes]]) -> None:
    hosted = in_route()
    for header, payload in frames:
        hosted.receive(header, payload)
    assert hosted.still_works()


# The anchor


@pytest.mark.parametrize("tables", [(2,), (1, 1), (1, 2)])
def test_result_of_other_tables_is_refused(tables: tuple[int, ...]) -> None:
    extent = Extent(table=PageTable(pages=[0], number=1), start=0, stop=2)
    entry = RunningEntry(entry=cast("PassEntry[Any]", None), extent=extent, draws=True, taps=True)
    running = RunningStep(number=1, entries=[entry], changes=PoolChanges(), began_s=0.0)
    assert running.select((1,)) == [entry]
    with pytest.raises(BadInput, match="the result of pass 1 is of other tables"):
        running.select(tables)


class SilentChain:
    """Double of a chain of one span worker, which has layers 1 and 2 and never answers."""

    generation = num_hops = 1

    def layers_of(self, hop: int) -> range:
        return range(1, 3)

    def send_to(self, *_: Any) -> None:
        return


def fetched(layer: int) -> SpanFetched:
    return SpanFetched(generation=1, copy=1, layer=layer)


def saved_copy() -> SpanCopy:
    keys = np.zeros(2, np.int64)
    return SpanCopy(
        number=1, table=1, pages=(0,), keys=keys, layers=None, before=0, layer_bytes=len(LAYER)
    )


@pytest.mark.parametrize("after", [0, 5], ids=["asked", "waiting for a step"])
def test_copy_does_not_wait_for_rows_that_are_computed_again(after: int) -> None:
    now = [0.0]
    copies = SpanCopies(lambda: now[0])
    copies.append(saved_copy(), after=after)
    assert copies.take_ended(cast(SpanChain, SilentChain()), 0) == []
    now[0] = COPY_S + 1
    ((_, _, error),) = copies.take_ended(cast(SpanChain, SilentChain()), 0)
    assert isinstance(error, SessionInterrupted) and "try again" in error.message
    copies.receive(fetched(1), memoryview(LAYER))
    assert not copies.is_busy


@pytest.mark.parametrize(
    ("layer", "payload"),
    [(0, LAYER), (7, LAYER), (1, LAYER[:-1]), (1, b"")],
    ids=["own", "unknown", "short", "empty"],
)
def test_copied_layer_that_is_not_whole_or_not_asked_for_is_refused(
    layer: int, payload: bytes
) -> None:
    copies = SpanCopies()
    copies.append(saved_copy(), after=0)
    assert copies.take_ended(cast(SpanChain, SilentChain()), 0) == []
    with pytest.raises(BadInput, match="are not the rows of layer"):
        copies.receive(fetched(layer), memoryview(payload))
    for each in (1, 2):
        copies.receive(fetched(each), memoryview(LAYER))
    ((_, layers, error),) = copies.take_ended(cast(SpanChain, SilentChain()), 0)
    assert sorted(layers) == [1, 2] and error is None


def test_unreadable_message_breaks_the_route_off() -> None:
    with serving() as served:
        arrivals = SpanArrivals()
        connection = dial_as("anchor", served.listener.address, arrivals)
        worker = served.opened().connection
        chain = ConnectedChain(1, [connection], [SpanReady(generation=1, num_bytes=0)], arrivals)
        worker.send(b"\x93\xabSpanRefusal\x01\xa2\xff\xfe")
        assert chain.take(WAIT_S) == [] and chain.is_lost
        worker.close()
