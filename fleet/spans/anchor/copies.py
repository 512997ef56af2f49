"""Copies of one request's keys and values between an anchor and its span workers, for saved
sessions.

A copy begins only after the steps before it have ended, since a running step may use the same KV
pages.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, FleetError, SessionInterrupted, from_code
from fleet.spans.protocol.chain import SpanChain
from fleet.spans.protocol.messages import SpanFetch, SpanFetched, SpanStore, SpanStored

CopiedRows = tuple[int, dict[int, NDArray[np.uint8]], FleetError | None]
"""Result of one copy: its number, the fetched keys and values by layer, and the error if it failed.
"""
COPY_S = 20.0
"""Longest duration of a copy, waits included. While a span worker computes lost rows again, which
may take minutes, a copy fails instead of waiting for them.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class SpanCopy:
    """Copy of the keys and values of one page table (one request) to or from all span workers.

    `keys`: a 64-bit key of each row to copy. `layers`: bytes to store, one array per layer of the
    model; None if the copy fetches the span workers' layers. `before`: hash of the copied rows.
    `layer_bytes`: size of one layer's rows. `after`: number of the step that must end before the
    copy begins. `num_missing`: messages still expected from span workers. `wanted`: layers still to
    be fetched. `since_s`: time at which the copy was added to `SpanCopies` (`time.monotonic`).
    """

    number: int
    table: int
    pages: tuple[int, ...]
    keys: NDArray[np.int64]
    layers: Sequence[NDArray[np.uint8]] | None
    before: int
    layer_bytes: int
    after: int = 0
    since_s: float = 0.0
    has_begun: bool = False
    num_missing: int = 0
    fetched: dict[int, NDArray[np.uint8]] = field(default_factory=dict[int, NDArray[np.uint8]])
    wanted: set[int] = field(default_factory=set[int])
    error: FleetError | None = None


class SpanCopies:
    """All unfinished copies of an anchor, waiting or begun, by copy number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._copies: dict[int, SpanCopy] = {}
        self._clock = clock

    @property
    def is_busy(self) -> bool:
        return bool(self._copies)

    def append(self, copy: SpanCopy, *, after: int) -> None:
        """Add a copy, which begins once step `after` has ended; start the time limit `COPY_S`."""
        copy.after, copy.since_s = after, self._clock()
        self._copies[copy.number] = copy

    def receive(self, message: SpanFetched | SpanStored, payload: memoryview) -> None:
        """Record a span worker's answer to a copy: one fetched layer, a confirmation, or an error.

        Raises: BadInput if a fetched layer was not asked for or has the wrong size.
        """
        copy = self._copies.get(message.copy)
        if copy is None or not copy.has_begun:
            return
        copy.num_missing -= 1
        if message.error is not None:
            copy.error = from_code(message.error.code, message.error.message)
        elif isinstance(message, SpanFetched):
            if message.layer not in copy.wanted or payload.nbytes != copy.layer_bytes:
                raise BadInput(
                    f"{payload.nbytes} bytes are not the rows of layer {message.layer}, "
                    f"{copy.layer_bytes} bytes"
                )
            copy.wanted.discard(message.layer)
            copy.fetched[message.layer] = np.frombuffer(payload, np.uint8)

    def fail_all(self) -> None:
        """Fail all copies that have begun, since the worker that should answer may be lost."""
        for copy in self._copies.values():
            if copy.has_begun:
                copy.error = SessionInterrupted("a span worker was lost during the copy; try again")

    def _fail_late(self, now_s: float) -> None:
        for copy in self._copies.values():
            if now_s - copy.since_s > COPY_S:
                copy.error = SessionInterrupted(
                    f"the span workers had no time for the copy within {COPY_S:g} s, as while lost "
                    "rows are computed again; try again"
                )

    def take_ended(self, chain: SpanChain | None, completed: int) -> list[CopiedRows]:
        """Begin the copies whose steps have ended; remove and return the copies that are complete,
        or have failed. Messages that arrive later for a removed copy are ignored.

        `completed`: number of the last completed step.
        """
        self._fail_late(self._clock())
        for copy in self._copies.values():
            is_waiting = not copy.has_begun and copy.error is None
            if is_waiting and copy.after <= completed and chain is not None:
                copy.has_begun = True
                _begin(copy, chain)
        ended = [
            copy
            for copy in self._copies.values()
            if copy.error is not None or (copy.has_begun and copy.num_missing <= 0)
        ]
        for copy in ended:
            del self._copies[copy.number]
        return [(copy.number, copy.fetched, copy.error) for copy in ended]


def _begin(copy: SpanCopy, chain: SpanChain) -> None:
    for hop in range(chain.num_hops):
        if copy.layers is None:
            fetch = SpanFetch(
                generation=chain.generation,
                copy=copy.number,
                table=copy.table,
                pages=copy.pages,
                num_rows=len(copy.keys),
                before=copy.before,
            )
            copy.num_missing += len(chain.layers_of(hop))
            copy.wanted |= set(chain.layers_of(hop))
            chain.send_to(hop, fetch)
            continue
        copy.num_missing += 1
        its = chain.layers_of(hop)
        for layer in its:
            store = SpanStore(
                generation=chain.generation,
                copy=copy.number,
                layer=layer,
                table=copy.table,
                pages=copy.pages,
                keys=copy.keys.tobytes(),
                is_last=layer == its[-1],
            )
            chain.send_to(hop, store, np.ascontiguousarray(copy.layers[layer]).data)
