"""A deterministic engine without weights, for contract tests and control-plane benchmarks. Knows no
stage.

Each input row updates a per-request checksum, from which output rows are computed. Outputs depend
on the input rows only, not on how they were cut into pieces or when they arrived.
"""

import math
import time
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fleet.core.ids import DECODE, RequestId
from fleet.engine.base import (
    Arrays,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    KVStats,
)
from fleet.engine.capabilities import KVBlocks, KVPagePool
from fleet.engine.turns import check_is_new
from fleet.engine.unread import UnreadPieces

OUT = "out"
"""Name of the array of output rows, also in a history."""


@dataclass(slots=True)
class _Running:
    """State of a request in the fake engine.

    `out`: all numbers produced, for an export; `replayed`: output rows produced by another engine
    that are still to be returned. `trail`: the input rows absorbed, each with the checksum after
    it; `cached`: the trail of the session's last request. `due_s`: the earliest time of the next
    step. `unread`: count of the input pieces of which rows are left in `rows`.
    """

    request: EngineRequest
    state: int = 0
    rows: deque[bytes] = field(default_factory=deque[bytes])
    absorbed: int = 0
    made: int = 0
    out: "array[int]" = field(default_factory=lambda: array("i"))
    replayed: list[list[int]] = field(default_factory=list[list[int]])
    fed_final: bool = False
    paused: bool = False
    trail: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    cached: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    due_s: float = 0.0
    unread: UnreadPieces = field(default_factory=UnreadPieces)

    def absorb(self, row: bytes) -> None:
        self.state = zlib.crc32(row, self.state)
        self.absorbed += 1
        if self.request.session:
            self.trail.append((row, self.state))

    def reuse_cached(self) -> int:
        """Skip the input rows with which the session's last request began too, except the last
        input row; return the number of rows skipped.
        """
        for row, state in self.cached:
            if len(self.rows) < 2 or self.rows[0] != row:
                break
            self.state = state
            self.trail.append((self.rows.popleft(), state))
        self.absorbed, self.cached = len(self.trail), []
        return self.absorbed

    def emit(self, width: int) -> list[int]:
        if not self.made:  # not before: a cached prompt must serve any seed
            self.state = zlib.crc32(b"%d" % self.request.sampling.seed, self.state)
        self.made += 1
        values: list[int] = []
        for column in _columns(width):
            self.state = zlib.crc32(column, self.state)
            values.append(self.state & 0x7FFF)
        return values


class FakeEngine(Engine):
    """Engine without a model, for tests: output rows are checksums of the input so far. A request
    gets up to `max_tokens` rows, one per step.

    `autoregressive`: a step consumes one input row, waiting for it until the input is final; if
    False, the engine acts as a codec: one output row per input row, without a bound. `source`: the
    whole input is a prompt, consumed before the first output row and cached for its session.
    `step_s`: minimum interval between the steps of one request. Rows of a history replace the first
    rows produced; later rows are the same as without a history.

    Shapes: each output has `out`: int32 [n, width], and so has a history.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        width: int = 1,
        autoregressive: bool = True,
        source: bool = False,
        step_s: float = 0.0,
    ) -> None:
        self._max_batch, self._width = max_batch, width
        self._autoregressive, self._source = autoregressive, source
        self._step_s = step_s
        self._running: dict[RequestId, _Running] = {}
        self._cached: dict[str, list[tuple[bytes, int]]] = {}
        self._rows_reused = 0
        self.prefixes = FakePrefixes(self._cached)
        self.kv = FakeKVTransfer(self._running, width) if autoregressive else None

    def submit(self, request: EngineRequest) -> None:
        check_is_new(request.request_id, self._running)
        self._running[request.request_id] = _Running(
            request, cached=self._cached.pop(request.session, [])
        )

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        running = self._running.get(request_id)
        if running is None:
            return 0
        assert not running.fed_final, "input after the final one"
        rows = _rows(piece.arrays)
        running.rows += rows
        running.unread.add(len(rows))
        running.fed_final = piece.final
        num_reused = running.reuse_cached() if running.cached and running.fed_final else 0
        self._rows_reused += num_reused
        return num_reused

    def num_unread(self, request_id: RequestId) -> int:
        running = self._running.get(request_id)
        if running is None or (self._source and not running.fed_final):
            return 0
        return running.unread.count(len(running.rows))

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.paused = paused

    def is_ready(self) -> bool:
        return self.due_in_s() <= 0

    def due_in_s(self) -> float:
        due_s = min(
            (running.due_s for running in self._running.values() if self._can_step(running)),
            default=math.inf,
        )
        return max(0.0, due_s - time.monotonic())

    def _can_step(self, running: _Running) -> bool:
        if running.paused:
            return False
        return (
            running.fed_final or bool(running.replayed) or (bool(running.rows) and not self._source)
        )

    def step(self) -> Sequence[EngineOutput]:
        now_s = time.monotonic()
        batch = [
            (key, r) for key, r in self._running.items() if r.due_s <= now_s and self._can_step(r)
        ][: self._max_batch]
        for _, running in batch:
            # A step that begins a little late does not delay the next ones: the mean interval is
            # `step_s`.
            began_s = running.due_s if now_s - running.due_s < self._step_s else now_s
            running.due_s = began_s + self._step_s
        return [self._advance(key, running) for key, running in batch]

    def _advance(self, key: RequestId, running: _Running) -> EngineOutput:
        rows = self._decode(running) if self._autoregressive else self._convert(running)
        spent = running.fed_final and not running.rows
        final = (
            running.made >= running.request.sampling.max_tokens if self._autoregressive else spent
        )
        if final:
            self.finish(key)
        out = np.array(rows, dtype=np.int32).reshape(len(rows), self._width)
        return EngineOutput(request_id=key, walk=DECODE, arrays={OUT: out}, final=final)

    def _decode(self, running: _Running) -> list[list[int]]:
        if running.replayed:
            replayed, running.replayed = running.replayed, []
            return replayed
        take = len(running.rows) if self._source else min(1, len(running.rows))
        for _ in range(take):
            running.absorb(running.rows.popleft())
        row = running.emit(self._width)
        known = running.request.history.get(OUT)
        if known is not None and running.made <= len(known):
            row = [int(number) for number in known[running.made - 1]]
        running.out.extend(row)
        return [row]

    def _convert(self, running: _Running) -> list[list[int]]:
        made: list[list[int]] = []
        while running.rows:
            running.absorb(running.rows.popleft())
            made.append(running.emit(self._width))
        return made

    def finish(self, request_id: RequestId) -> None:
        running = self._running.pop(request_id, None)
        trail = (running.trail or running.cached) if running is not None else []
        if running is not None and trail and self._source:
            self._cached[running.request.session] = trail

    def abort(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)

    def check(self) -> None:
        """Do nothing, since the fake engine has no device that could fail."""

    def stats(self) -> EngineStats:
        ready = sum(self._can_step(running) for running in self._running.values())
        kv = KVStats(rows_reused=self._rows_reused)
        return EngineStats(running=len(self._running), ready=ready, kv=kv)


class FakePrefixes:
    """Prefix cache of the fake engine: the input rows of ended requests and their checksums, by
    session.
    """

    def __init__(self, cached: dict[str, list[tuple[bytes, int]]]) -> None:
        self._cached = cached

    def num_rows(self, session: str) -> int:
        return len(self._cached.get(session, ()))

    def drop(self, session: str | None = None) -> None:
        for name in list(self._cached) if session is None else [session]:
            self._cached.pop(name, None)


class FakeKVTransfer:
    """Hand-off between fake engines. The blocks contain a request's checksum and all its output
    rows; the importing engine returns these rows again.
    """

    pages: KVPagePool | None = None

    def __init__(self, running: dict[RequestId, _Running], width: int) -> None:
        self._running, self._width = running, width

    def export_blocks(self, request_id: RequestId) -> KVBlocks | None:
        running = self._running.get(request_id)
        if running is None or not running.made:
            return None
        numbers = np.array([running.state, running.absorbed, *running.out], np.int64)
        return KVBlocks(num_rows=running.absorbed + running.made - 1, data=numbers.view(np.uint8))

    def import_blocks(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        running = self._running.get(request_id)
        if running is None or running.made or len(blocks.data) % np.dtype(np.int64).itemsize:
            return False
        state, absorbed, *out = np.frombuffer(blocks.data.tobytes(), np.int64).tolist()
        if absorbed > len(running.rows):
            return False
        for _ in range(absorbed):
            running.rows.popleft()
        running.state, running.absorbed = state, absorbed
        running.made = len(out) // self._width
        running.out.extend(out)
        running.replayed = [out[at : at + self._width] for at in range(0, len(out), self._width)]
        return True


@cache
def _columns(width: int) -> tuple[bytes, ...]:
    return tuple(b"%d" % column for column in range(width))


def _rows(arrays: Arrays) -> list[bytes]:
    return [np.ascontiguousarray(row).tobytes() for name in sorted(arrays) for row in arrays[name]]
