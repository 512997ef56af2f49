"""A deterministic engine without weights: it passes the contract tests and drives control-plane scale tests.

Each input row moves a per-request checksum; each output row is made of it. What comes out depends on the rows that went in, never
on how they were cut into pieces or when they came. Knows no stage.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId, Walk
from fleet.engine.base import Arrays, EngineInput, EngineOutput, EngineRequest, EngineStats, KVBlocks

DECODE = Walk("decode")


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    state: int
    rows: deque[bytes] = field(default_factory=deque[bytes])
    made: int = 0
    fed_final: bool = False
    paused: bool = False

    def absorb(self, row: bytes) -> None:
        self.state = zlib.crc32(row, self.state)

    def emit(self, width: int) -> list[int]:
        self.made += 1
        values: list[int] = []
        for column in range(width):
            self.state = zlib.crc32(b"%d" % column, self.state)
            values.append(self.state & 0x7FFF)
        return values


class FakeEngine:
    """Up to max_tokens rows, one a step.

    `autoregressive`: a step takes one input row, waiting for it until the input is final; otherwise a codec, with one output row
    per input row and no bound. `source`: the whole input is a prompt, taken before the first row.

    Shapes: each output has `out`: int32 [n, width].
    """

    def __init__(self, *, max_batch: int, width: int = 1, autoregressive: bool = True, source: bool = False) -> None:
        self._max_batch, self._width = max_batch, width
        self._autoregressive, self._source = autoregressive, source
        self._running: dict[RequestId, _Running] = {}

    def submit(self, request: EngineRequest) -> None:
        if request.request_id in self._running:
            raise BadInput(f"request {request.request_id} was submitted twice")
        self._running[request.request_id] = _Running(request, zlib.crc32(b"%d" % request.sampling.seed))

    def feed(self, request_id: RequestId, piece: EngineInput) -> None:
        running = self._running.get(request_id)
        if running is not None:
            assert not running.fed_final, "input after the final one"
            running.rows += _rows(piece.arrays)
            running.fed_final = piece.final

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.paused = paused

    def ready(self) -> bool:
        return any(self._can_step(running) for running in self._running.values())

    def _can_step(self, running: _Running) -> bool:
        if running.paused:
            return False
        return running.fed_final or (bool(running.rows) and not self._source)

    def step(self) -> Sequence[EngineOutput]:
        batch = [(key, r) for key, r in self._running.items() if self._can_step(r)][: self._max_batch]
        return [self._advance(key, running) for key, running in batch]

    def _advance(self, key: RequestId, running: _Running) -> EngineOutput:
        rows = self._decode(running) if self._autoregressive else self._convert(running)
        spent = running.fed_final and not running.rows
        final = running.made >= running.request.sampling.max_tokens if self._autoregressive else spent
        if final:
            del self._running[key]
        out = np.array(rows, dtype=np.int32).reshape(len(rows), self._width)
        return EngineOutput(request_id=key, walk=DECODE, arrays={"out": out}, final=final)

    def _decode(self, running: _Running) -> list[list[int]]:
        take = len(running.rows) if self._source else min(1, len(running.rows))
        for _ in range(take):
            running.absorb(running.rows.popleft())
        return [running.emit(self._width)]

    def _convert(self, running: _Running) -> list[list[int]]:
        made: list[list[int]] = []
        while running.rows:
            running.absorb(running.rows.popleft())
            made.append(running.emit(self._width))
        return made

    def finish(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)

    def export(self, request_id: RequestId) -> KVBlocks | None:
        return None

    def adopt(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        return False

    def abort(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)

    def stats(self) -> EngineStats:
        ready = sum(self._can_step(running) for running in self._running.values())
        return EngineStats(running=len(self._running), ready=ready)


def _rows(arrays: Arrays) -> list[bytes]:
    return [np.ascontiguousarray(row).tobytes() for name in sorted(arrays) for row in arrays[name]]
