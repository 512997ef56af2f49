"""Number of prompt rows beside decoding requests: by the measured time of steps, with a clock that
the tests advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from fleet.core.ids import RequestId
from fleet.core.request import Sampling
from fleet.engine.base import EngineOutput, EngineRequest
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.prompt_pace import MAX_STEP_S, RETRY_S, PromptPace, divided_rows
from fleet.engine.torch.scheduled import ScheduledRequest
from tests.unit.counting_loop import (
    CountingProgram,
    CountingTask,
    Loop,
    by_hand,
    run,
    spans,
    submit,
    sums,
)

BUCKETS = (4, 8, 16, 32)
CHUNK = 32
STEP_S = 0.010
ROW_S = 0.0008
"""Time of a step and of each of its padded prompt rows: up to 8 rows beside decoding requests stay
within `MAX_STEP_S`.
"""
SHORT_S, LONG_S = MAX_STEP_S / 2, MAX_STEP_S * 2


@dataclass(slots=True)
class StepClock:
    """A clock that stands still until it is advanced."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class TimedRunner:
    """Pass runner whose steps take `STEP_S`, and `ROW_S` for each padded prompt row. `steps`:
    number of rows of each request in each step.
    """

    def __init__(self, program: CountingProgram, pool: KVPool, clock: StepClock) -> None:
        self._runner = GraphRunner(program, pool, buckets_up_to(8), prompt_buckets=BUCKETS)
        self._clock = clock
        self.steps: list[dict[str, int]] = []

    def forward(self, entries: Sequence[tuple[CountingTask, Extent]]) -> PassDone:
        rows = {str(task.request.request_id): extent.num_rows for task, extent in entries}
        self.steps.append(rows)
        num_rows = sum(number for number in rows.values() if number > 1)
        padded = min((bucket for bucket in BUCKETS if bucket >= num_rows), default=num_rows)
        self._clock.now_s += STEP_S + (ROW_S * padded if num_rows else 0.0)
        return self._runner.forward(entries)


def timed_loop(buckets: tuple[int, ...] = BUCKETS) -> tuple[Loop, TimedRunner]:
    program, clock = CountingProgram(), StepClock()
    pool = KVPool(
        program.kv_shape,
        num_pages=400,
        page_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    runner = TimedRunner(program, pool, clock)
    limits = LoopLimits(max_batch=8, prefill_chunk_tokens=CHUNK, prompt_buckets=buckets)
    return LMEngine(program, pool, LocalPasses(runner), limits, clock=clock), runner


def test_pace_has_no_limit_without_buckets() -> None:
    pace = PromptPace((), StepClock())
    pace.record(5, LONG_S, has_sampled=True)
    assert pace.max_rows() is None


def test_pace_tries_larger_buckets_until_steps_are_too_slow() -> None:
    clock = StepClock()
    pace = PromptPace(BUCKETS, clock)
    assert pace.max_rows() == 4
    pace.record(3, SHORT_S, has_sampled=True)
    assert pace.max_rows() == 8
    pace.record(8, SHORT_S, has_sampled=True)
    assert pace.max_rows() == 16
    pace.record(13, LONG_S, has_sampled=True)
    assert pace.max_rows() == 8
    clock.now_s += RETRY_S
    assert pace.max_rows() == 8
    clock.now_s += 1.0
    assert pace.max_rows() == 16, "a slow bucket is tried again"
    pace.record(16, SHORT_S, has_sampled=True)
    assert pace.max_rows() == 32
    pace.record(32, SHORT_S, has_sampled=True)
    assert pace.max_rows() == 32


def test_pace_is_never_less_than_the_smallest_bucket() -> None:
    pace = PromptPace(BUCKETS, StepClock())
    for _ in range(5):
        pace.record(1, LONG_S, has_sampled=True)
    assert pace.max_rows() == 4


def test_pace_follows_the_mean_of_recent_steps() -> None:
    pace = PromptPace(BUCKETS, StepClock())
    for num_rows in BUCKETS:
        pace.record(num_rows, SHORT_S, has_sampled=True)
    pace.record(32, LONG_S, has_sampled=True)
    assert pace.max_rows() == 32, "one slow step among many is no trend"
    pace.record(32, LONG_S, has_sampled=True)
    pace.record(32, LONG_S, has_sampled=True)
    assert pace.max_rows() == 16


@pytest.mark.parametrize("num_rows", [0, 33])
def test_pace_ignores_steps_without_a_bucket(num_rows: int) -> None:
    pace = PromptPace(BUCKETS, StepClock())
    pace.record(num_rows, LONG_S, has_sampled=True)
    pace.record(4, SHORT_S, has_sampled=True)
    assert pace.max_rows() == 8


def test_pace_ignores_steps_whose_end_is_unknown() -> None:
    pace = PromptPace(BUCKETS, StepClock())
    pace.record(4, SHORT_S / 100, has_sampled=False)
    pace.record(4, LONG_S, has_sampled=True)  # includes the time of the step before
    assert pace.max_rows() == 4
    pace.record(4, SHORT_S, has_sampled=True)
    assert pace.max_rows() == 8


@pytest.mark.parametrize(
    ("wanted", "num_rows", "shares"),
    [
        ([100], 16, [16]),
        ([100, 3], 16, [13, 3]),
        ([100, 100], 17, [9, 8]),
        ([2, 50, 5, 50], 32, [2, 12, 5, 13]),
        ([1, 2], 16, [1, 2]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([], 16, []),
    ],
)
def test_rows_are_divided_equally(wanted: list[int], num_rows: int, shares: list[int]) -> None:
    made = divided_rows(wanted, num_rows)
    assert sorted(made) == sorted(shares) and sum(made) == min(sum(wanted), num_rows)
    assert all(share <= most for share, most in zip(made, wanted, strict=True))


def test_long_prompt_does_not_delay_a_decoding_request() -> None:
    loop, runner = timed_loop()
    submit(loop, "talks", [1, 2], max_tokens=40)
    outputs = [*loop.step(), *loop.step()]
    submit(loop, "reads", list(range(100)), max_tokens=3)
    outputs += run(loop)
    assert sums(outputs, "talks") == by_hand([1, 2], 40)
    assert sums(outputs, "reads") == by_hand(list(range(100)), 3)
    beside = [step["reads"] for step in runner.steps if {"talks", "reads"} <= step.keys()]
    assert beside[:4] == [8, 16, 8, 8], "the first slow bucket is tried once"
    assert max(beside[4:]) == 8


def test_cut_chunks_are_reported_whole() -> None:
    """Outputs of a prompt do not depend on how its chunks were cut."""
    found: list[list[tuple[int, int]]] = []
    for buckets in (BUCKETS, ()):
        loop, runner = timed_loop(buckets)
        submit(loop, "talks", [1, 2], max_tokens=40)
        outputs: list[EngineOutput] = [*loop.step()]
        submit(loop, "reads", list(range(70)), max_tokens=3)
        outputs += run(loop)
        found.append(spans(outputs, "reads"))
        assert (max(step.get("reads", 0) for step in runner.steps) == CHUNK) is (not buckets)
    assert found[0] == found[1] == [(0, 32), (32, 64), (64, 70), (70, 71), (71, 72)]


def test_prompts_alone_have_whole_chunks() -> None:
    loop, runner = timed_loop()
    submit(loop, "a", list(range(70)), max_tokens=1)
    submit(loop, "b", list(range(40)), max_tokens=1)
    run(loop)
    assert runner.steps == [{"a": 32, "b": 32}, {"a": 32, "b": 8}, {"a": 6}]


def test_short_prompt_is_read_beside_a_long_one() -> None:
    loop, _ = timed_loop()
    submit(loop, "talks", [1, 2], max_tokens=60)
    loop.step()
    submit(loop, "long", list(range(200)), max_tokens=1)
    loop.step()
    submit(loop, "short", [1, 2, 3, 4], max_tokens=1)
    outputs = [output for _ in range(2) for output in loop.step()]
    assert sums(outputs, "short") == [10]
    outputs += run(loop)
    assert sums(outputs, "long") == by_hand(list(range(200)), 1)


class ReportedRows:
    """Task that notes what is reported to it."""

    num_rows = 100

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, list[float] | None]] = []

    def on_computed(
        self, start: int, stop: int, tapped_NH: torch.Tensor | None
    ) -> Sequence[EngineOutput]:
        rows = None if tapped_NH is None else tapped_NH[:, 0].tolist()
        self.reports.append((start, stop, rows))
        return ()


def make_scheduled(task: ReportedRows) -> ScheduledRequest[Any]:
    request = EngineRequest(request_id=RequestId("a"), sampling=Sampling(max_tokens=1))
    return ScheduledRequest(
        request=request, task=cast(Any, task), table=cast(PageTable, None), reported=4
    )


def test_tapped_rows_of_a_cut_chunk_are_held_for_its_report() -> None:
    rows, task = torch.arange(20.0)[:, None], ReportedRows()
    scheduled = make_scheduled(task)
    scheduled.report(9, rows[6:9], is_cut=True)
    scheduled.computed = 9
    assert scheduled.num_reusable == 4 and not task.reports
    scheduled.restart_at(9)
    scheduled.report(12, rows[9:12], is_cut=False)
    scheduled.computed = 12
    assert task.reports == [(4, 12, [6.0, 7.0, 8.0, 9.0, 10.0, 11.0])]
    assert scheduled.num_reusable == scheduled.reported == 12
    scheduled.report(13, None, is_cut=False)
    assert task.reports[-1] == (12, 13, None)


def test_rows_that_are_computed_again_are_not_held_twice() -> None:
    rows, task = torch.arange(20.0)[:, None], ReportedRows()
    scheduled = make_scheduled(task)
    scheduled.report(9, rows[4:9], is_cut=True)
    scheduled.computed = 9
    scheduled.restart_at(0)
    scheduled.report(12, rows[4:12], is_cut=False)
    assert task.reports == [(4, 12, [float(row) for row in range(4, 12)])]
