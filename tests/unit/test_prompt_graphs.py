"""Prompts in forward steps of fixed numbers of rows, and the sampling after them, compared with
`FastRunner`, the slow twin.

On a CPU, the functions that a GPU would capture are called in every step.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.experts import grouped_experts
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import FastRunner, PassRows, PassRunner
from fleet.engine.torch.program import Forwarded, GraphProgram, GraphTask
from fleet.engine.torch.prompt_graphs import (
    MAX_READS,
    PROMPT_BUCKETS,
    PromptInputs,
    PromptSteps,
)
from fleet.engine.torch.step_inputs import StepShape
from fleet.models.causal_lm.program import CausalLM
from fleet.models.qwen3_omni.talker import CODES, VOICE, Talker
from fleet.models.qwen3_omni.thinker import WITH_ROWS, Thinker
from tests.decoder_weights import random_model

Program = GraphProgram[Any]
Entries = Sequence[tuple[GraphTask, Extent]]
CPU = torch.device("cpu")
NUM_POSITIONS_MOST = 1024
SENTINEL = 7.0
"""Value of keys and values that no row wrote."""
MAX_BATCH = 4
SAMPLED = Sampling(temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.05, ignore_eos=True)


class GivenRows:
    """Task whose input rows are given."""

    def __init__(self, rows_NH: Tensor) -> None:
        self._rows_NH = rows_NH

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows_NH[start:stop]


@pytest.fixture(scope="module")
def speaking() -> dict[str, Program]:
    model = random_model({})
    return {
        "thinker": Thinker(
            *model, frozenset([2]), grouped_experts, NUM_POSITIONS_MOST, one_by_one=False
        ),
        "talker": Talker(*model, grouped_experts, NUM_POSITIONS_MOST, tiled=False),
    }


@pytest.fixture(scope="module")
def text(text_checkpoint: Path) -> Program:
    """The text program, whose layers can be computed in forward steps, but which no stage does."""
    program: Any = CausalLM(
        text_checkpoint, frozenset([2]), device=CPU, dtype=torch.float32, tiled=False
    )
    hidden_size = program.embed(np.array([3])).shape[1]
    program.step_shape = StepShape(hidden_size=hidden_size, num_codes=1, num_ids=1, salt=0)
    return program


@pytest.fixture(params=["thinker", "talker", "text"])
def program(request: pytest.FixtureRequest, speaking: dict[str, Program]) -> Program:
    if request.param == "text":
        return request.getfixturevalue("text")
    return speaking[request.param]


def make_pool(program: Program, num_pages: int = 64) -> KVPool:
    pool = KVPool(
        program.kv_shape, num_pages=num_pages, page_size=16, dtype=torch.float32, device=CPU
    )
    pool.data.fill_(SENTINEL)
    return pool


class TwoRuns:
    """The same rows in two pools: computed by `PromptSteps`, and by its slow twin."""

    def __init__(self, program: Program, num_rows: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(len(num_rows))
        width = program.step_shape.hidden_size
        self.tasks = [
            cast(GraphTask, GivenRows(torch.randn(rows, width, generator=generator)))
            for rows in num_rows
        ]
        self.pools = make_pool(program), make_pool(program)
        self.steps = PromptSteps(program, self.pools[0], PROMPT_BUCKETS, None)
        self.twin = FastRunner(program, self.pools[1])
        self.tables = [[pool.open_table() for _ in num_rows] for pool in self.pools]
        self.sizes: list[int] = []
        compute = self.steps.compute

        def counted(inputs: PromptInputs) -> Forwarded:
            self.sizes.append(len(inputs.rows_BH))
            return compute(inputs)

        self.steps.compute = counted

    def entries(self, run: int, spans: Sequence[tuple[int, int]]) -> Entries:
        found: list[tuple[GraphTask, Extent]] = []
        for task, table, (start, stop) in zip(self.tasks, self.tables[run], spans, strict=True):
            assert self.pools[run].grow(table, stop)
            found.append((task, Extent(table=table, start=start, stop=stop)))
        return found

    def step(self, *spans: tuple[int, int]) -> None:
        """Compute a step in both pools, and compare all hidden states."""
        entries, twins = self.entries(0, spans), self.entries(1, spans)
        with torch.inference_mode():
            made, wanted = self.steps.rows_of(entries), self.twin.compute(twins)
        for part in (PassRows.last, PassRows.tapped):
            ours, theirs = part(made), part(wanted)
            assert len(ours) == len(theirs)
            for (_, extent), (_, twin) in zip(entries, twins, strict=True):
                if theirs:
                    torch.testing.assert_close(
                        ours[id(extent)], theirs[id(twin)], rtol=1e-5, atol=1e-5
                    )

    def assert_equal_pools(self) -> None:
        """Check all keys and values, including those that no row may have written; padding rows
        write to the scratch page only.
        """
        scratch = self.pools[0].scratch_page
        made, wanted = (pool.data[:, :scratch] for pool in self.pools)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(made == SENTINEL, wanted == SENTINEL)


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [
        (1, [16]),
        (15, [16]),
        (64, [64]),
        (65, [128]),
        (511, [512]),
        (512, [512]),
        (513, [512, 16]),
    ],
)
def test_prompt_equals_the_twins(program: Program, num_rows: int, sizes: list[int]) -> None:
    runs = TwoRuns(program, [num_rows])
    runs.step((0, num_rows))
    assert runs.sizes == sizes
    runs.assert_equal_pools()


def test_chunks_of_several_prompts_equal_the_twins(program: Program) -> None:
    runs = TwoRuns(program, [90, 3, 64, 17])
    runs.step((0, 40), (0, 1), (0, 21), (0, 17))
    runs.step((40, 41), (1, 3), (21, 64), (0, 17))
    runs.step((41, 90), (0, 3), (60, 64), (16, 17))
    assert runs.sizes == [128, 64, 64]
    runs.assert_equal_pools()


def test_prompts_that_need_eager_steps_are_not_accepted(speaking: dict[str, Program]) -> None:
    program = speaking["thinker"]
    steps = PromptSteps(program, make_pool(program), PROMPT_BUCKETS, None)
    plain = Extent(table=PageTable(), start=0, stop=600)
    assert steps.accept([plain, plain])
    for changed in (
        replace(plain, drafts=(1, 2)),
        replace(plain, rope_len=4096),
        replace(plain, is_capture=True),
        replace(plain, start=MAX_READS // 64, stop=MAX_READS // 64 + 70),
    ):
        assert not steps.accept([plain, changed])
    assert not PromptSteps(program, make_pool(program), (), None).accept([plain])


def run_requests(
    program: Program,
    runner_of: Callable[[Program, KVPool], PassRunner[GraphTask]],
    requests: Sequence[tuple[EngineRequest, Sequence[EngineInput]]],
    chunk: int = 48,
) -> list[tuple[object, ...]]:
    """Answer all requests, each submitted two steps after the one before it; return the outputs."""
    pool = make_pool(program, num_pages=200)
    pool.data.zero_()
    limits = LoopLimits(max_batch=MAX_BATCH, prefill_chunk_tokens=chunk)
    loop = LMEngine(program, pool, LocalPasses(runner_of(program, pool)), limits)
    outputs: list[EngineOutput] = []
    for request, pieces in requests:
        loop.submit(request)
        for piece in pieces:
            loop.feed(request.request_id, piece)
        outputs += [*loop.step(), *loop.step()]
    while loop.is_ready():
        outputs += loop.step()
    pool.check()
    assert loop.stats().running == pool.num_used == 0
    assert all(output.error is None for output in outputs)
    return sorted(
        (
            str(output.request_id),
            number,
            output.final,
            [(name, array.tolist()) for name, array in sorted(output.arrays.items())],
        )
        for number, output in enumerate(sorted(outputs, key=lambda each: str(each.request_id)))
    )


def thinker_requests() -> list[tuple[EngineRequest, Sequence[EngineInput]]]:
    """Return requests with different prompts and sampling parameters; one continues an answer that
    an earlier worker began.
    """
    samplings = [
        replace(SAMPLED, temperature=0.0),
        SAMPLED,
        replace(SAMPLED, logit_bias=((40, 4.0), (41, -6.0)), bad_words=((42,), (40, 40))),
        replace(SAMPLED, temperature=0.0, presence_penalty=0.6),
        SAMPLED,
        replace(SAMPLED, top_p=0.6),
    ]
    random = np.random.default_rng(3)
    made: list[tuple[EngineRequest, Sequence[EngineInput]]] = []
    for number, num_rows in enumerate((1, 15, 64, 65, 130, 513)):
        ids = random.integers(100, 500, num_rows, dtype=np.int32)
        history = {TOKEN: ids[:1].repeat(9)} if num_rows == 64 else {}
        request = EngineRequest(
            request_id=RequestId(str(number)),
            sampling=replace(samplings[number], max_tokens=14, seed=number),
            params={NUM_POSITIONS: str(num_rows + 14), WITH_ROWS: "yes"},
            history=history,
        )
        piece = EngineInput(walk=Walk("prefill"), arrays={"ids": ids}, final=True)
        made.append((request, [piece]))
    return made


def talker_requests() -> list[tuple[EngineRequest, Sequence[EngineInput]]]:
    random = np.random.default_rng(4)
    made: list[tuple[EngineRequest, Sequence[EngineInput]]] = []
    for number, num_rows in enumerate((1, 15, 64, 65, 530)):
        ids = random.integers(100, 500, num_rows, dtype=np.int32)
        history = {CODES: random.integers(0, 100, (4, 16), dtype=np.int32)} if number == 2 else {}
        sampling = SAMPLED if number else replace(SAMPLED, temperature=0.0)
        request = EngineRequest(
            request_id=RequestId(str(number)),
            sampling=replace(sampling, max_tokens=10, seed=number),
            params={NUM_POSITIONS: str(num_rows + 30), VOICE: "chelsie"},
            history=history,
        )
        pieces = [
            EngineInput(walk=Walk("prefill"), arrays={"ids": ids}),
            EngineInput(
                walk=Walk("decode"), arrays={"ids": ids[:1].repeat(5), "header": ids[:1].repeat(3)}
            ),
            EngineInput(walk=Walk("decode"), arrays={}, final=True),
        ]
        made.append((request, pieces))
    return made


@pytest.mark.parametrize("chunk", [48, 700])
@pytest.mark.parametrize(
    ("name", "make"), [("thinker", thinker_requests), ("talker", talker_requests)]
)
def test_answers_equal_the_twins(
    speaking: dict[str, Program],
    name: str,
    make: Callable[[], list[tuple[EngineRequest, Sequence[EngineInput]]]],
    chunk: int,
) -> None:
    """Answers equal the slow twin's: prompts in chunks beside decoding requests, with sampling
    after them, and replayed histories.
    """
    sizes: list[int] = []

    def prompt_graphs(program: Program, pool: KVPool) -> PassRunner[GraphTask]:
        runner = GraphRunner(program, pool, buckets_up_to(MAX_BATCH), prompt_buckets=PROMPT_BUCKETS)
        compute = runner.prompts.compute

        def counted(inputs: PromptInputs) -> Forwarded:
            sizes.append(len(inputs.rows_BH))
            return compute(inputs)

        runner.prompts.compute = counted
        return runner

    program = speaking[name]
    made = run_requests(program, prompt_graphs, make(), chunk)
    assert made == run_requests(program, FastRunner, make(), chunk)
    assert len(sizes) >= 6 and max(sizes) >= 64
