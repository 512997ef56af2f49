"""A batch loop with a program that adds numbers instead of computing a model, and helpers that
submit requests and read the outputs.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import AttentionParams, Extent, Layout
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import FastRunner, PassDone, PassRunner, TileRunner
from fleet.engine.torch.prefix import Prefix
from fleet.engine.torch.program import Forwarded, ProgramTask, StepOutputs
from fleet.engine.torch.rows import Rows
from fleet.engine.torch.sampling import RowSampling
from fleet.engine.torch.step_inputs import DrawInputs, StepInputs, StepShape

PREFILL, DECODE = Walk("prefill"), Walk("decode")
LOOK = AttentionParams(scale=1.0)


class CountingTask(ProgramTask):
    """Task of the counting program, whose rows are numbers. Sampling returns the sum of all rows,
    read through the KV pages, and appends it as a row.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._rows = Rows()
        self._ended = False
        self.answers: list[int] = []
        self.numbers: list[int] = []

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def wants_draw(self) -> bool:
        return self._ended

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        numbers = piece.arrays["numbers"]
        if (numbers < 0).any():
            raise BadInput("numbers: must not be negative")
        self._rows.extend(torch.tensor(numbers, dtype=torch.float32)[:, None])
        self.numbers += numbers.tolist()
        self._ended |= piece.final
        return ()

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows.cut(start, stop)

    def on_computed(
        self, start: int, stop: int, tapped_NH: Tensor | None
    ) -> Sequence[EngineOutput]:
        arrays = {"span": np.array([[start, stop]])}
        return (EngineOutput(request_id=self.request.request_id, walk=PREFILL, arrays=arrays),)

    @property
    def num_drawn(self) -> int:
        return len(self.answers)

    def next_draw(self) -> RowSampling:
        return RowSampling(sampling=self.request.sampling)

    def prefix(self) -> Prefix:
        return Prefix(keys=np.array(self.numbers, np.int64))

    def on_reused(self, prefix: Prefix, start: int, stop: int) -> None:
        assert prefix.keys[start:stop].tolist() == self.numbers[start:stop]

    def drawn(self, answer: int) -> EngineOutput:
        self.answers.append(answer)
        self.numbers.append(answer % 100)
        self._rows.extend(torch.tensor([[float(answer % 100)]]))
        final = len(self.answers) == self.request.sampling.max_tokens
        return EngineOutput(
            request_id=self.request.request_id,
            walk=DECODE,
            arrays={"sum": np.array([answer])},
            final=final,
        )


class CountingProgram:
    """Program that computes sums by attention: equal scores average a context's values, and average
    x length is the sum.
    """

    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
    step_shape = StepShape(hidden_size=1, num_codes=1, num_ids=1, salt=0)
    tapped_width = 0

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.poison = -1.0
        self.error: Exception = RuntimeError("a poisoned row")

    def open(self, request: EngineRequest) -> CountingTask:
        return CountingTask(request)

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[CountingTask]) -> Forwarded:
        if (rows_NH == self.poison).any():
            raise self.error
        self.passes.append([str(task.request.request_id) for task in tasks])
        nothing = torch.zeros_like(rows_NH)[:, None]
        mean_NH = layout.attend(
            0, nothing, torch.stack([torch.zeros_like(rows_NH), rows_NH], 1), LOOK
        )
        return Forwarded(last_NH=mean_NH * (layout.positions[:, None] + 1))

    def draw(
        self, tasks: Sequence[CountingTask], last_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        sums = last_SH[:, 0].round().int().tolist()
        return [(task.drawn(total),) for task, total in zip(tasks, sums[: len(tasks)], strict=True)]

    def draw_from(
        self, tasks: Sequence[CountingTask], logits_SV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        raise AssertionError("no row of this program has an adjustment")

    def decode(self, inputs: StepInputs, layout: StepLayout) -> StepOutputs:
        return self.sample_step(self.forward(inputs.rows_BH, layout, ()).last_NH, inputs.draws)

    def trial(self, rows_BH: Tensor, layout: StepLayout) -> Sequence[Tensor]:
        raise AssertionError("this program has one form of a step")

    def sample_step(
        self, last_BH: Tensor, draws: DrawInputs, *, is_fused: bool = False
    ) -> StepOutputs:
        assert not is_fused
        sums_B1 = last_BH.round()
        return StepOutputs(codes_BQ=sums_B1.int(), rows_BH=sums_B1 % 100)

    def record(
        self, tasks: Sequence[CountingTask], codes_SQ: NDArray[np.int32], rows_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        self.passes[-1] += [str(task.request.request_id) for task in tasks]
        return [
            (task.drawn(total),) for task, total in zip(tasks, codes_SQ[:, 0].tolist(), strict=True)
        ]


class PromptGraphs:
    """Pass runner with prompts in forward steps of 2, 4 or 8 rows. The program does not know whose
    rows these are, so the requests of each step are noted here.
    """

    def __init__(self, program: CountingProgram, pool: KVPool) -> None:
        self._program = program
        self._runner = GraphRunner(program, pool, buckets_up_to(8), prompt_buckets=(2, 4, 8))

    def forward(self, entries: Sequence[tuple[CountingTask, Extent]]) -> PassDone:
        before = len(self._program.passes)
        done = self._runner.forward(entries)
        names = [str(task.request.request_id) for task, _ in entries]
        self._program.passes[before:] = [names]
        return done


Loop = LMEngine[CountingTask]
Make = Callable[..., tuple[Loop, CountingProgram]]
"""Type of `counting_loop` with its first argument given."""
RUNNERS: dict[str, Callable[[CountingProgram, KVPool], PassRunner[CountingTask]]] = {
    "fast": FastRunner,
    "tiles": TileRunner,
    "graphs": lambda program, pool: GraphRunner(program, pool, buckets_up_to(8)),
    "prompt graphs": PromptGraphs,
}


def counting_loop(
    runner: str, *, num_pages: int = 64, max_batch: int = 8, chunk: int = 5
) -> tuple[Loop, CountingProgram]:
    """Return an empty batch loop, with pages of 2 rows, and its counting program.

    `runner`: key of `RUNNERS`. `chunk`: largest number of prompt rows computed in one step.
    """
    program = CountingProgram()
    pool = KVPool(
        program.kv_shape,
        num_pages=num_pages,
        page_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    loop = LMEngine(
        program,
        pool,
        LocalPasses(RUNNERS[runner](program, pool)),
        LoopLimits(max_batch=max_batch, prefill_chunk_tokens=chunk),
    )
    return loop, program


def submit(
    loop: Loop,
    name: str,
    numbers: list[int],
    max_tokens: int = 6,
    *,
    final: bool = True,
    session: str = "",
) -> RequestId:
    params = {NUM_POSITIONS: str(len(numbers) + max_tokens)}
    sampling = Sampling(max_tokens=max_tokens)
    loop.submit(
        EngineRequest(request_id=RequestId(name), sampling=sampling, params=params, session=session)
    )
    feed(loop, name, numbers, final=final)
    return RequestId(name)


def feed(loop: Loop, name: str, numbers: list[int], *, final: bool) -> int:
    return loop.feed(
        RequestId(name),
        EngineInput(walk=PREFILL, arrays={"numbers": np.array(numbers)}, final=final),
    )


def run(loop: Loop) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while loop.is_ready():
        outputs += loop.step()
        loop.pool.check()
    return outputs


def sums(outputs: Sequence[EngineOutput], name: str) -> list[int]:
    return [
        int(output.arrays["sum"][0])
        for output in outputs
        if output.request_id == name and "sum" in output.arrays
    ]


def spans(outputs: Sequence[EngineOutput], name: str) -> list[tuple[int, int]]:
    found = [
        output.arrays["span"][0]
        for output in outputs
        if output.request_id == name and "span" in output.arrays
    ]
    return [(int(start), int(stop)) for start, stop in found]


def by_hand(numbers: list[int], max_tokens: int) -> list[int]:
    rows, answers = list(numbers), []
    for _ in range(max_tokens):
        answers.append(sum(rows))
        rows.append(answers[-1] % 100)
    return answers


def answer_all(
    loop: Loop, prompts: dict[str, list[int]], max_tokens: int = 6, session: str = ""
) -> list[EngineOutput]:
    """Submit the prompts, compare each answer with the expected sums, and return all outputs."""
    for name, numbers in prompts.items():
        submit(loop, name, numbers, max_tokens, session=session)
    outputs = run(loop)
    for name, numbers in prompts.items():
        assert sums(outputs, name) == by_hand(numbers, max_tokens)
    return outputs
