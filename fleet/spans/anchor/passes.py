"""The queue of an anchor: its passes go through the span workers of its route, several at a time.

Forward: the anchor computes its layers when a pass begins, and draws from the logits or last rows
that return. Reverse: the embeddings go out, and the anchor computes its layers, and the head, from
the rows that return.
Legend: N rows of a pass, H hidden size, S rows drawn from, V vocabulary.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput, FleetError, SpanPrefixMismatch, from_code
from fleet.engine.base import EngineOutput
from fleet.engine.torch.kv_pool import KVPool, PageTable, PoolChanges
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.pass_queue import FAILURES, PassEntry, PassFailure, PassQueue
from fleet.engine.torch.passes import Drawn, PassDone, is_due
from fleet.engine.torch.program import Program, TaskT
from fleet.engine.torch.rows import joined
from fleet.engine.torch.tiles import TILE_ROWS, padded
from fleet.spans.anchor.copies import SpanCopies, SpanCopy
from fleet.spans.protocol.chain import RouteSlot, SpanArrival, SpanChain
from fleet.spans.protocol.figures import PassSums, PassTally, SpanFigures
from fleet.spans.protocol.messages import (
    Returned,
    SpanExtent,
    SpanFetched,
    SpanPass,
    SpanReport,
    SpanResult,
    SpanStored,
    SpanTapped,
)
from fleet.spans.protocol.pass_log import SpanLog
from fleet.spans.torch.model import SpanComputer, SpanLayers, SpanRows, last_rows
from fleet.spans.torch.prefix_hashes import PrefixHashes, RowKeys
from fleet.spans.torch.wire_rows import check_rows, rows_from_wire, rows_to_wire

RETRY_S = 0.05


class SpanProgram(Program[TaskT], Protocol[TaskT]):
    """A program whose process has a span of the layers. `taps_elsewhere`: the tapped layer is in a
    span worker.
    """

    @property
    def layers(self) -> SpanLayers: ...

    @property
    def taps_elsewhere(self) -> bool: ...

    def draw_from(
        self, tasks: Sequence[TaskT], logits_SV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Draw as `draw` does, from logits that another process computed."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class RunningPass(Generic[TaskT]):
    """A pass that has begun. `extents`: with the pages as they were then. `draws`: for each entry,
    whether a draw follows.

    `taps`: for each entry, whether it needs tapped rows of a span worker. `tapped`: rows by the
    number of their table; None until they arrive. Times by `time.monotonic`: `began_s`; `sent_s`,
    when its rows were ready to be sent; `arrived_s`, when the last part of its result arrived.
    """

    number: int
    entries: Sequence[PassEntry[TaskT]]
    extents: list[Extent]
    draws: list[bool]
    taps: list[bool]
    changes: PoolChanges
    began_s: float
    sent_s: float = 0.0
    arrived_s: float = 0.0
    tapped: dict[int, Tensor] | None = None
    payload: memoryview | None = None
    result: SpanResult | None = None

    def of_tables(self, tables: Sequence[int]) -> "RunningPass[TaskT]":
        """Return the part of the pass that has these tables, in their order: a pass that is sent
        again may have another one.
        """
        number_of = {extent.table.number: number for number, extent in enumerate(self.extents)}
        at = [number_of[table] for table in tables]
        return RunningPass(
            number=self.number,
            changes=self.changes,
            began_s=self.began_s,
            entries=[self.entries[number] for number in at],
            extents=[self.extents[number] for number in at],
            draws=[self.draws[number] for number in at],
            taps=[self.taps[number] for number in at],
        )

    def check_tables(self, tables: Sequence[int]) -> None:
        """Raises: BadInput unless these are tables of the pass, each of them once."""
        if len(set(tables)) < len(tables) or not {
            extent.table.number for extent in self.extents
        }.issuperset(tables):
            raise BadInput(f"the result of pass {self.number} is of other tables")

    @property
    def untapped(self) -> list[int]:
        """The tables whose tapped rows are needed, and have not arrived. A request that has ended
        needs none.
        """
        parts = zip(self.entries, self.extents, self.taps, strict=True)
        needed = [
            extent.table.number for entry, extent, taps in parts if taps and not entry.is_void
        ]
        return [table for table in needed if table not in (self.tapped or {})]

    def divided(self, rows_NH: Tensor) -> dict[int, Tensor]:
        """Return the rows of each table."""
        parts = rows_NH.split([extent.num_rows for extent in self.extents])
        return {extent.table.number: part for extent, part in zip(self.extents, parts, strict=True)}

    def tapped_of_entries(self, tapped: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the tapped rows of the tables by the `id` of the entry's extent."""
        pairs = zip(self.entries, self.extents, strict=True)
        return {
            id(entry.extent): tapped[extent.table.number]
            for entry, extent in pairs
            if extent.table.number in tapped
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPassOptions:
    """`returned`: what the last worker returns: all rows where the anchor is last.

    `window`: the most passes in flight; None: two more than there are workers. `wire_dtype`: of
    rows between processes.
    `keep_bytes`: see `SpanLog`.
    """

    returned: Returned
    tiled: bool
    wire_dtype: str
    window: int | None = None
    keep_bytes: int = 0


class SpanPasses(PassQueue[TaskT]):
    """Invariants: passes are sent, computed by every process, and completed in the order of their
    numbers. A pass that has begun ends, also when a worker is lost: the next chain computes what is
    missing.
    """

    def __init__(
        self, program: SpanProgram[TaskT], pool: KVPool, route: RouteSlot, options: SpanPassOptions
    ) -> None:
        self._program, self._pool, self._route, self._options = program, pool, route, options
        self._computer = SpanComputer(program.layers, pool, tiled=options.tiled)
        self._keys = RowKeys()
        self._chain: SpanChain | None = None
        self._hashes: dict[int, PrefixHashes] = {}
        self._unsent = PoolChanges()
        self._running: dict[int, RunningPass[TaskT]] = {}
        self._log, self._copies = SpanLog(options.keep_bytes), SpanCopies()
        self._suspects: list[TaskT] = []
        self._break_noted = False
        self._num_begun = self._num_completed = self._num_reported = 0
        self._like = torch.empty(0, dtype=pool.data.dtype, device=pool.data.device)
        self._tally = PassTally()
        self._earlier_bytes = 0, 0
        """Bytes received and sent over earlier chains."""
        weights = {weight.data_ptr(): weight.nbytes for weight in program.layers.weights().values()}
        self._weight_bytes = sum(weights.values())

    @property
    def _is_last(self) -> bool:
        return self._options.returned == "rows"

    @property
    def num_free(self) -> int:
        return max(0, self._window - len(self._running)) if self.is_open else 0

    @property
    def _window(self) -> int:
        assert self._chain is not None
        return self._options.window or self._chain.num_hops + 2

    @property
    def has_ended(self) -> bool:
        return next((self._is_complete(running) for running in self._running.values()), False)

    def _is_complete(self, running: RunningPass[TaskT]) -> bool:
        """Return True if all has arrived that ends the pass."""
        result = running.result
        return result is not None and (
            result.error is not None or running.tapped is not None or not running.untapped
        )

    @property
    def is_open(self) -> bool:
        return self._chain is not None and not self._chain.is_broken

    @property
    def retry_s(self) -> float:
        return RETRY_S

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def first_layer(self) -> int:
        return self._program.layers.span.first

    @property
    def num_other_layers(self) -> int:
        return self._route.num_layers - self._pool.shape.num_layers

    def copy_rows(
        self,
        number: int,
        table: PageTable,
        keys: NDArray[np.int64],
        layers: Sequence[NDArray[np.uint8]] | None,
    ) -> bool:
        if layers is not None:
            self._take_changes()
            pages = set(table.pages)  # which need not be zeroed, since they are written
            self._unsent.zeroed = [part for part in self._unsent.zeroed if part[0] not in pages]
            self._hashes[table.number] = PrefixHashes()
            self._hashes[table.number].extend(0, keys.view(np.uint64))
        before = self._hashes.get(table.number, PrefixHashes()).before(len(keys))
        assert before is not None, f"{len(keys)} rows were never sent"
        copy = SpanCopy(
            number=number,
            pages=tuple(table.pages),
            table=table.number,
            keys=keys,
            layers=layers,
            before=before,
            layer_bytes=len(keys)
            * self._pool.page_bytes
            // (self._pool.page_size * self._pool.shape.num_layers),
        )
        self._copies.append(copy, after=self._num_begun)
        return True

    def take_copied(self) -> Sequence[tuple[int, dict[int, NDArray[np.uint8]], FleetError | None]]:
        if self.is_open and self._copies.is_busy:
            self._receive(0)
        if self._chain is not None and self._chain.is_broken:
            self._copies.fail_all()  # not only by the next chain, which may need long
        return self._copies.take_ended(self._chain, self._num_completed)

    @property
    def is_empty(self) -> bool:
        """True if nothing of any request is held."""
        return not (self._running or self._hashes or self._log.num_tables)

    def figures(self) -> SpanFigures:
        received, sent = self._num_bytes()
        total, recent = self._tally.sums()
        return SpanFigures(
            weight_bytes=self._weight_bytes,
            received_bytes=received,
            sent_bytes=sent,
            total=total,
            recent=recent,
        )

    def _num_bytes(self) -> tuple[int, int]:
        """Return the bytes that were received over all chains, and sent."""
        (received, sent), chain = self._earlier_bytes, self._chain
        own = chain.num_bytes if chain is not None else (0, 0)
        return received + own[0], sent + own[1]

    def outage(self) -> FleetError | None:
        return None if self.is_open else self._route.outage()

    def follow_route(self) -> None:
        self._note_break()
        following = None if self._suspects else self._route.take_chain()
        if following is not None:
            self._resume(following)
        elif self.is_open and not self._running:
            self._report()

    def _note_break(self) -> None:
        """Suspect the tasks of running passes, once, when the chain breaks by the death of a
        worker.
        """
        if self._chain is not None and self._chain.is_broken and not self._break_noted:
            self._break_noted = True
            if not self._chain.is_lost:
                return
            entries = [
                entry
                for running in self._running.values()
                for entry in running.entries
                if not entry.is_void
            ]
            self._suspects = list({id(entry.task): entry.task for entry in entries}.values())

    def take_suspects(self) -> Sequence[TaskT]:
        self._note_break()
        suspects, self._suspects = self._suspects, []
        return suspects

    def _resume(self, chain: SpanChain) -> None:
        """Continue with another chain: each worker sends again what the next one lacks, and so does
        the anchor.
        """
        if self._chain is not None:
            self._chain.close()
            self._earlier_bytes = self._num_bytes()
        self._chain, self._break_noted = chain, False
        self._copies.fail_all()
        self._log.keep_only(self._pool.open_tables)
        chain.start(self._num_completed, self._pool.open_tables)
        self._num_reported = self._num_completed
        for message, rows in self._log.after(chain.first_has):
            chain.send(msgspec.structs.replace(message, generation=chain.generation), *rows)

    def _report(self) -> None:
        """Report closed tables and completed passes while no pass does, so that the workers free
        what they keep for them.
        """
        assert self._chain is not None
        self._take_changes()
        if not self._unsent.closed and self._num_reported == self._num_completed:
            return
        closed, self._unsent = tuple(self._unsent.closed), PoolChanges(zeroed=self._unsent.zeroed)
        self._num_reported = self._num_completed
        self._log.close(closed)
        self._log.complete(self._num_completed)
        self._chain.send(
            SpanReport(
                generation=self._chain.generation, closed=closed, completed=self._num_completed
            )
        )

    def _take_changes(self) -> None:
        """Add the pool's changes to those that no pass has reported."""
        new = self._pool.take_changes()
        for table in new.closed:
            self._hashes.pop(table, None)
        self._unsent = PoolChanges(
            zeroed=self._unsent.zeroed + new.zeroed, closed=self._unsent.closed + new.closed
        )

    def max_requests(self, num_open: int) -> int:
        """Divide open requests among the processes, so that each has a pass to compute; in whole
        tiles if rows are in tiles.
        """
        share = -(-num_open // (self._chain.num_hops + 1 if self._chain is not None else 1))
        return max(1, -(-share // TILE_ROWS) * TILE_ROWS if self._options.tiled else share)

    def begin(self, entries: Sequence[PassEntry[TaskT]]) -> None:
        assert self._chain is not None
        began_s = time.monotonic()
        self._take_changes()
        changes = self._unsent
        extents = [_frozen(entry.extent) for entry in entries]
        rows_NH = joined(
            [entry.task.rows(entry.extent.start, entry.extent.stop) for entry in entries]
        )
        keys_N = self._keys.of(rows_NH)
        computed = SpanRows(rows_NH=rows_NH)
        if not self._is_last:
            self._pool.apply(changes)
            computed = self._computer.run(rows_NH, extents)
        self._num_begun += 1
        running = RunningPass(
            number=self._num_begun,
            entries=entries,
            extents=extents,
            draws=[is_due(entry.task, entry.extent) for entry in entries],
            taps=[self._taps(entry) for entry in entries],
            changes=changes,
            began_s=began_s,
        )
        if computed.tapped_NH is not None:
            running.tapped = running.divided(computed.tapped_NH)
        message = self._message(running.number, self._described(running, keys_N.tobytes()), changes)
        self._unsent = PoolChanges()
        rows = rows_to_wire(computed.rows_NH, self._options.wire_dtype)
        self._log.add(message, rows)
        running.sent_s = time.monotonic()
        self._chain.send(message, rows, when_sent=self._tally.sending(running.sent_s))
        self._running[running.number] = running

    def _taps(self, entry: PassEntry[TaskT]) -> bool:
        """Return True if a span worker is to return tapped rows of an entry."""
        return self._program.taps_elsewhere and entry.task.needs_tapped(
            entry.extent.start, entry.extent.stop
        )

    def _message(
        self, number: int, extents: tuple[SpanExtent, ...], changes: PoolChanges
    ) -> SpanPass:
        assert self._chain is not None
        zeroed, closed = tuple(changes.zeroed), tuple(changes.closed)
        return SpanPass(
            generation=self._chain.generation,
            number=number,
            extents=extents,
            zeroed=zeroed,
            closed=closed,
            completed=self._num_completed,
        )

    def _described(self, running: RunningPass[TaskT], keys: bytes) -> tuple[SpanExtent, ...]:
        described: list[SpanExtent] = []
        first = 0
        for extent, draws, taps in zip(running.extents, running.draws, running.taps, strict=True):
            hashes = self._hashes.setdefault(extent.table.number, PrefixHashes())
            before = hashes.before(extent.start)
            assert before is not None, f"rows before {extent.start} were never sent"
            its_keys = keys[8 * first : 8 * (first + extent.num_rows)]
            hashes.extend(extent.start, np.frombuffer(its_keys, np.uint64))
            first += extent.num_rows
            described.append(
                SpanExtent(
                    table=extent.table.number,
                    pages=tuple(extent.table.pages),
                    start=extent.start,
                    stop=extent.stop,
                    before=before,
                    keys=its_keys,
                    draws=draws,
                    taps=taps,
                    rope_len=extent.rope_len,
                )
            )
        return tuple(described)

    def await_ended(self, timeout_s: float) -> bool:
        if not self.has_ended and self.is_open:
            self._receive(timeout_s)
        return self.has_ended

    def _receive(self, timeout_s: float) -> None:
        assert self._chain is not None
        for arrival in self._chain.take(timeout_s):
            try:
                self._receive_one(arrival, self._chain.generation)
            except BadInput as error:
                self._chain.break_off(error.message)
                return

    def _receive_one(self, arrival: SpanArrival, generation: int) -> None:
        """Raises: BadInput for a message that does not fit what was sent."""
        message = arrival.message
        if isinstance(message, SpanFetched | SpanStored):
            self._copies.receive(message, arrival.payload)
        if not isinstance(message, SpanResult | SpanTapped) or message.generation != generation:
            return
        running = self._running.get(message.number)
        if running is None:
            return
        running.check_tables(message.tables)
        if isinstance(message, SpanTapped):
            self._receive_tapped(running, message, arrival.payload)
            running.arrived_s = arrival.at_s
        elif running.result is None:
            check_rows(arrival.payload, message.num_rows, self._options.wire_dtype)
            running.result, running.payload, running.arrived_s = (
                message,
                arrival.payload,
                arrival.at_s,
            )

    def _receive_tapped(
        self, running: RunningPass[TaskT], message: SpanTapped, payload: memoryview
    ) -> None:
        """Note the tapped rows of a pass. A worker that has replaced another one may send fewer of
        them.
        """
        tapped = running.of_tables(message.tables)
        num_rows = sum(extent.num_rows for extent in tapped.extents)
        arrived = tapped.divided(self._from_wire(payload, num_rows)) if message.tables else {}
        running.tapped = (running.tapped or {}) | arrived

    def _from_wire(self, payload: memoryview, num_rows: int) -> Tensor:
        return rows_from_wire(payload, num_rows, self._options.wire_dtype, self._like)

    def take_ended(self) -> PassDone | PassFailure:
        continued_s = time.monotonic()
        running = self._running.pop(next(iter(self._running)))
        result = running.result
        assert result is not None and self._is_complete(running), "a pass that has not ended"
        self._num_completed = running.number
        if self._is_last:
            self._pool.apply(running.changes)
        if result.error is not None:
            return PassFailure(
                error=from_code(result.error.code, result.error.message),
                loses_rows=result.error.loses_rows,
            )
        if running.untapped:
            lost = SpanPrefixMismatch(
                "a span worker was lost before its tapped rows arrived; they are computed again"
            )
            return PassFailure(error=lost, loses_rows=True)
        due = [entry for entry, draws in zip(running.entries, running.draws, strict=True) if draws]
        before = [entry.task.num_rows for entry in due]
        try:
            done = self._completed(running, result)
            self._count(running, continued_s)
            return done
        except FAILURES as error:
            if [entry.task.num_rows for entry in due] != before:
                raise
            return PassFailure(error=error)

    def _count(self, running: RunningPass[TaskT], continued_s: float) -> None:
        """Count a pass that ends now. `continued_s`: when the computation from its result began."""
        ended_s = time.monotonic()
        computed_s = running.sent_s - running.began_s + ended_s - continued_s
        self._tally.add(
            PassSums(
                num_passes=1,
                num_rows=sum(extent.num_rows for extent in running.extents),
                waited_us=int(1e6 * (continued_s - running.arrived_s)),
                computed_us=int(1e6 * computed_s),
                took_us=int(1e6 * (ended_s - running.began_s)),
            )
        )

    def _completed(self, running: RunningPass[TaskT], result: SpanResult) -> PassDone:
        """Compute what is left of a pass, and draw. Entries without a result have ended while the
        pass ran.
        """
        assert running.payload is not None
        rows_NH, tapped = self._from_wire(running.payload, result.num_rows), running.tapped
        left = running.of_tables(result.tables)
        due = [entry for entry, draws in zip(left.entries, left.draws, strict=True) if draws]
        drawn: Drawn = {}
        if self._is_last and left.entries:
            done = self._computer.run(rows_NH, left.extents)
            tapped = left.divided(done.tapped_NH) if done.tapped_NH is not None else tapped
            drawn = self._draw(due, last_rows(done.rows_NH, left.extents, left.draws))
        elif due and self._options.returned == "last_rows":
            drawn = self._draw(due, self._computer.finish(rows_NH))
        elif due:
            drawn = self._draw_from(due, rows_NH)
        return PassDone(tapped=left.tapped_of_entries(tapped or {}), drawn=drawn)

    def _draw(self, due: Sequence[PassEntry[TaskT]], last_SH: Tensor) -> Drawn:
        """Draw from the last rows of entries, in tiles if numerics are invariant."""
        current, last_SH = _current(due, last_SH)
        size = TILE_ROWS if self._options.tiled else max(1, len(current))
        drawn: Drawn = {}
        for first in range(0, len(current), size):
            some, rows_SH = current[first : first + size], last_SH[first : first + size]
            outputs = self._program.draw(
                [entry.task for entry in some], padded(rows_SH) if self._options.tiled else rows_SH
            )
            drawn |= {id(entry.extent): output for entry, output in zip(some, outputs, strict=True)}
        return drawn

    def _draw_from(self, due: Sequence[PassEntry[TaskT]], logits_SV: Tensor) -> Drawn:
        current, logits_SV = _current(due, logits_SV)
        if not current:
            return {}
        outputs = self._program.draw_from([entry.task for entry in current], logits_SV)
        return {id(entry.extent): output for entry, output in zip(current, outputs, strict=True)}


def _frozen(extent: Extent) -> Extent:
    """Return an extent with the pages that the table has now: it may lose them to another request
    while the pass runs.
    """
    table = PageTable(pages=list(extent.table.pages), number=extent.table.number)
    return msgspec.structs.replace(extent, table=table)


def _current(
    due: Sequence[PassEntry[TaskT]], rows_SX: Tensor
) -> tuple[list[PassEntry[TaskT]], Tensor]:
    """Return the entries that are not void, with their rows."""
    at = [number for number, entry in enumerate(due) if not entry.is_void]
    if len(at) == len(due):
        return list(due), rows_SX
    return [due[number] for number in at], rows_SX[
        torch.tensor(at, dtype=torch.int64, device=rows_SX.device)
    ]
