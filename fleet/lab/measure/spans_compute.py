"""Computation in a process of the measurement of layer spans: answers by its engine, or passes of
its own layers alone.

Legend: N rows of a pass, H hidden size.
"""

import time
from pathlib import Path
from typing import cast

import torch

from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import TOKEN, await_ready
from fleet.engine.torch.build import DTYPES
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.lm_engine import LMEngine
from fleet.engine.torch.program import ProgramTask
from fleet.lab.measure.spans_protocol import Answer, Compute, ProcessMemory, SpanReply
from fleet.lab.measure.spans_recording import RecordingChain
from fleet.spans.anchor.passes import SpanProgram
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.torch.model import SpanComputer, SpanLayers, last_rows
from fleet.stages.base import BuiltStage
from fleet.stages.options import BuildOptions

WAIT_S = 1.0
KIB = 1024
FIRST_ID, NUM_IDS = 100, 200
"""Range of the ids of prompts, which every vocabulary has."""


class EngineRuns:
    """Answers by the engine of a stage. `chain`: of an anchor."""

    def __init__(self, built: BuiltStage, stage: StageName, options: BuildOptions) -> None:
        self._built, self._stage, self._options = built, stage, options
        self._num_requests = 0
        self.chain: RecordingChain | None = None

    @property
    def route(self) -> RouteSlot:
        assert self._built.route is not None, "not an anchor"
        return self._built.route

    @property
    def _layers(self) -> SpanLayers | None:
        """The span of an anchor."""
        if self._options.anchor is None:
            return None
        return cast(
            "SpanProgram[ProgramTask]", cast("LMEngine[ProgramTask]", self._built.engine).program
        ).layers

    def answer(self, command: Answer) -> SpanReply:
        """Answer requests as a worker's loop does. Raises: FleetError if one fails."""
        engine, answers = self._built.engine, dict[RequestId, list[int]]()
        if self.chain is not None:
            self.chain.clear()
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
        return reply if self.chain is None else self.chain.recorded(reply)

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

    def compute(self, command: Compute) -> SpanReply:
        assert self._layers is not None, "not an anchor"
        return compute_passes(self._layers, command, self._options)

    def read_memory(self, checkpoint: Path) -> SpanReply:
        return SpanReply(memory=measure_memory(checkpoint, self._layers))


@torch.inference_mode()
def compute_passes(layers: SpanLayers, command: Compute, options: BuildOptions) -> SpanReply:
    """Compute passes of random rows in a pool of their own."""
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


def measure_memory(checkpoint: Path, layers: SpanLayers | None) -> ProcessMemory:
    """Return the process's memory, after every weight of a span was read."""
    weights = layers.weights() if layers is not None else {}
    for weight in weights.values():
        weight.sum()
    status = _fields(Path("/proc/self/status").read_text())
    return ProcessMemory(
        peak=status["VmHWM"],
        anonymous=status["RssAnon"],
        data=status["VmData"],
        weight_files=_resident_of_files(checkpoint.resolve()),
        weights=sum({weight.data_ptr(): weight.nbytes for weight in weights.values()}.values()),
    )


def _fields(text: str) -> dict[str, int]:
    """Return the sizes of a file of /proc, in bytes, by their names."""
    parts = (line.split() for line in text.splitlines())
    return {
        words[0].removesuffix(":"): int(words[1]) * KIB for words in parts if words[2:] == ["kB"]
    }


def _resident_of_files(folder: Path) -> int:
    """Return how much is resident of the files of a folder that this process has mapped."""
    total, is_of_folder = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_of_folder = len(words) > 5 and Path(words[5]).is_relative_to(folder)
        elif words[0] == "Rss:" and is_of_folder:
            total += int(words[1]) * KIB
    return total
