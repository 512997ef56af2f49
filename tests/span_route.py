"""An anchor's engine and its span workers in one process, connected over loopback; workers can be
killed and replaced.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fleet.core.errors import FleetError
from fleet.core.ids import PREFILL, RequestId, StageName, WorkerId
from fleet.core.request import Sampling
from fleet.engine.base import (
    NUM_POSITIONS,
    TOKEN,
    Arrays,
    EngineInput,
    EngineOutput,
    EngineRequest,
    await_ready,
)
from fleet.engine.torch.lm_engine import LMEngine
from fleet.models.causal_lm.program import CausalTask
from fleet.spans.net.ring import BlockReads
from fleet.spans.protocol.chain import DelegatingChain, SpanArrival, SpanChain
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import (
    AnySpanMessage,
    Returned,
    SpanPass,
    SpanReport,
    SpanResult,
    SpanSetup,
)
from fleet.spans.route.division import RouteFailure, RouteWorker
from fleet.spans.route.setup import set_up_route
from fleet.stages.builders import stage_builder
from fleet.stages.options import AnchorOptions
from tests.span_workers import KEY, LM, WAIT_S, KillPoint, SpanWorkerThread, graph_of
from tests.stage_options import stage_options

ANCHOR = WorkerId("anchor")
Engine = LMEngine[CausalTask]
MOST_PASSES = 11
"""Number of the last pass at which `kill_some` lets a worker die, plus one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Division of a model's layers: the anchor's span, and the span workers' spans in layer
    order.
    """

    anchor: str
    workers: tuple[str, ...]
    returned: Returned


class ObservedChain(DelegatingChain):
    """A chain of span workers that records the passes in flight, the bytes sent and received, and
    the errors, and checks that results arrive in order.
    """

    def __init__(self, chain: SpanChain, when_started: Callable[[], None]) -> None:
        super().__init__(chain)
        self._when_started = when_started
        self._in_flight: list[int] = []
        self._completed = 0
        self.most_in_flight = 0
        self.num_sent_bytes = 0
        self.num_received_bytes = 0
        self.num_results = 0
        self.errors: list[str] = []
        self.loses: Callable[[AnySpanMessage], bool] = lambda _: False
        """Predicate for messages that are lost on their way to the anchor."""

    def start(self, completed: int, tables: Sequence[int]) -> None:
        self._when_started()
        self._completed = completed
        self._chain.start(completed, tables)

    def send(
        self,
        message: SpanPass | SpanReport,
        *rows: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        if isinstance(message, SpanPass) and message.number > self._completed:
            self._in_flight.append(message.number)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self.num_sent_bytes += sum(len(part) for part in rows)
        self._chain.send(message, *rows, when_sent=when_sent)

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        arrivals = [
            arrival for arrival in self._chain.take(timeout_s) if not self.loses(arrival.message)
        ]
        for arrival in arrivals:
            self.num_received_bytes += len(arrival.payload)
            if (
                isinstance(arrival.message, SpanResult)
                and arrival.message.number in self._in_flight
            ):
                assert self._in_flight.pop(0) == arrival.message.number, (
                    "results arrive in another order"
                )
                self.num_results += 1
                self.errors += (
                    [arrival.message.error.code] if arrival.message.error is not None else []
                )
        return arrivals


class SpanRoute:
    """An anchor's engine in one process with its span workers, which a test can kill and replace.
    `built`: the anchor's stage. `worker_at`: span worker by index of its span.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        options: dict[str, Any] | None = None,
        anchor: dict[str, Any] | None = None,
        stage: StageName = LM,
        blocks: BlockReads | None = None,
    ) -> None:
        """Start the anchor and its span workers, on the model in `folder`.

        `options`: fields of `BuildOptions`. `anchor`: fields of `AnchorOptions`. `blocks`: NIXL
        reads of the anchor, see `SpanArrivals`.
        """
        self.split, self._blocks = split, blocks
        more: dict[str, Any] = {"keep_bytes": 1 << 30, **(anchor or {})}
        own = AnchorOptions(
            span=LayerSpan.parse(split.anchor, "anchor"), returned=split.returned, **more
        )
        self._options = stage_options(stage=stage, checkpoint=folder, anchor=own, **(options or {}))
        self.built = stage_builder(graph_of(stage), stage)(self._options)
        assert isinstance(self.built.engine, LMEngine) and self.built.route is not None
        self.engine: Engine = self.built.engine
        self._slot, self._own = self.built.route, own
        self._workers: dict[WorkerId, SpanWorkerThread] = {}
        self._num_started = 0
        self.generation = 0
        self._lineage = 0
        self.next_kill_points: list[KillPoint] = []
        """Kill points of the next replacement workers, in order."""
        self.open_requests: set[str] = set()
        self._spare: dict[int, SpanWorkerThread] = {}
        self.worker_at = [self.start_worker() for _ in split.workers]
        self.chain: ObservedChain | None = None
        self.num_replaced = 0

    def start_worker(self) -> SpanWorkerThread:
        self._num_started += 1
        worker = SpanWorkerThread(
            f"span-worker-{self._num_started}", self._options, self._workers, self._blocks
        )
        self._workers[worker.name] = worker
        return worker

    def connect(self) -> bool:
        """Set up the next generation of the route; return False if one of its workers is dead."""
        self.generation += 1
        hops = [
            RouteWorker(worker=worker.name, address=worker.address, key=KEY, span=span)
            for worker, span in zip(self.worker_at, self.split.workers, strict=True)
        ]
        terms = SpanSetup(
            span="",
            following="",
            generation=self.generation,
            lineage=self._lineage or self.generation,
            num_pages=self._slot.num_pages,
            page_size=self._slot.page_size,
            returned=self._own.returned,
            wire_dtype=self._own.wire_dtype,
            keep_bytes=self._own.keep_bytes,
        )
        try:
            chain = set_up_route(ANCHOR, hops, terms, blocks=self._blocks)
        except RouteFailure:
            return False
        workers = list(self.worker_at)
        self.chain = ObservedChain(chain, lambda: self._note_start(workers))
        self._lineage = self._lineage or self.generation
        self._slot.offer(self.chain)
        return True

    def _note_start(self, workers: Sequence[SpanWorkerThread]) -> None:
        for worker in workers:
            worker.started_with.append(set(self.open_requests))

    def repair(self) -> None:
        """Replace dead workers, and set up a new route if the anchor has none."""
        while self.chain is None or self.chain.is_broken:
            for number, worker in enumerate(self.worker_at):
                if worker.error is not None:
                    raise worker.error
                if not worker.is_alive:
                    self.worker_at[number] = self.start_worker()
                    self.worker_at[number].kill_point = (
                        self.next_kill_points.pop(0) if self.next_kill_points else None
                    )
                    self.num_replaced += 1
            if not self.connect():
                self.chain = None

    def exchange(self, place: int) -> None:
        """End the route, and give a place in the next route to another live worker: to the previous
        holder of this place if there is one, else to a new worker.
        """
        self._spare[place], self.worker_at[place] = (
            self.worker_at[place],
            self._spare.get(place) or self.start_worker(),
        )
        if self.chain is not None:
            self.chain.close()

    def begin_lineage(self) -> None:
        """End the route and begin a new lineage, in which no span worker keeps its old KV rows."""
        self._lineage = 0
        if self.chain is not None:
            self.chain.close()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        if self.chain is not None:
            self.chain.close()
        assert all(worker.error is None for worker in self._workers.values()), [
            worker.error for worker in self._workers.values()
        ]


@dataclass(slots=True)
class TextDriver:
    """Drives an engine as a worker's loop does, with or without span workers, and records the
    answers.
    """

    engine: Engine
    route: SpanRoute | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    errors: dict[str, FleetError] = field(default_factory=dict[str, FleetError])
    logits: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    arrays: dict[str, list[Arrays]] = field(default_factory=dict[str, list[Arrays]])
    """Outputs without a token, by request: the hidden states of a Thinker's prompt, for example."""
    open: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        program: Any = self.engine.program
        draw_from = program.draw_from

        def recording(
            tasks: Sequence[CausalTask], logits_SV: Tensor
        ) -> Sequence[Sequence[EngineOutput]]:
            outputs = draw_from(tasks, logits_SV)
            for (output,), row_V in zip(outputs, logits_SV[: len(tasks)], strict=True):
                self.logits.setdefault(str(output.request_id), []).append(row_V.clone())
            return outputs

        program.draw_from = recording

    def submit(
        self, name: str, prompt: Sequence[int], sampling: Sampling, session: str = ""
    ) -> None:
        params = {NUM_POSITIONS: str(len(prompt) + sampling.max_tokens)}
        request = EngineRequest(
            request_id=RequestId(name), sampling=sampling, params=params, session=session
        )
        self.submit_request(
            request,
            [EngineInput(walk=PREFILL, arrays={"ids": np.array(prompt, np.int32)}, final=True)],
        )

    def submit_request(self, request: EngineRequest, pieces: Sequence[EngineInput]) -> None:
        name = str(request.request_id)
        self.engine.submit(request)
        for piece in pieces:
            self.engine.feed(request.request_id, piece)
        self.open.add(name)
        self.tokens[name], self.arrays[name] = [], []

    def turn(self) -> Sequence[EngineOutput]:
        if self.engine.remote is not None:
            self.engine.remote.take_suspects()
        if self.route is not None:
            self.route.open_requests = self.open
            self.route.repair()
        if not await_ready(self.engine, 0.05):
            return ()
        outputs = self.engine.step()
        for output in outputs:
            self._record(output)
        return outputs

    def _record(self, output: EngineOutput) -> None:
        name = str(output.request_id)
        if TOKEN in output.arrays:
            self.tokens[name] += output.arrays[TOKEN].tolist()
        else:
            self.arrays[name].append(output.arrays)
        if output.error is not None:
            self.errors[name] = output.error
        if output.final or output.error is not None:
            self.open.discard(name)

    def end(self, name: str, *, keep: bool) -> None:
        """Finish or abort a request."""
        self.open.discard(name)
        (self.engine.finish if keep else self.engine.abort)(RequestId(name))

    def run(self, is_done: Callable[[], bool] | None = None) -> None:
        """Take engine steps until all requests have ended, or until `is_done`."""
        until_s = time.monotonic() + WAIT_S
        while not (is_done() if is_done is not None else not self.open):
            assert time.monotonic() < until_s, f"these requests do not end: {self.open}"
            if self.turn():
                until_s = time.monotonic() + WAIT_S

    def settle(self, is_done: Callable[[], bool]) -> None:
        """Take engine steps without open requests until `is_done` returns True."""
        assert not self.open
        self.run(is_done)


def single(folder: Path, *, stage: StageName = LM, **options: Any) -> TextDriver:
    """Return a driver of an engine that has all layers itself."""
    built = stage_builder(graph_of(stage), stage)(
        stage_options(stage=stage, checkpoint=folder, **options)
    )
    assert isinstance(built.engine, LMEngine)
    engine: Engine = built.engine
    return TextDriver(engine)


def route_of(driver: TextDriver) -> SpanRoute:
    """Return the span route of a driver, which must have one."""
    assert driver.route is not None
    return driver.route


def kill_some(route: SpanRoute, chance: random.Random, num_more: Sequence[int] = (0, 0, 1)) -> None:
    """Let one or two span workers die at random passes, and as many of the workers that replace
    them as `chance` chooses from `num_more`.
    """

    def kill_point() -> KillPoint:
        number = chance.randrange(1, MOST_PASSES)
        return KillPoint(number=number, point=chance.choice(("before", "computed", "sent")))

    num_killed = min(len(route.worker_at), chance.choice((1, 1, 2)))
    for worker in chance.sample(route.worker_at, num_killed):
        worker.kill_point = kill_point()
    for _ in range(chance.choice(num_more)):
        route.next_kill_points.append(kill_point())
