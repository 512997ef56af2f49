"""Scheduling of the batch loop, with a program that counts instead of computing: passes, waiting
and eviction.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput, EngineError, OutOfMemory, OutOfPages
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import AttentionParams, Layout
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import FastRunner, PassRunner, TileRunner
from fleet.engine.torch.prefix import Prefix
from fleet.engine.torch.program import Forwarded, ProgramTask, StepOutputs
from fleet.engine.torch.rows import Rows
from fleet.engine.torch.sampling import RowSampling
from fleet.engine.torch.step_inputs import StepInputs, StepShape
from tests.capabilities import prefixes_of

PREFILL, DECODE = Walk("prefill"), Walk("decode")
LOOK = AttentionParams(scale=1.0)


class CountingTask(ProgramTask):
    """Task whose rows hold their numbers; a draw returns the sum of all rows read through the
    pages, and appends it as a row.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request, self._rows, self._ended = request, Rows(), False
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
    """Attention with equal scores averages the values of a context, so average x length is the
    sum.
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

    def decode(self, inputs: StepInputs, layout: Layout) -> StepOutputs:
        sums_B1 = self.forward(inputs.rows_BH, layout, ()).last_NH.round()
        return StepOutputs(codes_BQ=sums_B1.int(), rows_BH=sums_B1 % 100)

    def record(
        self, tasks: Sequence[CountingTask], codes_SQ: NDArray[np.int32], rows_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        self.passes[-1] += [str(task.request.request_id) for task in tasks]
        return [
            (task.drawn(total),) for task, total in zip(tasks, codes_SQ[:, 0].tolist(), strict=True)
        ]


Loop = LMEngine[CountingTask]
Make = Callable[..., tuple[Loop, CountingProgram]]


RUNNERS: dict[str, Callable[[CountingProgram, KVPool], PassRunner[CountingTask]]] = {
    "fast": FastRunner,
    "tiles": TileRunner,
    "graphs": lambda program, pool: GraphRunner(program, pool, buckets_up_to(8)),
}


@pytest.fixture(params=RUNNERS)
def make(request: pytest.FixtureRequest) -> Make:
    def loop(
        num_pages: int = 64, max_batch: int = 8, chunk: int = 5
    ) -> tuple[Loop, CountingProgram]:
        program = CountingProgram()
        pool = KVPool(
            program.kv_shape,
            num_pages=num_pages,
            page_size=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        runner = RUNNERS[request.param](program, pool)
        return LMEngine(
            program,
            pool,
            LocalPasses(runner),
            LoopLimits(max_batch=max_batch, prefill_chunk_tokens=chunk),
        ), program

    return loop


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
    """Submit the prompts, compare each answer with that computed by hand, and return all
    outputs.
    """
    for name, numbers in prompts.items():
        submit(loop, name, numbers, max_tokens, session=session)
    outputs = run(loop)
    for name, numbers in prompts.items():
        assert sums(outputs, name) == by_hand(numbers, max_tokens)
    return outputs


def test_prompts_of_different_lengths_run_together(make: Make) -> None:
    loop, _ = make()
    answer_all(loop, {"a": [1], "b": list(range(12)), "c": [3, 4, 5, 6, 7], "d": list(range(40))})
    assert loop.stats().kv.pages_used == loop.stats().running == 0


def test_request_joins_while_others_run(make: Make) -> None:
    loop, program = make()
    submit(loop, "a", [1, 2, 3])
    outputs = [*loop.step(), *loop.step()]
    submit(loop, "b", [4, 5])
    outputs += run(loop)
    assert sums(outputs, "a") == by_hand([1, 2, 3], 6)
    assert sums(outputs, "b") == by_hand([4, 5], 6)
    assert ["a"] in program.passes
    assert any(set(names) == {"a", "b"} for names in program.passes)


def test_input_in_pieces_is_computed_as_it_arrives(make: Make) -> None:
    loop, _ = make()
    submit(loop, "a", [1, 2, 3], final=False)
    first = run(loop)
    assert spans(first, "a") == [(0, 3)]
    assert not sums(first, "a"), "no draw before the input is complete"
    feed(loop, "a", [4, 5], final=True)
    assert sums(run(loop), "a") == by_hand([1, 2, 3, 4, 5], 6)


def test_pass_runs_at_most_max_batch_requests_oldest_first(make: Make) -> None:
    loop, program = make(max_batch=2)
    answer_all(loop, dict.fromkeys("abcd", [1, 2]), max_tokens=3)
    assert max(map(len, program.passes)) == 2
    assert program.passes[0] == ["a", "b"]


def test_youngest_request_is_evicted_and_recomputed_without_repeated_output(make: Make) -> None:
    loop, program = make(num_pages=8, chunk=4)
    outputs = answer_all(loop, {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}, max_tokens=9)
    for name in "abc":
        reported = spans(outputs, name)
        assert [start for start, _ in reported] == [0, *(stop for _, stop in reported[:-1])], (
            "each row is reported once, in order"
        )
    assert len(program.passes) > 12, "without a lack of pages 11 passes would do"
    assert loop.stats().kv.pages_used == 0


def test_request_larger_than_the_pool_is_refused_immediately(make: Make) -> None:
    loop, _ = make(num_pages=4)
    with pytest.raises(
        OutOfPages,
        match="maximum context length is 8 tokens, what its KV pool holds. However, you "
        "requested 9",
    ):
        submit(loop, "a", [1, 2, 3])
    assert loop.stats().running == 0


def test_request_that_fills_the_pool_runs(make: Make) -> None:
    loop, _ = make(num_pages=4)
    answer_all(loop, {"a": [1, 2], "b": [3, 4]})


@pytest.mark.parametrize(
    ("error", "reported", "message"),
    [
        (RuntimeError("a poisoned row"), EngineError, ""),
        (MemoryError(), OutOfMemory, "lower max_tokens"),
    ],
    ids=["an error", "a lack of memory"],
)
def test_request_that_breaks_a_pass_fails_alone(
    make: Make, error: Exception, reported: type[EngineError], message: str
) -> None:
    loop, program = make()
    submit(loop, "a", [1, 2])
    submit(loop, "bad", [3, 66])
    submit(loop, "c", [5])
    program.poison, program.error = 66.0, error
    outputs = run(loop)
    assert sums(outputs, "a") == by_hand([1, 2], 6)
    assert sums(outputs, "c") == by_hand([5], 6)
    (end,) = [output for output in outputs if output.request_id == "bad"]
    assert isinstance(end.error, reported) and message in end.error.message
    assert loop.stats().kv.pages_used == loop.stats().running == 0


def test_pass_that_fails_after_progress_is_not_retried(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their draws would be lost without an error: only a log shows their progress."""
    loop, _ = make()
    submit(loop, "a", [1, 2])
    submit(loop, "b", [3, 4])
    drawn = CountingTask.drawn

    def fails_for_b(task: CountingTask, answer: int) -> EngineOutput:
        if task.request.request_id == "b":
            raise RuntimeError("in mid-draw")
        return drawn(task, answer)

    monkeypatch.setattr(CountingTask, "drawn", fails_for_b)
    with pytest.raises(RuntimeError, match="in mid-draw"):
        run(loop)
    for name in ("a", "b"):
        loop.abort(RequestId(name))
    assert loop.stats().kv.pages_used == 0
    submit(loop, "b", [3, 4])
    (end,) = run(loop)[-1:]
    assert isinstance(end.error, EngineError), "alone it is known whose fault it is"


def test_bad_input_ends_its_request_with_the_users_error(make: Make) -> None:
    loop, _ = make()
    submit(loop, "a", [-1])
    outputs = run(loop)
    assert isinstance(outputs[0].error, BadInput)
    assert loop.stats().running == 0


def rows_after(numbers: list[int], max_tokens: int) -> list[int]:
    """Return the cached rows of a request that has ended: all but the last draw's."""
    return [*numbers, *(answer % 100 for answer in by_hand(numbers, max_tokens)[:-1])]


def num_passes(program: CountingProgram, name: str) -> int:
    return sum(name in names for names in program.passes)


FIRST = [3, 1, 4, 1, 5, 9, 2]


def test_next_turn_computes_only_uncached_rows(make: Make) -> None:
    loop, program = make()
    answer_all(loop, {"first": FIRST}, session="talk")
    before = rows_after(FIRST, 6)
    assert prefixes_of(loop).num_rows("talk") == len(before) == 12
    stats = loop.stats()
    assert stats.kv.pages_used == stats.kv.pages_cached == 6
    second = [*before, *range(50, 61)]
    submit(loop, "second", second, session="talk")
    assert (
        loop.stats().kv.rows_reused,
        loop.stats().kv.pages_cached,
        prefixes_of(loop).num_rows("talk"),
    ) == (
        12,
        0,
        0,
    )
    outputs = run(loop)
    assert sums(outputs, "second") == by_hand(second, 6)
    assert num_passes(program, "second") == 3 + 5, (
        "three for the eleven new rows, with the first draw"
    )
    alone, _ = make()
    assert spans(outputs, "second") == spans(answer_all(alone, {"second": second}), "second"), (
        "it is reported in the same pieces"
    )


@pytest.mark.parametrize(
    ("second", "reused"),
    [(FIRST, 6), (FIRST[:3], 2), ([3, 1, 4, 8, 5, 9, 2], 3), ([8, *FIRST], 0), ([3], 0)],
)
def test_diverging_prompt_reuses_its_common_prefix(
    make: Make, second: list[int], reused: int
) -> None:
    loop, _ = make(chunk=2)
    answer_all(loop, {"first": FIRST}, session="talk")
    submit(loop, "second", second, session="talk")
    assert loop.stats().kv.rows_reused == reused
    assert sums(run(loop), "second") == by_hand(second, 6)
    assert prefixes_of(loop).num_rows("talk") == len(second) + 5


def test_input_in_pieces_reuses_rows_until_it_differs(make: Make) -> None:
    loop, program = make(chunk=2)
    answer_all(loop, {"first": FIRST}, session="talk")
    submit(loop, "second", FIRST[:2], session="talk", final=False)
    program.passes.clear()
    assert feed(loop, "second", FIRST[2:5], final=False) == 3
    reported = run(loop)
    assert not program.passes, "there is nothing to compute"
    assert feed(loop, "second", [9, 7, 7], final=True) == 1
    second = [*FIRST[:5], 9, 7, 7]
    reported += run(loop)
    assert sums(reported, "second") == by_hand(second, 6)
    assert spans(reported, "second")[:4] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_cached_prefix_is_dropped_before_a_request_waits_or_is_evicted(make: Make) -> None:
    loop, program = make(num_pages=8, chunk=4)
    for name in ("one", "two"):
        submit(loop, name, [1, 2, 3], max_tokens=3, session=name)
    run(loop)
    assert loop.stats().kv.pages_cached == 6
    program.passes.clear()
    submit(loop, "long", list(range(8)), max_tokens=8)
    submit(loop, "short", [1], max_tokens=1)
    outputs = run(loop)
    assert sums(outputs, "long") == by_hand(list(range(8)), 8)
    assert {name for names in program.passes[:2] for name in names} == {"short", "long"}, (
        "neither waits"
    )
    assert num_passes(program, "long") == 9
    assert (
        prefixes_of(loop).num_rows("one"),
        prefixes_of(loop).num_rows("two"),
        loop.stats().kv.pages_used,
    ) == (
        0,
        0,
        0,
    )


def test_request_with_reused_prefix_can_be_evicted(make: Make) -> None:
    loop, _ = make(num_pages=12, chunk=4)
    answer_all(loop, {"first": list(range(10))}, max_tokens=2, session="talk")
    submit(loop, "eldest", list(range(8)), max_tokens=12)
    outputs = loop.step()
    submit(loop, "second", list(range(6)), session="talk", final=False)
    outputs = [*outputs, *run(loop)]
    feed(loop, "second", [7, 7], final=True)
    outputs += run(loop)
    assert sums(outputs, "eldest") == by_hand(list(range(8)), 12)
    assert sums(outputs, "second") == by_hand([*range(6), 7, 7], 6)


def test_failure_leaves_nothing_cached(make: Make) -> None:
    loop, program = make(chunk=1)
    answer_all(loop, {"first": FIRST}, session="talk")
    submit(loop, "bad", [3, 66], session="talk")
    program.poison = 66.0
    run(loop)
    assert (prefixes_of(loop).num_rows("talk"), loop.stats().kv.pages_used) == (0, 0)


def test_last_ended_request_of_a_session_stays_cached_until_dropped(make: Make) -> None:
    loop, _ = make()
    submit(loop, "long", [1, 2, 3], max_tokens=9, session="talk")
    submit(loop, "short", [4, 5], max_tokens=2, session="talk")
    run(loop)
    assert (
        prefixes_of(loop).num_rows("talk"),
        prefixes_of(loop).num_rows("other"),
        prefixes_of(loop).num_rows(""),
    ) == (11, 0, 0)
    answer_all(loop, {"other": [4, 5]}, max_tokens=2, session="other")
    prefixes_of(loop).drop("talk")
    assert (prefixes_of(loop).num_rows("talk"), prefixes_of(loop).num_rows("other")) == (0, 3)
    prefixes_of(loop).drop()
    assert loop.stats().kv.pages_used == 0
    loop.pool.check()


def test_finish_caches_computed_rows(make: Make) -> None:
    loop, _ = make(chunk=3)
    first = submit(loop, "first", FIRST, session="talk")
    loop.step()
    loop.finish(first)
    assert prefixes_of(loop).num_rows("talk") == 3
    answer_all(loop, {"second": FIRST}, session="talk")


def test_conversations_in_a_small_pool_give_the_same_answers_as_without_sessions(
    make: Make,
) -> None:
    chance = random.Random(5)
    loop, _ = make(num_pages=20, chunk=3)
    rows: dict[str, list[int]] = {name: [1, 2] for name in "abc"}
    for round_ in range(25):
        asked = {name: rows[name] for name in chance.sample("abc", chance.randrange(1, 4))}
        for name, numbers in asked.items():
            submit(loop, f"{name}{round_}", numbers, max_tokens=4, session=name)
        outputs = run(loop)
        for name, numbers in asked.items():
            assert sums(outputs, f"{name}{round_}") == by_hand(numbers, 4)
            grown = [*rows_after(numbers, 4), chance.randrange(9)]
            rows[name] = grown if len(grown) < 30 else grown[: chance.randrange(1, 9)]
    stats = loop.stats()
    assert stats.kv.rows_reused > 100 and stats.kv.pages_used == stats.kv.pages_cached
