"""Division of layers by memory: every layer once, the fullest process as empty as possible, and what lacks."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.span_plan import ModelSizes, PlannedSpan, plan_spans

LAYER, EMBEDDING, HEAD, KV, BUFFER = 100, 300, 300, 20, 10


def sizes(num_layers: int, *, tied: bool = False) -> ModelSizes:
    return ModelSizes(
        layers=(LAYER,) * num_layers, embedding=EMBEDDING, before=7, after=5, head=HEAD, tied=tied, kv_bytes=KV,
        buffer_bytes=BUFFER,
    )  # fmt: skip


def notations(spans: tuple[PlannedSpan, ...]) -> list[str]:
    return [str(each.span) for each in spans]


def test_equal_budgets_leave_the_processes_with_embedding_and_head_fewer_layers() -> None:
    plan = plan_spans(sizes(12), 1000, [1000, 1000], anchor_is_last=False)
    assert notations(plan.spans) == ["0:2", "3:8", "9:output"] and not plan.lacking_bytes
    assert [each.num_bytes for each in plan.spans] == [3 * 120 + 300 + 7 + 10, 6 * 120 + 10, 3 * 120 + 300 + 5 + 10]


def test_anchor_that_is_last_has_the_embedding_and_the_head() -> None:
    plan = plan_spans(sizes(10), 1500, [1000], anchor_is_last=True)
    assert notations(plan.spans) == ["0:5", "6:output"]
    assert [each.is_anchor for each in plan.spans] == [False, True]
    assert plan.spans[1].num_bytes == 4 * 120 + 300 + 300 + 5 + 10


@pytest.mark.parametrize(("anchor_is_last", "copies"), [(True, 1), (False, 2)])
def test_head_that_is_the_embedding_is_counted_once_per_process(anchor_is_last: bool, copies: int) -> None:
    plan = plan_spans(sizes(8, tied=True), 1000, [1000], anchor_is_last=anchor_is_last)
    assert sum(each.num_bytes for each in plan.spans) == 8 * 120 + copies * 300 + 7 + 5 + 2 * 10


@pytest.mark.parametrize("anchor_is_last", [True, False])
def test_memory_of_the_anchor_alone_is_counted_in_its_process_only(anchor_is_last: bool) -> None:
    plan = plan_spans(replace(sizes(12), anchor=200), 1000, [1000, 1000], anchor_is_last=anchor_is_last)
    without = [sizes(12).bytes_of(each.span, is_anchor=each.is_anchor) for each in plan.spans]
    added = [each.num_bytes - num_bytes for each, num_bytes in zip(plan.spans, without, strict=True)]
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
    model = ModelSizes(layers=tuple(layers), embedding=40, before=3, after=2, head=40, tied=tied, kv_bytes=4, buffer_bytes=5)
    budgets = budgets[: len(layers)]
    plan = plan_spans(model, budgets[0], budgets[1:], anchor_is_last=anchor_is_last)
    covered = [layer for each in plan.spans for layer in range(each.span.first, each.span.final + 1)]
    assert covered == list(range(len(layers))) and len(plan.spans) == len(budgets)
    assert [each.span.has_output for each in plan.spans] == [*[False] * (len(budgets) - 1), True]
    ordered = [each.budget for each in plan.spans]

    def fullest(cuts: tuple[int, ...]) -> float:
        total = 0.0
        for process, (first, stop) in enumerate(pairwise((0, *cuts, len(layers)))):
            has_output, is_anchor = stop == len(layers), process == (len(ordered) - 1 if anchor_is_last else 0)
            num_bytes = sum(layers[first:stop]) + 4 * (stop - first) + 5 + 3 * (first == 0) + 2 * has_output
            num_bytes += 40 * (is_anchor or (tied and has_output)) + 40 * (has_output and not tied)
            total = max(total, num_bytes / ordered[process])
        return total

    others = [fullest(cuts) for cuts in combinations(range(1, len(layers)), len(ordered) - 1)]
    assert max(each.fill for each in plan.spans) == pytest.approx(min(others))
