"""Scheduling of the batch loop: which requests a step has, which wait, which are evicted, and how a
request fails.
"""

from functools import partial

import pytest

from fleet.core.errors import BadInput, EngineError, OutOfMemory, OutOfPages
from fleet.core.ids import RequestId
from fleet.engine.base import EngineOutput
from tests.unit.counting_loop import (
    RUNNERS,
    CountingTask,
    Make,
    answer_all,
    by_hand,
    counting_loop,
    feed,
    run,
    spans,
    submit,
    sums,
)


@pytest.fixture(params=RUNNERS)
def make(request: pytest.FixtureRequest) -> Make:
    return partial(counting_loop, request.param)


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
    """A step that fails after progress is not retried: a second attempt would silently skip the
    token that request a sampled in the failed step.
    """
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
