"""Execution of decode steps without the host: on a GPU a step is replayed as a captured CUDA graph,
one graph per batch size.

Rows after which a token is sampled are computed and sampled by the program's `decode`; all other
rows (prompts, replays) by `FastRunner`, the slow twin of this runner. Legend: B rows of a step, the
last ones padding; S rows in use.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.engine.base import EngineOutput
from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import Drawn, FastRunner, PassDone, is_due
from fleet.engine.torch.program import GraphProgram, GraphTaskT, StepOutputs
from fleet.engine.torch.rows import joined
from fleet.engine.torch.step_inputs import StepBuffers, StepInputs

Step = Callable[[StepInputs], StepOutputs]
NUM_WARM_UPS = 2
"""Number of runs before a capture: they allocate and compile what must not be allocated or compiled
during the capture.
"""


def can_capture(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a decode step with mixture-of-experts layers can be captured as a graph on a
    device.

    On other devices grouped products copy the groups' sizes to the host, which a capture refuses.
    Source: torch 2.13, aten/native/cuda/GroupedBlas.cpp.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def buckets_up_to(max_batch: int) -> list[int]:
    """Return the batch sizes for which graphs are captured: powers of two below `max_batch`, and
    `max_batch` itself.
    """
    powers = [1 << n for n in range(max_batch.bit_length()) if 1 << n < max_batch]
    return [*powers, max_batch]


class GraphRunner(Generic[GraphTaskT]):
    """Pass runner that computes all rows after which a token is sampled in one decode step, padded
    to the next captured batch size.

    `step`: function that computes a step from its inputs; captured as a graph on a GPU, called
    directly on other devices. The page table of a captured step covers the whole pool; on other
    devices it has the pages needed, rounded up to a power of two. `reads_features`: function that
    returns True while a draft head reads hidden states of steps, which a captured step does not
    return; all rows are then computed by `FastRunner`.
    """

    def __init__(
        self,
        program: GraphProgram[GraphTaskT],
        pool: KVPool,
        buckets: Sequence[int],
        reads_features: Callable[[], bool] = lambda: False,
    ) -> None:
        self._program = program
        self._pool = pool
        self._buckets = sorted(buckets)
        self._reads_features = reads_features
        self._fast = FastRunner(program, pool)
        self.step: Step = lambda inputs: program.decode(inputs, StepLayout(pool, inputs))
        self._captures = pool.data.device.type == "cuda"
        self._ready: dict[tuple[int, int], tuple[StepBuffers, Callable[[], StepOutputs]]] = {}
        self._shared_memory = torch.cuda.graph_pool_handle() if self._captures else None
        if self._captures:
            # the largest first: the others then fit into its memory
            for num_rows in reversed(self._buckets):
                self._prepare(num_rows, pool.num_pages)

    def forward(self, entries: Sequence[tuple[GraphTaskT, Extent]]) -> PassDone:
        steps = not self._reads_features()
        decoding = [
            entry for entry in entries if steps and entry[1].num_rows == 1 and is_due(*entry)
        ]
        stepping = {id(extent) for _, extent in decoding}
        others = [entry for entry in entries if id(entry[1]) not in stepping]
        tapped: dict[int, Tensor] = {}
        drawn: Drawn = {}
        rows = self._fast.compute(others) if others else None
        stepped = self._run(decoding) if decoding else None
        if rows is not None:
            tapped |= rows.tapped()
            drawn |= self._fast.draw(others, rows)
        if stepped is not None:
            tapped |= _tapped_of(decoding, stepped)
            drawn |= self._record(decoding, stepped)
        if rows is None:
            return PassDone(tapped=tapped, drawn=drawn)
        return PassDone(tapped=tapped, drawn=drawn, features=rows.features(), last=rows.last())

    def _run(self, decoding: Sequence[tuple[GraphTaskT, Extent]]) -> StepOutputs:
        """Start a decode step and return copies of its outputs, since the next step overwrites the
        originals.
        """
        used, extents = len(decoding), [extent for _, extent in decoding]
        draws = [task.next_draw() for task, _ in decoding]
        num_rows = next(bucket for bucket in self._buckets if bucket >= used)
        buffers, run = self._prepare(num_rows, self._num_pages(extents))
        buffers.fill(
            joined([task.rows(extent.start, extent.stop) for task, extent in decoding]),
            extents,
            draws,
            [task.num_drawn for task, _ in decoding],
        )
        done = run()
        tapped_BH, logits_BV = done.tapped_BH, done.logits_BV
        is_adjusted = any(draw.adjustment is not None for draw in draws)
        return StepOutputs(
            codes_BQ=done.codes_BQ[:used].clone(),
            rows_BH=done.rows_BH[:used].clone(),
            tapped_BH=None if tapped_BH is None else tapped_BH[:used].clone(),
            logits_BV=logits_BV[:used].clone() if is_adjusted and logits_BV is not None else None,
        )

    def _record(self, decoding: Sequence[tuple[GraphTaskT, Extent]], stepped: StepOutputs) -> Drawn:
        """Copy the sampled codes to the host, which waits for nothing else of a step, and record
        them; return the outputs. Rows with an adjustment, which the step does not know, are sampled
        again from its logits.
        """
        codes_SQ = stepped.codes_BQ.cpu().numpy()
        tasks = [task for task, _ in decoding]
        if stepped.logits_BV is None:
            outputs = self._program.record(tasks, codes_SQ, stepped.rows_BH)
        else:
            outputs = self._draw_adjusted(tasks, codes_SQ, stepped, stepped.logits_BV)
        return {id(extent): output for (_, extent), output in zip(decoding, outputs, strict=True)}

    def _draw_adjusted(
        self,
        tasks: Sequence[GraphTaskT],
        codes_SQ: NDArray[np.int32],
        stepped: StepOutputs,
        logits_SV: Tensor,
    ) -> Sequence[Sequence[EngineOutput]]:
        adjusted = [
            row for row, task in enumerate(tasks) if task.next_draw().adjustment is not None
        ]
        index = torch.tensor(adjusted, device=logits_SV.device)
        drawn = self._program.draw_from([tasks[row] for row in adjusted], logits_SV[index])
        outputs = dict(zip(adjusted, drawn, strict=True))
        for row, task in enumerate(tasks):
            if row not in outputs:
                own = slice(row, row + 1)
                (outputs[row],) = self._program.record([task], codes_SQ[own], stepped.rows_BH[own])
        return [outputs[row] for row in range(len(tasks))]

    def _num_pages(self, extents: Sequence[Extent]) -> int:
        if self._captures:
            return self._pool.num_pages
        most = max(self._pool.pages_for(extent.stop) for extent in extents)
        return min(1 << (most - 1).bit_length(), self._pool.num_pages)

    def _prepare(
        self, num_rows: int, num_pages: int
    ) -> tuple[StepBuffers, Callable[[], StepOutputs]]:
        """Return the input buffers of a step of this size, and a function that runs the step on
        them; both are created at the first call.
        """
        key = (num_rows, num_pages)
        if key not in self._ready:
            buffers = StepBuffers(self._program.step_shape, self._pool, num_rows, num_pages)
            run = (
                self._captured(buffers.inputs)
                if self._captures
                else lambda: self.step(buffers.inputs)
            )
            self._ready[key] = buffers, run
        return self._ready[key]

    @torch.inference_mode()
    def _captured(self, inputs: StepInputs) -> Callable[[], StepOutputs]:
        """Capture a step as a graph on a GPU; return a function that replays the graph and returns
        its output tensors.

        The step reads and writes fixed tensors only: its inputs, the weights, and the KV pool. An
        input that is not filled yet is padding and touches only the scratch page. All graphs share
        their memory, which is safe since one step runs at a time, and no step reads what an earlier
        one left.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._pool.data.device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARM_UPS):
                    self.step(inputs)
            current.wait_stream(stream)
            # other threads of the process may use the GPU meanwhile
            with torch.cuda.graph(
                graph, pool=self._shared_memory, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = self.step(inputs)

        def replay() -> StepOutputs:
            graph.replay()
            return outputs

        return replay


def _tapped_of(
    decoding: Sequence[tuple[GraphTaskT, Extent]], stepped: StepOutputs
) -> dict[int, Tensor]:
    if stepped.tapped_BH is None:
        return {}
    return {
        id(extent): row_1H
        for (_, extent), row_1H in zip(decoding, stepped.tapped_BH.split(1), strict=True)
    }
