"""Processes of the layer spans benchmark: one with all layers, an anchor, or a span worker. Knows
no model.

Legend: N positions in a step, H hidden size.
"""

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from fleet.config import FleetConfig
from fleet.core.ids import RequestId, WorkerId
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import TOKEN, await_ready
from fleet.engine.torch.build import DTYPES, open_device
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.lm_engine import LMEngine
from fleet.engine.torch.program import ProgramTask
from fleet.lab.measure.calls import Caller
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.spans_protocol import (
    Answer,
    AnyCommand,
    Compute,
    Connect,
    ProcessMemory,
    ReadMemory,
    SpanReply,
)
from fleet.lab.measure.spans_recording import RecordingChain
from fleet.process.gc_freeze import freeze_gc
from fleet.spans.anchor.passes import SpanProgram
from fleet.spans.host.backlog import SpanBacklog
from fleet.spans.host.hosting import SpanHosting
from fleet.spans.host.loaded import LoadedSpans
from fleet.spans.net.connection import SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.spans.net.listener import SpanListener
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import SpanSetup
from fleet.spans.route.division import RouteFailure, RouteWorker
from fleet.spans.route.setup import set_up_route
from fleet.spans.torch.model import SpanComputer, SpanLayers, last_rows
from fleet.stages.base import BuiltSpan
from fleet.stages.builders import build_options, span_builder
from fleet.stages.options import BuildOptions
from fleet.worker.main import build_stage

DIAL_S = 5.0
GENERATION = 1
TAKE_S, WAIT_S = 0.2, 1.0
KIB = 1024
FIRST_ID, NUM_IDS = 100, 200
"""Range of the random token ids of prompts: first id and number of ids, which every vocabulary
has.
"""


class MeasuredStage:
    """The stage in a process with all layers, or in an anchor; computes answers on command."""

    def __init__(self, config: FleetConfig, name: str, key: str) -> None:
        self._config = config
        self._name = name
        self._key = bytes.fromhex(key)
        self._stage = config.graph_declaration().stages[0].name
        self._checkpoint = Path(config.checkpoint)
        self._options = build_options(config, self._stage, self._checkpoint)
        self._built = build_stage(config, self._stage, self._checkpoint)
        self._num_requests = 0
        self._chain: RecordingChain | None = None
        freeze_gc()

    def reply(self, command: AnyCommand) -> SpanReply:
        match command:
            case Connect(addresses=addresses):
                self._connect(addresses)
                return SpanReply()
            case Answer():
                return self.answer(command)
            case Compute():
                assert self._layers is not None, "not an anchor"
                return compute_passes(self._layers, command, self._options)
            case ReadMemory():
                return measure_memory(self._checkpoint, self._layers)

    @property
    def _layers(self) -> SpanLayers | None:
        """Layers of the anchor's own span; None in a process with all layers."""
        if self._options.anchor is None:
            return None
        engine = cast("LMEngine[ProgramTask]", self._built.engine)
        return cast("SpanProgram[ProgramTask]", engine.program).layers

    def _connect(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Connect to the span workers in the order of `addresses`, which becomes the anchor's
        route, and give the chain to the engine. Raises: BenchError.
        """
        spans, anchor = self._config.stage(self._stage).spans, self._options.anchor
        slot = self._built.route
        assert spans is not None and anchor is not None and slot is not None, "not an anchor"
        hops = [
            RouteWorker(worker=WorkerId(name), address=address, key=self._key, span=str(span))
            for (name, address), span in zip(addresses.items(), spans.worker_spans, strict=True)
        ]
        terms = SpanSetup(
            span="",
            following="",
            generation=GENERATION,
            lineage=GENERATION,
            num_pages=slot.num_pages,
            page_size=slot.page_size,
            returned=anchor.returned,
            wire_dtype=anchor.wire_dtype,
            keep_bytes=anchor.keep_bytes,
        )
        try:
            chain = set_up_route(WorkerId(self._name), hops, terms)
        except RouteFailure as failure:
            raise BenchError(str(failure)) from failure
        self._chain = RecordingChain(chain, DTYPES[anchor.wire_dtype].itemsize)
        slot.offer(self._chain)

    def answer(self, command: Answer) -> SpanReply:
        """Compute answers as a worker's loop does, and return their timing. Raises: FleetError if a
        request fails.
        """
        engine, answers = self._built.engine, dict[RequestId, list[int]]()
        if self._chain is not None:
            self._chain.clear()
        began_s = time.perf_counter()
        for number in range(command.num_requests):
            spec = self._request(command, number)
            answers[spec.id] = []
            request, pieces = self._built.adapter(spec, None).open()
            engine.submit(request)
            for piece in pieces:
                engine.feed(spec.id, piece)
        num_open, prefill_s, num_early = command.num_requests, 0.0, 0
        while num_open:
            if not await_ready(engine, WAIT_S):
                continue
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                answers[output.request_id] += output.arrays[TOKEN].tolist()
                num_open -= output.final
            if not prefill_s and all(answers.values()):
                prefill_s, num_early = (
                    time.perf_counter() - began_s,
                    sum(map(len, answers.values())),
                )
        seconds = time.perf_counter() - began_s
        reply = SpanReply(
            seconds=seconds,
            prefill_s=prefill_s,
            num_decoded=sum(map(len, answers.values())) - num_early,
            answers=tuple(tuple(ids) for ids in answers.values()),
        )
        return reply if self._chain is None else self._chain.recorded(reply)

    def _request(self, command: Answer, number: int) -> RequestSpec:
        self._num_requests += 1
        ids = tuple(
            FIRST_ID + (number + 7 * position) % NUM_IDS for position in range(command.num_prompt)
        )
        sampling = Sampling(max_tokens=command.num_tokens, ignore_eos=True)
        return RequestSpec(
            id=RequestId(f"r{self._num_requests}"),
            graph="",
            prompt_ids=ids,
            sampling={self._stage: sampling},
        )


class NamedNeighbours:
    """Connects a span worker to other span workers. `addresses`: address of each worker by name,
    empty until `Connect` arrives.
    """

    def __init__(self, key: bytes, own_name: str, arrivals: SpanArrivals) -> None:
        self._key = key
        self._own_name = own_name
        self._arrivals = arrivals
        self.addresses: Mapping[str, tuple[str, int]] = {}

    def connect(self, worker: WorkerId, purpose: str) -> SpanConnection:
        address = self.addresses[worker]
        return dial(
            address,
            key=self._key,
            own_name=self._own_name,
            purpose=purpose,
            arrivals=self._arrivals,
            timeout_s=DIAL_S,
        )


class MeasuredSpanWorker:
    """A span worker process: computes frames that arrive on its connections, and executes
    commands.
    """

    def __init__(self, config: FleetConfig, name: str, key: str, host: str) -> None:
        self._checkpoint, secret = Path(config.checkpoint), bytes.fromhex(key)
        graph = config.graph_declaration()
        options = self._options = build_options(config, graph.stages[0].name, self._checkpoint)
        self._build = span_builder(graph, graph.stages[0].name)
        self._loaded: BuiltSpan | None = None
        self._arrivals = SpanArrivals()
        self._neighbours = NamedNeighbours(secret, name, self._arrivals)
        where = open_device(
            device=options.device,
            dtype=options.dtype,
            numerics=options.config.numerics,
            threads=options.own.threads,
        )
        self._hosting = SpanHosting(where, LoadedSpans(self._load), self._neighbours, lambda: None)
        self._backlog = SpanBacklog(self._hosting, self._arrivals)
        self.listener = SpanListener(host, arrivals=self._arrivals, key=secret, own_name=name)

    def _load(self, span: LayerSpan) -> BuiltSpan:
        self._loaded = self._build(self._options, span)
        freeze_gc()
        return self._loaded

    def serve(self, caller: Caller) -> None:
        """Handle arriving frames and commands until the caller closes the input."""
        commands: queue.SimpleQueue[AnyCommand | None] = queue.SimpleQueue()
        threading.Thread(
            target=self._receive, args=(caller, commands), name="commands", daemon=True
        ).start()
        while True:
            self._backlog.handle_next(TAKE_S)
            while not commands.empty():
                command = commands.get()
                if command is None:
                    self._hosting.close()
                    return
                caller.send(self._reply(command))

    def _receive(self, caller: Caller, commands: "queue.SimpleQueue[AnyCommand | None]") -> None:
        for command in caller.messages(AnyCommand):
            commands.put(command)
            self._arrivals.wake()
        commands.put(None)
        self._arrivals.wake()

    def _reply(self, command: AnyCommand) -> SpanReply:
        if isinstance(command, Connect):
            self._neighbours.addresses = command.addresses
            return SpanReply()
        if self._loaded is None:
            raise BenchError("the span worker has no layers yet")
        if isinstance(command, Compute):
            return compute_passes(self._loaded.layers, command, self._options)
        if isinstance(command, ReadMemory):
            return measure_memory(self._checkpoint, self._loaded.layers)
        raise BenchError(f"a span worker has no command {type(command).__name__}")


def host_stage(config: FleetConfig, name: str, key: str, host: str, caller: Caller) -> None:
    """Execute commands in a process with all layers, or in an anchor. The first reply, which is
    empty, means that the stage is loaded. `host` is unused, since such processes do not listen.
    """
    stage = MeasuredStage(config, name, key)
    caller.send(SpanReply())
    for command in caller.messages(AnyCommand):
        caller.send(stage.reply(command))


def host_span(config: FleetConfig, name: str, key: str, host: str, caller: Caller) -> None:
    """Serve a span on the address `host` and execute commands. The first reply, sent before any
    command, contains the address with its port.
    """
    worker = MeasuredSpanWorker(config, name, key, host)
    assert not isinstance(worker.listener.address, Path), "a measurement of TCP"
    caller.send(SpanReply(address=worker.listener.address))
    worker.serve(caller)


@torch.inference_mode()
def compute_passes(layers: SpanLayers, command: Compute, options: BuildOptions) -> SpanReply:
    """Compute steps on random hidden states with a separate KV pool; return the duration."""
    dtype, width = DTYPES[options.dtype], command.row_width
    tables: dict[int, PageTable] = {}
    pool = KVPool(
        layers.kv_shape,
        num_pages=options.kv_pages,
        page_size=options.own.page_size_tokens,
        dtype=dtype,
        device=torch.device(options.device),
    )
    computer = SpanComputer(layers, pool, tiled=options.config.numerics == "invariant")
    stops: dict[int, int] = {}
    for extents in command.passes:
        stops |= {table: max(stop, stops.get(table, 0)) for table, _, stop in extents}
    for number, stop in stops.items():
        tables[number] = pool.open_table()
        assert pool.grow(tables[number], stop), "the pool holds what the engine's held"
    most = max(sum(stop - start for _, start, stop in extents) for extents in command.passes)
    all_rows_NH = torch.randn(most, width, dtype=dtype, device=pool.data.device)
    began_s = time.perf_counter()
    for extents, draws in zip(command.passes, command.draws, strict=True):
        places = [
            Extent(table=tables[table], start=start, stop=stop) for table, start, stop in extents
        ]
        done = computer.run(all_rows_NH[: sum(place.num_rows for place in places)], places)
        if layers.span.has_output and any(draws):
            computer.head(last_rows(done.rows_NH, places, draws))
    return SpanReply(seconds=time.perf_counter() - began_s)


def measure_memory(checkpoint: Path, layers: SpanLayers | None) -> SpanReply:
    """Read every weight of the span, and return the process's memory. If `layers` is None, as in a
    process with all layers, no weights are read or counted.
    """
    weights = layers.weights() if layers is not None else {}
    for weight in weights.values():
        weight.sum()
    status = _fields(Path("/proc/self/status").read_text())
    memory = ProcessMemory(
        peak=status["VmHWM"],
        anonymous=status["RssAnon"],
        data=status["VmData"],
        weight_files=_resident_of_files(checkpoint.resolve()),
        weights=sum({weight.data_ptr(): weight.nbytes for weight in weights.values()}.values()),
    )
    return SpanReply(memory=memory)


def _fields(text: str) -> dict[str, int]:
    """Parse a file of /proc to sizes in bytes by field name."""
    parts = (line.split() for line in text.splitlines())
    return {
        words[0].removesuffix(":"): int(words[1]) * KIB for words in parts if words[2:] == ["kB"]
    }


def _resident_of_files(folder: Path) -> int:
    """Return the resident bytes of this process's mappings of files in a folder."""
    total, is_of_folder = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_of_folder = len(words) > 5 and Path(words[5]).is_relative_to(folder)
        elif words[0] == "Rss:" and is_of_folder:
            total += int(words[1]) * KIB
    return total
