"""Which form of a step is used for a number of rows: torch's operations, or fused kernels. Decided
by measurement on the device at start, since no belief holds on every GPU.

Legend: B rows of a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.cuda_graphs import GraphCapture
from fleet.engine.torch.fastest import Fastest, Work
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.program import GraphProgram
from fleet.engine.torch.step_inputs import RowInputs

MAX_FUSED_ROWS = 64
"""Largest number of rows for which fused kernels are tried. They are written for steps whose time
goes into reading weights; torch's products are better at more rows.
"""
TORCH, FUSED = "torch", "fused"
TRIAL_SEED = 20_260


class StepForms:
    """Form of a program's steps by number of rows.

    `fastest`: chooses by measurement; None for torch's operations. `capture`: captures the measured
    functions as graphs, as the steps are; None to call them directly. `is_fused`: the form for all
    numbers of rows, without measurement; None to choose.
    """

    def __init__(
        self,
        program: GraphProgram[Any],
        pool: KVPool,
        fastest: Fastest | None,
        capture: GraphCapture | None,
        *,
        is_fused: bool | None = None,
    ) -> None:
        self._program, self._pool = program, pool
        self._fastest, self._capture = fastest, capture
        self._is_fused = is_fused
        self._chosen: dict[int, bool] = {}

    def is_fused(self, num_rows: int) -> bool:
        """Return True if a step of this size is computed by fused kernels. Measures at the first
        call with a size, which must come before a capture of the step, and while the pool has no
        open table: the measured steps write to its pages.
        """
        if self._is_fused is not None:
            return self._is_fused
        if num_rows not in self._chosen:
            self._chosen[num_rows] = self._measured(num_rows)
        return self._chosen[num_rows]

    def _measured(self, num_rows: int) -> bool:
        fits = num_rows <= min(MAX_FUSED_ROWS, self._pool.num_pages * self._pool.page_size)
        if self._fastest is None or not fits:
            return False
        shape, dtype = self._program.step_shape, self._pool.data.dtype
        key = f"step of {num_rows} rows, {shape}, {self._pool.shape}, {dtype}"
        inputs = trial_inputs(self._pool, shape.hidden_size, num_rows)
        works = {name: self._work(inputs, is_fused=name == FUSED) for name in (TORCH, FUSED)}
        return self._fastest.choose(key, works) == FUSED

    def _work(self, inputs: RowInputs, *, is_fused: bool) -> Work:
        layout = StepLayout(self._pool, inputs, is_fused=is_fused)

        def compute() -> Sequence[Tensor]:
            return self._program.trial(inputs.rows_BH, layout)

        return compute if self._capture is None else _captured_once(compute, self._capture)


def _captured_once(compute: Work, capture: GraphCapture) -> Work:
    """Return a function that captures `compute` as a graph at its first call, so that a failure of
    the capture is a failure of the candidate.
    """
    ready: list[Callable[[], Tensor | Sequence[Tensor]]] = []

    def replay() -> Tensor | Sequence[Tensor]:
        if not ready:
            ready.append(capture.captured(compute))
        return ready[0]()

    return replay


def trial_inputs(pool: KVPool, hidden_size: int, num_rows: int) -> RowInputs:
    """Return fixed random rows, each at a slot of its own: row i at position i % page_size of page
    i // page_size, where it sees the rows before it in its page.
    """
    device = pool.data.device
    numbers_B = torch.arange(num_rows, device=device)
    pages_BP = torch.full((num_rows, 1), pool.scratch_page, dtype=torch.int32, device=device)
    pages_BP[:, 0] = numbers_B // pool.page_size
    random = torch.Generator().manual_seed(TRIAL_SEED)
    rows_BH = torch.randn(num_rows, hidden_size, generator=random)
    return RowInputs(
        rows_BH=rows_BH.to(device, pool.data.dtype),
        positions_B=numbers_B % pool.page_size,
        slots_B=numbers_B,
        pages_BP=pages_BP,
    )
