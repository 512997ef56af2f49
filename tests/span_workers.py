"""Span workers as threads of a test, which the test can observe, and kill at any step."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fleet.core.errors import SpanUnreachable
from fleet.core.ids import StageName, WorkerId
from fleet.engine.torch.build import open_device
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.graphs import GRAPHS, Graph
from fleet.spans.host.compute import SpanHost
from fleet.spans.host.hosting import SpanHosting
from fleet.spans.host.loaded import LoadedSpans
from fleet.spans.net.connection import Arrival, FrameReceived, SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.spans.net.listener import SpanListener
from fleet.spans.net.ring import BlockReads
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import (
    SpanPass,
    decode_span_message,
)
from fleet.spans.torch.model import SpanLayers, SpanRows
from fleet.stages.base import BuiltSpan
from fleet.stages.builders import span_builder
from fleet.stages.options import BuildOptions
from tests.stage_options import stage_options

KEY = b"k" * 32
WAIT_S = 30.0
LM = StageName("lm")


class WorkerKilled(BaseException):
    """Raised in a span worker's thread to end it at any point, as a signal ends a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPoint:
    """Point at which a span worker dies. `number`: the pass at which it dies, or the next one it
    receives. The worker dies `before` that pass, with the pass `computed` but not sent, or when its
    result is `sent`.
    """

    number: int
    point: str


class ObservedLayers(SpanLayers):
    """Wrapper of a span worker's layers that calls functions with the hidden states before and
    after each computation.
    """

    def __init__(self, layers: SpanLayers) -> None:
        self._layers = layers
        self.before: Callable[[Tensor], None] = lambda _: None
        self.after: Callable[[Tensor], None] = lambda _: None

    @property
    def span(self) -> LayerSpan:
        return self._layers.span

    @property
    def kv_shape(self) -> KVShape:
        return self._layers.kv_shape

    @property
    def has_tapped_layer(self) -> bool:
        return self._layers.has_tapped_layer

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        self.before(rows_NH)
        done = self._layers.forward(rows_NH, layout)
        self.after(done.rows_NH)
        return done

    def finish(self, rows_NH: Tensor) -> Tensor:
        return self._layers.finish(rows_NH)

    def head(self, last_SH: Tensor) -> Tensor:
        return self._layers.head(last_SH)

    def weights(self) -> Mapping[str, Tensor]:
        return self._layers.weights()


_loading = threading.Lock()
"""Lock for loading a model: `transformers` changes the default dtype of the whole process
meanwhile.
"""


def graph_of(stage: StageName) -> Graph:
    return next(
        graph for graph in GRAPHS.values() if any(each.name == stage for each in graph.stages)
    )


def loaded_span(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
    """Load the layers of a span, or return the copy loaded before. Sharing is safe since a killed
    worker's thread has ended before its successor uses the span.
    """
    with _loading:
        return _loaded_once(options.stage, options.checkpoint, options.config.numerics, span)


@cache
def _loaded_once(stage: StageName, folder: Path, numerics: str, span: LayerSpan) -> BuiltSpan:
    return span_builder(graph_of(stage), stage)(
        stage_options(stage=stage, checkpoint=folder, numerics=numerics), span
    )


class SpanWorkerThread:
    """A span worker that runs on a thread. `layers`: observable layers, set once the span is
    loaded.
    """

    def __init__(
        self,
        name: str,
        options: BuildOptions,
        workers: "dict[WorkerId, SpanWorkerThread]",
        blocks: BlockReads | None = None,
    ) -> None:
        self.name = WorkerId(name)
        self._options = options
        self._workers = workers
        self.arrivals = SpanArrivals(blocks)
        self._listener = SpanListener("127.0.0.1", arrivals=self.arrivals, key=KEY, own_name=name)
        self.address = self._listener.address
        where = open_device(
            device="cpu", dtype=options.dtype, numerics=options.config.numerics, threads=1
        )
        self.hosting = SpanHosting(where, LoadedSpans(self._load), self, lambda: None)
        self.layers: ObservedLayers | None = None
        self.observe: Callable[[ObservedLayers], None] = lambda _: None
        self.on_pass: Callable[[int], None] = lambda _: None
        """Function called with the number of each pass before it is computed."""
        self.kill_point: KillPoint | None = None
        self.started_with: list[set[str]] = []
        """Names of the open requests at each start of a route that has this worker."""
        self.refuses_hops = False
        self.error: BaseException | None = None
        self._dialed: list[SpanConnection] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"worker {name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def host(self) -> SpanHost:
        assert self.hosting.route is not None, f"{self.name} has no route"
        return self.hosting.route.host

    @property
    def num_blocks_sent(self) -> int:
        """Number of payloads that this worker left in memory for the next one to read by NIXL."""
        return sum(connection.num_blocks[1] for connection in self._dialed)

    @property
    def is_idle(self) -> bool:
        """Return True if the worker holds no state of any request."""
        route = self.hosting.route
        return route is not None and not (
            route.host.num_tables or route.log.num_tables or route.log.num_bytes or route.results
        )

    def connect(self, worker: WorkerId, purpose: str) -> SpanConnection:
        """Connect to the next span worker of the route; implements `Neighbours`."""
        found = self._workers.get(worker)
        if found is None or self.refuses_hops:
            raise SpanUnreachable(f"{worker} is not registered")
        self._dialed.append(
            dial(
                found.address,
                key=KEY,
                own_name=self.name,
                purpose=purpose,
                arrivals=self.arrivals,
                timeout_s=WAIT_S,
            )
        )
        return self._dialed[-1]

    def kill(self) -> None:
        """Close everything at once, in the middle of what the worker does."""
        self._stopping.set()
        self.arrivals.wake()
        self._thread.join(WAIT_S)
        assert not self.is_alive, f"{self.name} has not ended"

    def _load(self, span: LayerSpan) -> BuiltSpan:
        loaded = loaded_span(self._options, span)
        self.layers = ObservedLayers(loaded.layers)
        self.layers.after = self._after_computation
        self.observe(self.layers)
        return BuiltSpan(layers=self.layers, num_bytes=loaded.num_bytes)

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while not self._stopping.is_set():
                for arrival in self.arrivals.take(WAIT_S):
                    self._handle(arrival)
        except WorkerKilled:
            pass
        except BaseException as error:  # the driver raises it
            self.error = error
        finally:
            self._listener.close()
            self.hosting.close()
            self.arrivals.close_connections()

    def _handle(self, arrival: Arrival) -> None:
        kill, number = self.kill_point, _pass_number(arrival)
        if kill is not None and kill.point == "before" and number >= kill.number:
            raise WorkerKilled
        if number:
            self.on_pass(number)
        self.hosting.handle(arrival)
        if kill is not None and kill.point == "sent" and self._has_computed(kill.number):
            raise WorkerKilled

    def _after_computation(self, _: Tensor) -> None:
        if self._stopping.is_set():
            raise WorkerKilled
        if (
            self.kill_point is not None
            and self.kill_point.point == "computed"
            and self._has_computed(self.kill_point.number)
        ):
            raise WorkerKilled

    def _has_computed(self, number: int) -> bool:
        return self.hosting.route is not None and self.host.last_number >= number


def _pass_number(arrival: Arrival) -> int:
    message = (
        decode_span_message(arrival.frame.header) if isinstance(arrival, FrameReceived) else None
    )
    return message.number if isinstance(message, SpanPass) else 0
