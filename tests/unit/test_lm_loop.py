"""The batch loop with a program that counts instead of computing: who is in a pass, who waits, who is computed again."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.core.errors import BadInput, EngineError, OutOfPages
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Layout, Look
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.passes import FastRunner, TileRunner
from fleet.engine.torch.program import NUM_POSITIONS, Forwarded
from fleet.engine.torch.rows import Rows

PREFILL, DECODE = Walk("prefill"), Walk("decode")
LOOK = Look(scale=1.0)


class CountingTask:
    """Its rows hold their numbers; a draw answers the sum of all rows it sees through the pages, and appends it as a row."""

    def __init__(self, request: EngineRequest) -> None:
        self.request, self._rows, self._ended = request, Rows(), False
        self.answers: list[int] = []

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
        self._ended |= piece.final
        return ()

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows.cut(start, stop)

    def computed(self, start: int, stop: int, tapped_NH: Tensor | None) -> Sequence[EngineOutput]:
        arrays = {"span": np.array([[start, stop]])}
        return (EngineOutput(request_id=self.request.request_id, walk=PREFILL, arrays=arrays),)

    def drawn(self, answer: int) -> EngineOutput:
        self.answers.append(answer)
        self._rows.extend(torch.tensor([[float(answer % 100)]]))
        final = len(self.answers) == self.request.sampling.max_tokens
        return EngineOutput(request_id=self.request.request_id, walk=DECODE, arrays={"sum": np.array([answer])}, final=final)


class CountingProgram:
    """Attention with equal scores averages the values of a context, so average x length is the sum."""

    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.poison = -1.0

    def open(self, request: EngineRequest) -> CountingTask:
        return CountingTask(request)

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[CountingTask]) -> Forwarded:
        if (rows_NH == self.poison).any():
            raise RuntimeError("a poisoned row")
        self.passes.append([str(task.request.request_id) for task in tasks])
        nothing = torch.zeros_like(rows_NH)[:, None]
        mean_NH = layout.attend(0, nothing, torch.stack([torch.zeros_like(rows_NH), rows_NH], 1), LOOK)
        return Forwarded(last_NH=mean_NH * (layout.positions[:, None] + 1))

    def draw(self, tasks: Sequence[CountingTask], last_SH: Tensor) -> Sequence[Sequence[EngineOutput]]:
        sums = last_SH[:, 0].round().int().tolist()
        return [(task.drawn(total),) for task, total in zip(tasks, sums[: len(tasks)], strict=True)]


Loop = LMEngine[CountingTask]
Make = Callable[..., tuple[Loop, CountingProgram]]


@pytest.fixture(params=["fast", "tiles"])
def make(request: pytest.FixtureRequest) -> Make:
    def loop(num_pages: int = 64, max_batch: int = 8, chunk: int = 5) -> tuple[Loop, CountingProgram]:
        program = CountingProgram()
        pool = KVPool(program.kv_shape, num_pages=num_pages, page_size=2, dtype=torch.float32, device=torch.device("cpu"))
        runner = (FastRunner if request.param == "fast" else TileRunner)(program, pool)
        return LMEngine(program, pool, runner, LoopLimits(max_batch=max_batch, prefill_chunk_tokens=chunk)), program

    return loop


def submit(loop: Loop, name: str, numbers: list[int], max_tokens: int = 6, *, final: bool = True) -> RequestId:
    params = {NUM_POSITIONS: str(len(numbers) + max_tokens)}
    loop.submit(EngineRequest(request_id=RequestId(name), sampling=Sampling(max_tokens=max_tokens), params=params))
    feed(loop, name, numbers, final=final)
    return RequestId(name)


def feed(loop: Loop, name: str, numbers: list[int], *, final: bool) -> None:
    loop.feed(RequestId(name), EngineInput(walk=PREFILL, arrays={"numbers": np.array(numbers)}, final=final))


def run(loop: Loop) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while loop.ready():
        outputs += loop.step()
        loop.pool.check()
    return outputs


def sums(outputs: Sequence[EngineOutput], name: str) -> list[int]:
    return [int(output.arrays["sum"][0]) for output in outputs if output.request_id == name and "sum" in output.arrays]


def spans(outputs: Sequence[EngineOutput], name: str) -> list[tuple[int, int]]:
    found = [output.arrays["span"][0] for output in outputs if output.request_id == name and "span" in output.arrays]
    return [(int(start), int(stop)) for start, stop in found]


def by_hand(numbers: list[int], max_tokens: int) -> list[int]:
    rows, answers = list(numbers), []
    for _ in range(max_tokens):
        answers.append(sum(rows))
        rows.append(answers[-1] % 100)
    return answers


def test_prompts_of_any_length_beside_each_other(make: Make) -> None:
    loop, _ = make()
    prompts = {"a": [1], "b": list(range(12)), "c": [3, 4, 5, 6, 7], "d": list(range(40))}
    for name, numbers in prompts.items():
        submit(loop, name, numbers)
    outputs = run(loop)
    for name, numbers in prompts.items():
        assert sums(outputs, name) == by_hand(numbers, 6)
    assert loop.stats().pages_used == loop.stats().running == 0


def test_requests_join_while_others_run(make: Make) -> None:
    loop, program = make()
    submit(loop, "a", [1, 2, 3])
    outputs = [*loop.step(), *loop.step()]
    submit(loop, "b", [4, 5])
    outputs += run(loop)
    assert sums(outputs, "a") == by_hand([1, 2, 3], 6)
    assert sums(outputs, "b") == by_hand([4, 5], 6)
    assert ["a"] in program.passes
    assert any(set(names) == {"a", "b"} for names in program.passes)


def test_input_that_comes_in_pieces_is_computed_as_it_comes(make: Make) -> None:
    loop, _ = make()
    submit(loop, "a", [1, 2, 3], final=False)
    first = run(loop)
    assert spans(first, "a") == [(0, 3)]
    assert not sums(first, "a"), "no draw before the input is complete"
    feed(loop, "a", [4, 5], final=True)
    assert sums(run(loop), "a") == by_hand([1, 2, 3, 4, 5], 6)


def test_a_pass_takes_at_most_max_batch_eldest_first(make: Make) -> None:
    loop, program = make(max_batch=2)
    for name in "abcd":
        submit(loop, name, [1, 2], max_tokens=3)
    outputs = run(loop)
    assert max(map(len, program.passes)) == 2
    assert program.passes[0] == ["a", "b"]
    assert all(sums(outputs, name) == by_hand([1, 2], 3) for name in "abcd")


def test_a_paused_request_is_passed_over(make: Make) -> None:
    loop, program = make()
    paused = submit(loop, "a", [1, 2])
    submit(loop, "b", [3, 4])
    loop.pause(paused, paused=True)
    outputs = run(loop)
    assert sums(outputs, "b") == by_hand([3, 4], 6)
    assert not any("a" in names for names in program.passes)
    assert (loop.stats().running, loop.stats().ready) == (1, 0)
    loop.pause(paused, paused=False)
    assert sums(run(loop), "a") == by_hand([1, 2], 6)


def test_when_pages_run_out_the_youngest_is_computed_again_and_nothing_is_told_twice(make: Make) -> None:
    loop, program = make(num_pages=8, chunk=4)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    for name, numbers in prompts.items():
        submit(loop, name, numbers, max_tokens=9)
    outputs = run(loop)
    for name, numbers in prompts.items():
        assert sums(outputs, name) == by_hand(numbers, 9)
        told = spans(outputs, name)
        assert [start for start, _ in told] == [0, *(stop for _, stop in told[:-1])], "each row is told once, in order"
    assert len(program.passes) > 12, "without a lack of pages 11 passes would do"
    assert loop.stats().pages_used == 0


def test_what_can_never_fit_is_refused_at_once(make: Make) -> None:
    loop, _ = make(num_pages=4)
    with pytest.raises(OutOfPages, match="9 positions and the KV pool holds 8"):
        submit(loop, "a", [1, 2, 3])
    assert loop.stats().running == 0


def test_what_fills_the_whole_pool_runs(make: Make) -> None:
    loop, _ = make(num_pages=4)
    submit(loop, "a", [1, 2], max_tokens=6)
    submit(loop, "b", [3, 4], max_tokens=6)
    outputs = run(loop)
    assert sums(outputs, "a") == by_hand([1, 2], 6)
    assert sums(outputs, "b") == by_hand([3, 4], 6)


def test_a_request_that_breaks_a_pass_fails_alone(make: Make) -> None:
    loop, program = make()
    submit(loop, "a", [1, 2])
    submit(loop, "bad", [3, 66])
    submit(loop, "c", [5])
    program.poison = 66.0
    outputs = run(loop)
    assert sums(outputs, "a") == by_hand([1, 2], 6)
    assert sums(outputs, "c") == by_hand([5], 6)
    ends = [output for output in outputs if output.request_id == "bad"]
    assert len(ends) == 1
    assert isinstance(ends[0].error, EngineError)
    assert loop.stats().pages_used == loop.stats().running == 0


def test_bad_input_ends_its_request_with_the_users_error(make: Make) -> None:
    loop, _ = make()
    submit(loop, "a", [-1])
    outputs = run(loop)
    assert isinstance(outputs[0].error, BadInput)
    assert loop.stats().running == 0


def test_finish_and_abort_free_everything_and_unknown_ids_are_ignored(make: Make) -> None:
    loop, _ = make()
    one, two = submit(loop, "a", [1, 2, 3]), submit(loop, "b", [1, 2, 3])
    loop.step()
    assert loop.stats().pages_used > 0
    loop.finish(one)
    loop.abort(two)
    for name in (one, two, RequestId("never")):
        loop.abort(name)
        loop.finish(name)
        loop.pause(name, paused=True)
        loop.feed(name, EngineInput(walk=PREFILL))
    assert not loop.ready()
    assert loop.step() == []
    assert (loop.stats().running, loop.stats().pages_used) == (0, 0)
    loop.pool.check()
