"""The step queue of an anchor: steps run through the span workers of its route, several at a time.

Forward: the anchor computes its layers when a step begins, and samples from the logits or last
hidden states that return. Reverse: the embeddings go out, and the anchor computes its layers and
the output head from the hidden states that return.
Legend: N rows of a step, H hidden size, S rows sampled from, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput, FleetError, SpanPrefixMismatch, from_code
from fleet.engine.base import EngineOutput
from fleet.engine.torch.kv_pool import KVPool, PageTable, PoolChanges
from fleet.engine.torch.pass_queue import FAILURES, PassEntry, PassFailure, PassQueue
from fleet.engine.torch.passes import Drawn, PassDone, is_due
from fleet.engine.torch.program import Program, TaskT
from fleet.engine.torch.rows import joined
from fleet.engine.torch.tiles import TILE_ROWS, padded
from fleet.spans.anchor.copies import SpanCopies, SpanCopy
from fleet.spans.anchor.running import RunningEntry, RunningStep, by_table
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
    """A model program whose process has only a span of the layers. `taps_elsewhere`: True if the
    tapped layer is in a span worker.
    """

    @property
    def layers(self) -> SpanLayers: ...

    @property
    def taps_elsewhere(self) -> bool: ...

    def draw_from(
        self, tasks: Sequence[TaskT], logits_SV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Sample one token per task, like `draw`, but from logits that another process computed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPassOptions:
    """Settings of an anchor's steps.

    `returned`: what the last span worker returns (see `Returned`); "rows", the hidden states of all
    rows, if the anchor has the last layers. `tiled`: compute rows in fixed tiles (invariant
    numerics). `window`: most steps in flight; None for two more than there are span workers.
    `wire_dtype`: dtype of hidden states between processes. `keep_bytes`: see `SpanLog`.
    """

    returned: Returned
    tiled: bool
    wire_dtype: str
    window: int | None = None
    keep_bytes: int = 0


class SpanPasses(PassQueue[TaskT]):
    """The step queue of an anchor. Not thread-safe.

    Invariants: steps are sent, computed by every process, and completed in the order of their
    numbers. A step that has begun ends even if a worker is lost: the next chain of workers computes
    what is missing.
    """

    def __init__(
        self, program: SpanProgram[TaskT], pool: KVPool, route: RouteSlot, options: SpanPassOptions
    ) -> None:
        self._program = program
        self._pool = pool
        self._route = route
        self._options = options
        self._computer = SpanComputer(program.layers, pool, tiled=options.tiled)
        self._keys = RowKeys()
        self._chain: SpanChain | None = None
        self._hashes: dict[int, PrefixHashes] = {}
        self._unsent = PoolChanges()
        self._running: dict[int, RunningStep[TaskT]] = {}
        self._log, self._copies = SpanLog(options.keep_bytes), SpanCopies()
        self._suspects: list[TaskT] = []
        self._break_noted = False
        self._num_begun = 0
        self._num_completed = 0
        self._num_reported = 0
        self._like = torch.empty(0, dtype=pool.data.dtype, device=pool.data.device)
        self._tally = PassTally()
        self._earlier_bytes = 0, 0
        """Bytes received and sent over chains before the present one."""
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
        return next((running.is_complete for running in self._running.values()), False)

    @property
    def is_open(self) -> bool:
        return self._chain is not None and not self._chain.is_broken

    @property
    def retry_s(self) -> float:
        return RETRY_S

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
        """True if no state of any request is held."""
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
        """Return the bytes received from, and sent to, span workers over all chains."""
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
        """Record running steps' tasks as suspects, once, if a worker's death broke the chain."""
        if self._chain is not None and self._chain.is_broken and not self._break_noted:
            self._break_noted = True
            if not self._chain.is_lost:
                return
            tasks = [
                each.entry.task
                for running in self._running.values()
                for each in running.entries
                if not each.entry.is_void
            ]
            self._suspects = list({id(task): task for task in tasks}.values())

    def take_suspects(self) -> Sequence[TaskT]:
        self._note_break()
        suspects, self._suspects = self._suspects, []
        return suspects

    def _resume(self, chain: SpanChain) -> None:
        """Continue running steps on a new chain: the anchor and each worker resend what the next
        process lacks.
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
        """Report closed page tables and completed steps to the span workers while no step carries
        the report, so that the workers free what they keep.
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
        """Add the pool's new changes to those changes that no step has sent to the span workers."""
        new = self._pool.take_changes()
        for table in new.closed:
            self._hashes.pop(table, None)
        self._unsent = PoolChanges(
            zeroed=self._unsent.zeroed + new.zeroed, closed=self._unsent.closed + new.closed
        )

    def max_requests(self, num_open: int) -> int:
        """Return the most requests of one step: an equal share of `num_open` requests per process,
        so that all processes have a step to compute; with tiles, a multiple of `TILE_ROWS`.
        """
        share = -(-num_open // (self._chain.num_hops + 1 if self._chain is not None else 1))
        return max(1, -(-share // TILE_ROWS) * TILE_ROWS if self._options.tiled else share)

    def begin(self, entries: Sequence[PassEntry[TaskT]]) -> None:
        assert self._chain is not None
        began_s = time.monotonic()
        self._take_changes()
        changes = self._unsent
        running = RunningStep(
            number=self._num_begun + 1,
            entries=[self._frozen(entry) for entry in entries],
            changes=changes,
            began_s=began_s,
        )
        rows_NH = joined(
            [entry.task.rows(entry.extent.start, entry.extent.stop) for entry in entries]
        )
        keys_N = self._keys.of(rows_NH)
        computed = SpanRows(rows_NH=rows_NH)
        if not self._is_last:
            self._pool.apply(changes)
            computed = self._computer.run(rows_NH, running.extents)
        if computed.tapped_NH is not None:
            running.tapped = by_table(running.entries, computed.tapped_NH)
        self._num_begun = running.number
        message = SpanPass(
            generation=self._chain.generation,
            number=running.number,
            extents=self._described(running.entries, keys_N.tobytes()),
            zeroed=tuple(changes.zeroed),
            closed=tuple(changes.closed),
            completed=self._num_completed,
        )
        self._unsent = PoolChanges()
        rows = rows_to_wire(computed.rows_NH, self._options.wire_dtype)
        self._log.add(message, rows)
        running.sent_s = time.monotonic()
        self._chain.send(message, rows, when_sent=self._tally.sending(running.sent_s))
        self._running[running.number] = running

    def _frozen(self, entry: PassEntry[TaskT]) -> RunningEntry[TaskT]:
        """Return an entry with a copy of its table's present pages, since the table may lose pages
        to another request while the step runs.
        """
        extent = entry.extent
        table = PageTable(pages=list(extent.table.pages), number=extent.table.number)
        return RunningEntry(
            entry=entry,
            extent=msgspec.structs.replace(extent, table=table),
            draws=is_due(entry.task, extent),
            taps=self._program.taps_elsewhere
            and entry.task.needs_tapped(extent.start, extent.stop),
        )

    def _described(
        self, entries: Sequence[RunningEntry[TaskT]], keys: bytes
    ) -> tuple[SpanExtent, ...]:
        described: list[SpanExtent] = []
        first = 0
        for each in entries:
            extent, hashes = each.extent, self._hashes.setdefault(each.table, PrefixHashes())
            before = hashes.before(extent.start)
            assert before is not None, f"rows before {extent.start} were never sent"
            its_keys = keys[8 * first : 8 * (first + extent.num_rows)]
            hashes.extend(extent.start, np.frombuffer(its_keys, np.uint64))
            first += extent.num_rows
            described.append(
                SpanExtent(
                    table=each.table,
                    pages=tuple(extent.table.pages),
                    start=extent.start,
                    stop=extent.stop,
                    before=before,
                    keys=its_keys,
                    draws=each.draws,
                    taps=each.taps,
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
        """Handle a span worker's message: a step's result, tapped rows, or part of a copy. Raises:
        BadInput if it fits no step or copy.
        """
        message = arrival.message
        if isinstance(message, SpanFetched | SpanStored):
            self._copies.receive(message, arrival.payload)
        if not isinstance(message, SpanResult | SpanTapped) or message.generation != generation:
            return
        running = self._running.get(message.number)
        if running is None:
            return
        entries = running.select(message.tables)
        if isinstance(message, SpanTapped):
            # A worker that has replaced another one may send fewer of them.
            num_rows = sum(each.extent.num_rows for each in entries)
            running.tapped = dict(running.tapped or {})
            if entries:
                running.tapped |= by_table(entries, self._from_wire(arrival.payload, num_rows))
            running.arrived_s = arrival.at_s
        elif running.result is None:
            check_rows(arrival.payload, message.num_rows, self._options.wire_dtype)
            running.result, running.payload = message, arrival.payload
            running.arrived_s = arrival.at_s

    def _from_wire(self, payload: memoryview, num_rows: int) -> Tensor:
        return rows_from_wire(payload, num_rows, self._options.wire_dtype, self._like)

    def take_ended(self) -> PassDone | PassFailure:
        continued_s = time.monotonic()
        running = self._running.pop(next(iter(self._running)))
        result = running.result
        assert result is not None and running.is_complete, "a pass that has not ended"
        self._num_completed = running.number
        if self._is_last:
            self._pool.apply(running.changes)
        if result.error is not None:
            return PassFailure(
                error=from_code(result.error.code, result.error.message),
                loses_rows=result.error.loses_rows,
            )
        if running.lacks_taps:
            lost = SpanPrefixMismatch(
                "a span worker was lost before its tapped rows arrived; they are computed again"
            )
            return PassFailure(error=lost, loses_rows=True)
        due = [each.entry.task for each in running.entries if each.draws]
        before = [task.num_rows for task in due]
        try:
            done = self._completed(running, result)
            self._count(running, continued_s)
            return done
        except FAILURES as error:
            if [task.num_rows for task in due] != before:
                raise
            return PassFailure(error=error)

    def _count(self, running: RunningStep[TaskT], continued_s: float) -> None:
        """Add an ended step to the statistics. `continued_s`: time at which the anchor began to
        compute from the step's result.
        """
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

    def _completed(self, running: RunningStep[TaskT], result: SpanResult) -> PassDone:
        """Compute the rest of a step from its result, and sample. Requests that ended while the
        step ran may have no result.
        """
        rows_NH, tapped = self._from_wire(running.payload, result.num_rows), running.tapped or {}
        left = running.select(result.tables)
        due = [each.entry for each in left if each.draws]
        program, drawn = self._program, Drawn()
        if self._is_last and left:
            extents, draws = [each.extent for each in left], [each.draws for each in left]
            done = self._computer.run(rows_NH, extents)
            tapped = by_table(left, done.tapped_NH) if done.tapped_NH is not None else tapped
            last_SH = last_rows(done.rows_NH, extents, draws)
            drawn = self._draw(due, last_SH, program.draw, tiled=self._options.tiled)
        elif due and self._options.returned == "last_rows":
            last_SH = self._computer.finish(rows_NH)
            drawn = self._draw(due, last_SH, program.draw, tiled=self._options.tiled)
        elif due:
            drawn = self._draw(due, rows_NH, program.draw_from, tiled=False)
        of_entries = {
            id(each.entry.extent): tapped[each.table] for each in left if each.table in tapped
        }
        return PassDone(tapped=of_entries, drawn=drawn)

    def _draw(
        self,
        due: Sequence[PassEntry[TaskT]],
        rows_SX: Tensor,
        draw: Callable[[Sequence[TaskT], Tensor], Sequence[Sequence[EngineOutput]]],
        *,
        tiled: bool,
    ) -> Drawn:
        """Sample a token per request that has not ended. `rows_SX`: hidden states or logits."""
        at = [number for number, entry in enumerate(due) if not entry.is_void]
        current = [due[number] for number in at]
        if len(at) < len(due):
            rows_SX = rows_SX[torch.tensor(at, dtype=torch.int64, device=rows_SX.device)]
        size, drawn = TILE_ROWS if tiled else max(1, len(at)), Drawn()
        for first in range(0, len(at), size):
            some, rows = current[first : first + size], rows_SX[first : first + size]
            outputs = draw([entry.task for entry in some], padded(rows) if tiled else rows)
            drawn |= {id(entry.extent): output for entry, output in zip(some, outputs, strict=True)}
        return drawn
