"""A process of the measurement of layer spans, as a script: one process with all layers, an anchor,
or a span worker.

Its commands are lines on standard input, its replies lines on standard output. Knows no model.
"""

import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleet.config import load_config
from fleet.core.errors import FleetError
from fleet.core.ids import WorkerId
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.spans_protocol import (
    Answer,
    AnyCommand,
    Begin,
    Compute,
    Connect,
    ReadMemory,
    SpanReply,
)
from fleet.process.gc_freeze import freeze_gc
from fleet.spans.net.connection import SpanArrivals, SpanConnection
from fleet.spans.net.dial import dial
from fleet.spans.net.listener import SpanListener
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.protocol.messages import SpanSetup
from fleet.spans.route.division import RouteFailure, RouteWorker
from fleet.spans.route.setup import set_up_route

if TYPE_CHECKING:
    from fleet.stages.base import BuiltSpan

DIAL_S = 5.0
GENERATION = 1
WAIT_S = 0.2
DECODER = msgspec.json.Decoder(AnyCommand)
FAILURES = (FleetError, RuntimeError, ValueError, MemoryError, OSError)
"""Errors of a command that are its reply."""


class MeasuredStage:
    """One process with all layers of the stage, or an anchor."""

    def __init__(self, begin: Begin) -> None:
        self._begin, self._config = begin, load_config(Path(begin.config))
        from fleet.lab.measure.spans_compute import EngineRuns
        from fleet.worker.main import build_options, build_stage

        self._stage = self._config.graph_declaration().stages[0].name
        checkpoint = Path(self._config.checkpoint)
        self._options = build_options(self._config, self._stage, checkpoint)
        self._runs = EngineRuns(
            build_stage(self._config, self._stage, checkpoint), self._stage, self._options
        )
        freeze_gc()

    def reply(self, command: AnyCommand) -> SpanReply:
        match command:
            case Connect(addresses=addresses):
                self._connect(addresses)
                return SpanReply()
            case Answer():
                return self._runs.answer(command)
            case Compute():
                return self._runs.compute(command)
            case ReadMemory():
                return self._runs.read_memory(Path(self._config.checkpoint))
            case Begin():
                raise BenchError("the process has begun")

    def _connect(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Give each worker its place in a route, and leave the chain for the engine. Raises:
        BenchError.
        """
        from fleet.engine.torch.build import DTYPES
        from fleet.lab.measure.spans_recording import RecordingChain

        spans, anchor, slot = (
            self._config.stage(self._stage).spans,
            self._options.anchor,
            self._runs.route,
        )
        assert spans is not None and anchor is not None, "not an anchor"
        hops = [
            RouteWorker(
                worker=WorkerId(name),
                address=address,
                key=bytes.fromhex(self._begin.key),
                span=str(span),
            )
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
            chain = set_up_route(WorkerId(self._begin.name), hops, terms)
        except RouteFailure as failure:
            raise BenchError(str(failure)) from failure
        self._runs.chain = RecordingChain(chain, DTYPES[anchor.wire_dtype].itemsize)
        slot.offer(self._runs.chain)


class NamedNeighbours:
    """Connects to span workers whose addresses are known."""

    def __init__(self, key: bytes, own_name: str, arrivals: SpanArrivals) -> None:
        self._key, self._own_name, self._arrivals = key, own_name, arrivals
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
    """A span worker: handles what arrives on its connections, and commands in between."""

    def __init__(self, begin: Begin) -> None:
        from fleet.engine.torch.build import open_device
        from fleet.spans.host.hosting import SpanHosting
        from fleet.spans.host.loaded import LoadedSpans
        from fleet.stages.builders import span_builder
        from fleet.worker.main import build_options

        config, key = load_config(Path(begin.config)), bytes.fromhex(begin.key)
        self._checkpoint = Path(config.checkpoint)
        graph = config.graph_declaration()
        self._options = build_options(config, graph.stages[0].name, self._checkpoint)
        self._build = span_builder(graph, graph.stages[0].name)
        self._loaded: BuiltSpan | None = None
        self._arrivals = SpanArrivals()
        self._commands: queue.SimpleQueue[AnyCommand | None] = queue.SimpleQueue()
        self._neighbours = NamedNeighbours(key, begin.name, self._arrivals)
        options = self._options
        where = open_device(
            device=options.device,
            dtype=options.dtype,
            numerics=options.numerics,
            threads=options.threads,
        )
        self._hosting = SpanHosting(where, LoadedSpans(self._load), self._neighbours, lambda: None)
        self.listener = SpanListener(
            begin.host, arrivals=self._arrivals, key=key, own_name=begin.name
        )

    def _load(self, span: LayerSpan) -> "BuiltSpan":
        self._loaded = self._build(self._options, span)
        freeze_gc()
        return self._loaded

    def serve(self) -> None:
        """Handle arrivals and commands until the input ends."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        while True:
            for arrival in self._arrivals.take(WAIT_S):
                self._hosting.handle(arrival)
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._hosting.close()
                    return
                write_reply(lambda command=command: self._reply(command))

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._commands.put(DECODER.decode(line))
            self._arrivals.wake()
        self._commands.put(None)
        self._arrivals.wake()

    def _reply(self, command: AnyCommand) -> SpanReply:
        from fleet.lab.measure.spans_compute import compute_passes, measure_memory

        if isinstance(command, Connect):
            self._neighbours.addresses = command.addresses
            return SpanReply()
        if self._loaded is None:
            raise BenchError("the span worker has no layers yet")
        if isinstance(command, Compute):
            return compute_passes(self._loaded.layers, command, self._options)
        if isinstance(command, ReadMemory):
            return SpanReply(memory=measure_memory(self._checkpoint, self._loaded.layers))
        raise BenchError(f"a span worker has no command {type(command).__name__}")


def write_reply(work: Callable[[], SpanReply]) -> None:
    """Write the reply of a command; an error is one."""
    try:
        reply = work()
    except FAILURES as error:
        reply = SpanReply(error=" ".join(str(error).split()) or type(error).__name__)
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def _limit(begin: Begin) -> None:
    """Apply the limits of the process, before its libraries are loaded."""
    if begin.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {begin.core})
    if begin.data_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (begin.data_limit_bytes, begin.data_limit_bytes))


def main() -> None:
    began = DECODER.decode(sys.stdin.buffer.readline())
    assert isinstance(began, Begin), began
    _limit(began)
    made: list[MeasuredStage | MeasuredSpanWorker] = []

    def make() -> SpanReply:
        made.append(MeasuredSpanWorker(began) if began.hosts_spans else MeasuredStage(began))
        process = made[0]
        address = process.listener.address if isinstance(process, MeasuredSpanWorker) else None
        assert not isinstance(address, Path), "a measurement of TCP"
        return SpanReply(address=address)

    write_reply(make)
    if not made:
        return
    process = made[0]
    if isinstance(process, MeasuredSpanWorker):
        process.serve()
        return
    for line in sys.stdin.buffer:
        write_reply(lambda line=line: process.reply(DECODER.decode(line)))


if __name__ == "__main__":
    main()
