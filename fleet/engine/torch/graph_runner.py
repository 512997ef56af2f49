"""Execution of steps without the host: on a GPU a step is replayed as captured CUDA graphs, one
graph per batch size.

Single rows after which a token is sampled are computed and sampled by the program's `decode`. All
other rows (prompts, replays) are computed by `PromptSteps`, and the tokens after them sampled by
the program's `sample_step`; or both by `FastRunner`, the slow twin of this runner. Legend: B rows
of a step, the last ones padding; S rows in use.
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
from fleet.engine.torch.cuda_graphs import GraphCapture
from fleet.engine.torch.fastest import Fastest
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import Drawn, FastRunner, PassDone, PassRows, is_due
from fleet.engine.torch.program import GraphProgram, GraphTaskT, StepOutputs
from fleet.engine.torch.prompt_graphs import MAX_READS, PROMPT_BUCKETS, PromptSteps
from fleet.engine.torch.rows import joined
from fleet.engine.torch.sampling import RowSampling
from fleet.engine.torch.step_forms import StepForms
from fleet.engine.torch.step_inputs import StepBuffers, StepInputs

Step = Callable[[StepInputs], StepOutputs]
Prepared = tuple[StepBuffers, Callable[[], StepOutputs]]
"""Input buffers of a step, and the function that runs the step on them."""
NO_PAGES = 1
"""Width of the page tables in buffers for sampling alone, which reads no page."""


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
    """Pass runner that computes all single rows after which a token is sampled in one decode step,
    padded to the next captured batch size, and other rows in forward steps of `prompts`.

    `step`: function that computes a decode step from its inputs; captured as a graph on a GPU,
    called directly on other devices. The page table of a captured step covers the whole pool; on
    other devices it has the pages needed, rounded up to a power of two. `reads_features`: function
    that returns True while a draft head reads hidden states of steps, which a captured step does
    not return; all rows are then computed by `FastRunner`. `prompt_buckets`: numbers of rows of a
    forward step; by default `PROMPT_BUCKETS` on a GPU, and none on other devices, where
    `FastRunner` computes prompts. `fastest`, `is_fused`: see `StepForms`; if `is_fused` is True,
    contexts of any length are computed in forward steps, so that no row is left to `FastRunner`
    unless its request has draft tokens or is a sample for a trainer.
    """

    def __init__(
        self,
        program: GraphProgram[GraphTaskT],
        pool: KVPool,
        buckets: Sequence[int],
        reads_features: Callable[[], bool] = lambda: False,
        prompt_buckets: Sequence[int] | None = None,
        *,
        fastest: Fastest | None = None,
        is_fused: bool | None = None,
    ) -> None:
        self._program = program
        self._pool = pool
        self._buckets = sorted(buckets)
        self._reads_features = reads_features
        self._fast = FastRunner(program, pool)
        device = pool.data.device
        self._capture = GraphCapture(device) if device.type == "cuda" else None
        self._forms = StepForms(program, pool, fastest, self._capture, is_fused=is_fused)
        self.step: Step = self._decode
        self._ready: dict[tuple[int, int], Prepared] = {}
        self._samplers: dict[int, Prepared] = {}
        if prompt_buckets is None:
            prompt_buckets = PROMPT_BUCKETS if self._capture is not None else ()
        self.prompt_buckets = tuple(sorted(prompt_buckets))
        self.prompts = PromptSteps(
            program,
            pool,
            self.prompt_buckets,
            self._capture,
            self._forms.is_fused,
            max_reads=None if is_fused else MAX_READS,
        )
        if self._capture is not None:
            # the largest first: the others then fit into its memory
            for num_rows in reversed(self._buckets):
                self._prepare(num_rows, pool.num_pages)
                self._prepare_sampling(num_rows)

    def forward(self, entries: Sequence[tuple[GraphTaskT, Extent]]) -> PassDone:
        steps = not self._reads_features()
        decoding = [
            entry for entry in entries if steps and entry[1].num_rows == 1 and is_due(*entry)
        ]
        stepping = {id(extent) for _, extent in decoding}
        others = [entry for entry in entries if id(entry[1]) not in stepping]
        tapped: dict[int, Tensor] = {}
        drawn: Drawn = {}
        is_captured = steps and self.prompts.accept([extent for _, extent in others])
        compute = self.prompts.rows_of if is_captured else self._fast.compute
        rows = compute(others) if others else None
        stepped = self._run(decoding) if decoding else None
        if rows is not None:
            draw = self._draw if is_captured else self._fast.draw
            tapped |= rows.tapped()
            drawn |= draw(others, rows)
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
        extents = [extent for _, extent in decoding]
        draws = [task.next_draw() for task, _ in decoding]
        num_rows = next(bucket for bucket in self._buckets if bucket >= len(decoding))
        buffers, run = self._prepare(num_rows, self._num_pages(extents))
        buffers.fill(
            joined([task.rows(extent.start, extent.stop) for task, extent in decoding]),
            extents,
            draws,
            [task.num_drawn for task, _ in decoding],
        )
        return _copied(run(), draws)

    def _draw(self, entries: Sequence[tuple[GraphTaskT, Extent]], rows: PassRows) -> Drawn:
        """Sample the tokens that are due after the rows of a forward step, as `FastRunner.draw`."""
        due = [(task, extent) for task, extent in entries if is_due(task, extent)]
        if not due:
            return {}
        return self._record(due, self._sampled(due, rows.last_rows([extent for _, extent in due])))

    def _sampled(self, due: Sequence[tuple[GraphTaskT, Extent]], last_SH: Tensor) -> StepOutputs:
        """Start the sampling of tokens from final hidden states; return copies of the outputs."""
        num_rows = next(bucket for bucket in self._buckets if bucket >= len(due))
        buffers, run = self._prepare_sampling(num_rows)
        draws = [task.next_draw() for task, _ in due]
        buffers.fill_draws(last_SH, draws, [task.num_drawn for task, _ in due])
        return _copied(run(), draws)

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
        if self._capture is not None:
            return self._pool.num_pages
        return self._pool.rounded_pages_for(max(extent.stop for extent in extents))

    def _decode(self, inputs: StepInputs) -> StepOutputs:
        layout = StepLayout(self._pool, inputs, is_fused=self._forms.is_fused(len(inputs.rows_BH)))
        return self._program.decode(inputs, layout)

    def _prepare(self, num_rows: int, num_pages: int) -> Prepared:
        """Return the input buffers of a step of this size, and a function that runs the step on
        them; both are created at the first call.
        """
        key = (num_rows, num_pages)
        if key not in self._ready:
            self._forms.is_fused(num_rows)
            self._ready[key] = self._prepared(num_rows, num_pages, lambda inputs: self.step(inputs))
        return self._ready[key]

    def _prepare_sampling(self, num_rows: int) -> Prepared:
        """Return the same as `_prepare` for sampling alone: the rows of the inputs are final hidden
        states.
        """
        if num_rows not in self._samplers:
            is_fused = self._forms.is_fused(num_rows)
            self._samplers[num_rows] = self._prepared(
                num_rows,
                NO_PAGES,
                lambda inputs: self._program.sample_step(
                    inputs.rows_BH, inputs.draws, is_fused=is_fused
                ),
            )
        return self._samplers[num_rows]

    def _prepared(self, num_rows: int, num_pages: int, step: Step) -> Prepared:
        buffers = StepBuffers(self._program.step_shape, self._pool, num_rows, num_pages)

        def run() -> StepOutputs:
            return step(buffers.inputs)

        return buffers, run if self._capture is None else self._capture.captured(run)


def _copied(done: StepOutputs, draws: Sequence[RowSampling]) -> StepOutputs:
    """Return copies of the outputs of the rows in use, without logits that nothing needs. `draws`:
    sampling parameters of these rows.
    """
    used, tapped_BH, logits_BV = len(draws), done.tapped_BH, done.logits_BV
    is_adjusted = any(draw.adjustment is not None for draw in draws)
    return StepOutputs(
        codes_BQ=done.codes_BQ[:used].clone(),
        rows_BH=done.rows_BH[:used].clone(),
        tapped_BH=None if tapped_BH is None else tapped_BH[:used].clone(),
        logits_BV=logits_BV[:used].clone() if is_adjusted and logits_BV is not None else None,
    )


def _tapped_of(
    decoding: Sequence[tuple[GraphTaskT, Extent]], stepped: StepOutputs
) -> dict[int, Tensor]:
    if stepped.tapped_BH is None:
        return {}
    return {
        id(extent): row_1H
        for (_, extent), row_1H in zip(decoding, stepped.tapped_BH.split(1), strict=True)
    }
