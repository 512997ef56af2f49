"""Division of layers by memory: every layer is assigned once, the fullest process is as empty as
possible, and missing memory is reported.
"""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fleet.spans.protocol.plan import ModelSizes, PlannedSpan, further_worker_bytes, plan_spans

LAYER, EMBEDDING, HEAD, KV, BUFFER = 100, 300, 300, 20, 10


def sizes(num_layers: int, *, tied: bool = False) -> ModelSizes:
    return ModelSizes(
        layers=(LAYER,) * num_layers,
        embedding=EMBEDDING,
        before=7,
        after=5,
        head=HEAD,
        tied=tied,
        kv_bytes=KV,
        buffer_bytes=BUFFER,
    )


def notations(spans: tuple[PlannedSpan, ...]) -> list[str]:
    return [str(each.span) for each in spans]


def test_equal_budgets_leave_the_processes_with_embedding_and_head_fewer_layers() -> None:
    plan = plan_spans(sizes(12), 1000, [1000, 1000], anchor_is_last=False)
    assert notations(plan.spans) == ["0:2", "3:8", "9:output"] and not plan.lacking_bytes
    assert [each.num_bytes for each in plan.spans] == [
        3 * 120 + 300 + 7 + 10,
        6 * 120 + 10,
        3 * 120 + 300 + 5 + 10,
    ]


def test_anchor_that_is_last_has_the_embedding_and_the_head() -> None:
    plan = plan_spans(sizes(10), 1500, [1000], anchor_is_last=True)
    assert notations(plan.spans) == ["0:5", "6:output"]
    assert [each.is_anchor for each in plan.spans] == [False, True]
    assert plan.spans[1].num_bytes == 4 * 120 + 300 + 300 + 5 + 10


@pytest.mark.parametrize(("anchor_is_last", "copies"), [(True, 1), (False, 2)])
def test_head_that_is_the_embedding_is_counted_once_per_process(
    anchor_is_last: bool, copies: int
) -> None:
    plan = plan_spans(sizes(8, tied=True), 1000, [1000], anchor_is_last=anchor_is_last)
    assert sum(each.num_bytes for each in plan.spans) == 8 * 120 + copies * 300 + 7 + 5 + 2 * 10


@pytest.mark.parametrize("anchor_is_last", [True, False])
def test_memory_of_the_anchor_alone_is_counted_in_its_process_only(anchor_is_last: bool) -> None:
    plan = plan_spans(
        replace(sizes(12), anchor=200), 1000, [1000, 1000], anchor_is_last=anchor_is_last
    )
    without = [sizes(12).bytes_of(each.span, is_anchor=each.is_anchor) for each in plan.spans]
    added = [
        each.num_bytes - num_bytes for each, num_bytes in zip(plan.spans, without, strict=True)
    ]
    assert added == ([0, 0, 200] if anchor_is_last else [200, 0, 0])


def test_plan_of_budgets_that_are_too_small_lacks_the_difference() -> None:
    plan = plan_spans(sizes(8), 500, [500], anchor_is_last=False)
    assert plan.lacking_bytes == 8 * 120 + 300 + 300 + 7 + 5 + 2 * 10 - 1000


@given(
    layers=st.lists(st.integers(1, 50), min_size=3, max_size=7),
    budgets=st.lists(st.integers(50, 300), min_size=1, max_size=3),
    anchor_is_last=st.booleans(),
    tied=st.booleans(),
)
def test_no_other_division_has_a_less_full_fullest_process(
    layers: list[int], budgets: list[int], anchor_is_last: bool, tied: bool
) -> None:
    model = ModelSizes(
        layers=tuple(layers),
        embedding=40,
        before=3,
        after=2,
        head=40,
        tied=tied,
        kv_bytes=4,
        buffer_bytes=5,
    )
    budgets = budgets[: len(layers)]
    plan = plan_spans(model, budgets[0], budgets[1:], anchor_is_last=anchor_is_last)
    covered = [
        layer for each in plan.spans for layer in range(each.span.first, each.span.final + 1)
    ]
    assert covered == list(range(len(layers))) and len(plan.spans) == len(budgets)
    assert [each.span.has_output for each in plan.spans] == [*[False] * (len(budgets) - 1), True]
    ordered = [each.budget for each in plan.spans]

    def rank(cuts: tuple[int, ...]) -> tuple[int, float]:
        lacking, fullest = 0, 0.0
        for process, (first, stop) in enumerate(pairwise((0, *cuts, len(layers)))):
            has_output, is_anchor = (
                stop == len(layers),
                process == (len(ordered) - 1 if anchor_is_last else 0),
            )
            num_bytes = (
                sum(layers[first:stop]) + 4 * (stop - first) + 5 + 3 * (first == 0) + 2 * has_output
            )
            num_bytes += 40 * (is_anchor or (tied and has_output)) + 40 * (has_output and not tied)
            lacking += max(0, num_bytes - ordered[process])
            fullest = max(fullest, num_bytes / ordered[process])
        return lacking, fullest

    others = [rank(cuts) for cuts in combinations(range(1, len(layers)), len(ordered) - 1)]
    assert (plan.lacking_bytes, max(each.fill for each in plan.spans)) == min(others)


def test_plan_that_does_not_fit_lacks_least_and_not_the_smallest_share_of_a_budget() -> None:
    model = ModelSizes(
        layers=(100,) * 12,
        embedding=0,
        before=0,
        after=0,
        head=0,
        tied=False,
        kv_bytes=0,
        buffer_bytes=0,
    )
    plan = plan_spans(model, 10, [1000], anchor_is_last=False)
    assert notations(plan.spans) == ["0:0", "1:output"] and plan.lacking_bytes == 90 + 100


@pytest.mark.parametrize("tied", [False, True])
def test_head_on_the_anchor_is_counted_there_and_no_worker_has_it(tied: bool) -> None:
    model = sizes(8, tied=tied)
    plan = plan_spans(model, 1200, [700], anchor_is_last=False, head_on_anchor=True)
    anchor, worker = plan.spans
    assert (
        anchor.has_head
        and not worker.has_head
        and not worker.span.has_output
        and worker.span.final == 7
    )
    assert (
        worker.num_bytes
        == model.cached_bytes(worker.span) + LAYER * (8 - worker.span.first) + BUFFER
    )
    assert anchor.num_bytes == 120 * worker.span.first + 300 + 300 * (not tied) + 7 + 5 + 10


@given(
    layers=st.lists(st.integers(1, 50), min_size=2, max_size=7),
    budgets=st.lists(st.integers(50, 200), min_size=1, max_size=3),
    anchor_is_last=st.booleans(),
    head_on_anchor=st.booleans(),
)
@example(layers=[1, 1, 42, 1], budgets=[58, 50], anchor_is_last=False, head_on_anchor=False)
def test_further_worker_of_the_smallest_budget_makes_the_model_fit_and_no_smaller_one_does(
    layers: list[int], budgets: list[int], anchor_is_last: bool, head_on_anchor: bool
) -> None:
    model = ModelSizes(
        layers=tuple(layers),
        embedding=40,
        before=3,
        after=2,
        head=40,
        tied=False,
        kv_bytes=4,
        buffer_bytes=5,
    )
    anchor, workers = budgets[0], budgets[1:]
    options = {"anchor_is_last": anchor_is_last, "head_on_anchor": head_on_anchor}
    assume(
        len(layers) >= len(budgets) and plan_spans(model, anchor, workers, **options).lacking_bytes
    )
    needed = further_worker_bytes(model, anchor, workers, **options)
    if len(layers) == len(budgets):
        assert needed is None
    elif needed is None:
        assert plan_spans(model, anchor, [*workers, 10_000], **options).lacking_bytes
    else:
        assert not plan_spans(model, anchor, [*workers, needed], **options).lacking_bytes
        assert plan_spans(model, anchor, [*workers, needed - 1], **options).lacking_bytes
