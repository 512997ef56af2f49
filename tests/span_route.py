"""An anchor's engine and its span workers in one process, with real connections and without Redis; workers can be killed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from fleet.core.ids import RequestId, WorkerId
from fleet.core.layer_spans import LayerSpan
from fleet.core.request import Sampling
from fleet.core.span_messages import Returned
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineRequest
from fleet.engine.torch.build import open_device
from fleet.engine.torch.lm_engine import LMEngine
from fleet.engine.torch.span_passes import SpanPasses
from fleet.graphs.text import LM
from fleet.models.causal_lm.program import CausalTask
from fleet.spans.chain import ConnectedChain
from fleet.spans.connection import SpanArrivals, SpanConnection
from fleet.spans.dial import dial
from fleet.spans.listener import SpanListener
from fleet.spans.placement import RoutePlaces, place_workers
from fleet.stages.base import AnchorOptions, BuildOptions, BuiltSpan
from fleet.stages.text import PREFILL, build, build_span
from fleet.worker.span_hosting import SpanHosting
from fleet.worker.span_purposes import FROM_ANCHOR

KEY = b"k" * 32
TIMEOUT_S = 20.0
ONE_LOADS = threading.Lock()
"""Loading sets torch's default dtype for a while, which is the process's."""
Engine = LMEngine[CausalTask]


class ThreadWorker:
    """A span worker in a thread."""

    def __init__(self, name: str, options: BuildOptions, route: "SpanRoute") -> None:
        self.name, self._route = WorkerId(name), route
        self.arrivals = SpanArrivals()
        self.listener = SpanListener("127.0.0.1", arrivals=self.arrivals, key=KEY, own_name=name)
        where = open_device(device="cpu", dtype="float32", numerics=options.numerics, threads=1)

        def load(span: LayerSpan) -> BuiltSpan:
            with ONE_LOADS:
                return build_span(options, span)

        self.hosting = SpanHosting(where, load, self, lambda: None)
        self.is_killed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def connect(self, worker: WorkerId, purpose: str) -> SpanConnection:
        return self._route.dial(self.name, worker, purpose, self.arrivals)

    def _run(self) -> None:
        while not self.is_killed.is_set():
            for arrival in self.arrivals.take(0.5):
                if self.is_killed.is_set():
                    break
                self.hosting.handle(arrival)
        self.hosting.close()

    def kill(self) -> None:
        """End the worker, wherever it is; what it has not sent is lost with its rows."""
        self.is_killed.set()
        self.arrivals.wake()
        self.listener.close()
        if self._thread is not threading.current_thread():
            self._thread.join(TIMEOUT_S)


@dataclass(kw_only=True)
class SpanRoute:
    """An anchor and its workers. `spans`: of the workers, in the order of the layers."""

    options: BuildOptions
    spans: Sequence[str]
    keep_bytes: int = 1 << 30
    engine: Engine = field(init=False)
    workers: list[ThreadWorker] = field(default_factory=list[ThreadWorker])
    generation: int = 0
    num_started: int = 0

    def __post_init__(self) -> None:
        built = build(self.options)
        self.engine = cast(Engine, built.engine)
        assert built.route is not None
        self.slot = built.route
        self.workers = [self.start_worker() for _ in self.spans]
        self.connect()

    @property
    def passes(self) -> SpanPasses[CausalTask]:
        return cast("SpanPasses[CausalTask]", self.engine._passes)  # pyright: ignore[reportPrivateUsage]

    def start_worker(self) -> ThreadWorker:
        self.num_started += 1
        return ThreadWorker(f"worker{self.num_started}", self.options, self)

    def dial(self, own_name: str, worker: str, purpose: str, arrivals: SpanArrivals) -> SpanConnection:
        address = next(each.listener.address for each in self.workers if each.name == worker)
        return dial(address, key=KEY, own_name=own_name, purpose=purpose, arrivals=arrivals, timeout_s=TIMEOUT_S)

    def connect(self) -> None:
        """Set up the next route, in which killed workers are replaced."""
        self.workers = [self.start_worker() if worker.is_killed.is_set() else worker for worker in self.workers]
        self.generation += 1
        anchor = self.options.anchor
        assert anchor is not None
        places = RoutePlaces(
            generation=self.generation, lineage=1, spans=self.spans, workers=[worker.name for worker in self.workers],
            num_pages=self.slot.num_pages, page_size=self.slot.page_size, returned=anchor.returned,
            wire_dtype=anchor.wire_dtype, keep_bytes=self.keep_bytes,
        )  # fmt: skip
        arrivals = SpanArrivals()
        connections = [self.dial("anchor", worker.name, FROM_ANCHOR, arrivals) for worker in self.workers]
        ready = place_workers(places, connections, arrivals, timeout_s=TIMEOUT_S)
        self.slot.offer(ConnectedChain(self.generation, connections, ready, arrivals))

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


def anchor_options(
    folder: Path, anchor: str, returned: Returned, *, keep_bytes: int = 1 << 30, window: int | None = None,
    wire_dtype: str = "float32", **options: object,
) -> BuildOptions:  # fmt: skip
    own = AnchorOptions(
        span=LayerSpan.parse(anchor, "anchor"), returned=returned, keep_bytes=keep_bytes, window=window, wire_dtype=wire_dtype
    )
    return BuildOptions(stage=LM, checkpoint=folder, anchor=own, **options)  # pyright: ignore[reportArgumentType]


@contextmanager
def open_route(options: BuildOptions, spans: Sequence[str]) -> Iterator[SpanRoute]:
    assert options.anchor is not None
    route = SpanRoute(options=options, spans=spans, keep_bytes=options.anchor.keep_bytes)
    try:
        yield route
    finally:
        route.close()


class EngineDriver:
    """Drives an engine as a worker does, and collects the tokens of its answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.ended: set[str] = set()

    def submit(self, name: str, ids: Sequence[int], sampling: Sampling, session: str = "") -> None:
        params = {NUM_POSITIONS: str(len(ids) + sampling.max_tokens)}
        request = EngineRequest(request_id=RequestId(name), sampling=sampling, params=params, session=session)
        self._engine.submit(request)
        self._engine.feed(request.request_id, EngineInput(walk=PREFILL, arrays={"ids": np.array(ids, np.int32)}, final=True))
        self.tokens[name] = []

    def run(self, *, until: Callable[[], bool] | None = None) -> dict[str, list[int]]:
        """Step until all have ended, or until the condition holds."""
        while not (until() if until is not None else self.ended >= set(self.tokens)):
            self.turn()
        return self.tokens

    def turn(self) -> None:
        self._engine.take_suspects()
        if not self._engine.is_ready() and not self._engine.await_pass(0.05):
            return
        for output in self._engine.step():
            if output.error is not None:
                self.errors[output.request_id] = output.error.message
            elif output.arrays:
                self.tokens[output.request_id] += output.arrays[TOKEN].tolist()
            if output.final or output.error is not None:
                self.ended.add(output.request_id)
