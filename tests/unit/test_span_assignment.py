"""Choice of a worker for each span: loaded spans are kept, and as few workers as possible load a
new one.
"""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from fleet.core.ids import WorkerId
from fleet.spans.route.division import assign_spans

SPANS = ("0:3", "4:7", "8:output")
FREE, OTHER = "", "9:9"
WANTED = st.lists(st.sampled_from(SPANS), max_size=3)
HOSTED = st.dictionaries(
    st.integers(1, 5).map(lambda number: WorkerId(f"w{number}")),
    st.sampled_from((*SPANS, FREE, OTHER)),
    max_size=5,
)


def num_loads(
    wanted: list[str], hosted: dict[WorkerId, str], chosen: tuple[WorkerId, ...]
) -> tuple[int, int]:
    """Return the number of workers that load a new span, and the number of these that drop another
    span for it.
    """
    loading = [
        worker for span, worker in zip(wanted, chosen, strict=True) if hosted[worker] != span
    ]
    return len(loading), sum(hosted[worker] != FREE for worker in loading)


def test_worker_keeps_its_span_and_a_free_one_takes_the_missing_one() -> None:
    hosted = {WorkerId("w1"): FREE, WorkerId("w2"): "8:output", WorkerId("w3"): "0:3"}
    assert assign_spans(SPANS, hosted) == ["w3", "w1", "w2"]


def test_worker_with_another_span_is_used_only_without_a_free_one() -> None:
    hosted = {WorkerId("w1"): OTHER, WorkerId("w2"): FREE}
    assert assign_spans(["0:3"], hosted) == ["w2"]
    assert assign_spans(["0:3", "4:7"], hosted) == ["w2", "w1"]
    assert assign_spans(["0:3", "4:7", "8:output"], hosted) == ["w2", "w1", None]


def test_second_worker_with_the_same_span_loads_a_missing_one() -> None:
    hosted = {WorkerId("w1"): "0:3", WorkerId("w2"): "0:3"}
    assert sorted(map(str, assign_spans(["0:3", "4:7"], hosted))) == ["w1", "w2"]


@given(WANTED, HOSTED)
def test_each_worker_has_at_most_one_span_and_none_is_missing_without_need(
    wanted: list[str], hosted: dict[WorkerId, str]
) -> None:
    chosen = assign_spans(wanted, hosted)
    used = [worker for worker in chosen if worker is not None]
    assert len(chosen) == len(wanted) and len(set(used)) == len(used) and set(used) <= set(hosted)
    assert len(used) == min(len(wanted), len(hosted))


@given(WANTED, HOSTED)
def test_no_other_choice_lets_fewer_workers_load_or_drop_a_span(
    wanted: list[str], hosted: dict[WorkerId, str]
) -> None:
    chosen = assign_spans(wanted, hosted)
    if None in chosen:
        return
    best = min(num_loads(wanted, hosted, each) for each in permutations(hosted, len(wanted)))
    assert (
        num_loads(wanted, hosted, tuple(worker for worker in chosen if worker is not None)) == best
    )


@given(st.lists(st.sampled_from(SPANS), max_size=3, unique=True), HOSTED)
def test_next_choice_of_the_same_workers_is_the_same(
    wanted: list[str], hosted: dict[WorkerId, str]
) -> None:
    chosen = assign_spans(wanted, hosted)
    loaded = {
        worker: span for span, worker in zip(wanted, chosen, strict=True) if worker is not None
    }
    again = assign_spans(wanted, {**hosted, **loaded})
    assert all(worker in (None, now) for worker, now in zip(chosen, again, strict=True))
