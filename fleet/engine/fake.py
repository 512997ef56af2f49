"""A deterministic engine without weights: it passes the contract tests and drives control-plane scale tests.

Each input array's bytes move a per-request checksum; each step emits one row made of it. Knows no stage.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId, Walk
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest, EngineStats


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    inputs: deque[EngineInput] = field(default_factory=deque[EngineInput])
    state: int = 0
    made: int = 0
    fed_final: bool = False
    paused: bool = False
    walk: Walk = Walk("prefill")


class FakeEngine:
    """`autoregressive`: after its first input it emits one row a step up to max_tokens. Otherwise one row per input row fed.

    Shapes: each output has `out`: int32 [n, width].
    """

    def __init__(self, *, max_batch: int, width: int = 1, autoregressive: bool = True) -> None:
        self._max_batch, self._width, self._autoregressive = max_batch, width, autoregressive
        self._running: dict[RequestId, _Running] = {}

    def submit(self, request: EngineRequest) -> None:
        if request.request_id in self._running:
            raise BadInput(f"request {request.request_id} was submitted twice")
        self._running[request.request_id] = _Running(request, state=zlib.crc32(b"%d" % request.sampling.seed))

    def feed(self, request_id: RequestId, piece: EngineInput) -> None:
        running = self._running.get(request_id)
        if running is not None:
            assert not running.fed_final, "input after the final one"
            running.inputs.append(piece)
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
        return bool(running.inputs) or (self._autoregressive and running.made > 0)

    def step(self) -> Sequence[EngineOutput]:
        batch = [(key, r) for key, r in self._running.items() if self._can_step(r)][: self._max_batch]
        return [self._advance(key, running) for key, running in batch]

    def _advance(self, key: RequestId, running: _Running) -> EngineOutput:
        rows, final = 0, False
        while running.inputs:
            piece = running.inputs.popleft()
            running.walk, final = piece.walk, piece.final
            for name in sorted(piece.arrays):
                running.state = zlib.crc32(np.ascontiguousarray(piece.arrays[name]).tobytes(), running.state)
                rows = max(rows, len(piece.arrays[name]))
        if self._autoregressive:
            rows = 1
            final = running.made + 1 >= running.request.sampling.max_tokens
        out = np.empty((rows, self._width), dtype=np.int32)
        for row in range(rows):
            for column in range(self._width):
                running.state = zlib.crc32(b"%d" % column, running.state)
                out[row, column] = running.state & 0x7FFF
        running.made += rows
        if final:
            del self._running[key]
        walk = Walk("decode") if self._autoregressive else running.walk
        return EngineOutput(request_id=key, walk=walk, arrays={"out": out}, final=final)

    def finish(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)

    def abort(self, request_id: RequestId) -> None:
        self._running.pop(request_id, None)

    def stats(self) -> EngineStats:
        ready = sum(self._can_step(running) for running in self._running.values())
        return EngineStats(running=len(self._running), ready=ready)
