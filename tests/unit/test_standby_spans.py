"""Spans that unused span workers should load, so that every span of the route has equally many
replacements.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fleet.core.ids import WorkerId
from fleet.spans.route.division import RouteWorker
from fleet.spans.route.standby import choose_standby_spans

SPANS = ("0:3", "4:7", "8:output")


def unused(*loaded: str) -> list[RouteWorker]:
    return [
        RouteWorker(worker=WorkerId(f"w{number}"), address=("127.0.0.1", 1), key=b"", span=span)
        for number, span in enumerate(loaded)
    ]


def test_worker_without_a_span_loads_the_one_that_no_other_has() -> None:
    assert [
        (hop.worker, hop.span)
        for hop in choose_standby_spans(SPANS, unused("0:3", "", "8:output", ""))
    ] == [
        ("w1", "4:7"),
        ("w3", "0:3"),
    ]


def test_worker_with_a_span_of_an_earlier_division_loads_another() -> None:
    assert [hop.span for hop in choose_standby_spans(SPANS, unused("0:5", "4:7"))] == ["0:3"]


@given(loaded=st.lists(st.sampled_from(("", "0:5", *SPANS)), max_size=8))
def test_workers_keep_spans_of_the_route_and_the_others_even_out_the_copies(
    loaded: list[str],
) -> None:
    chosen = choose_standby_spans(SPANS, unused(*loaded))
    assert {hop.worker for hop in chosen} == {
        f"w{number}" for number, span in enumerate(loaded) if span not in SPANS
    }
    before = Counter(span for span in loaded if span in SPANS)
    after = before + Counter(hop.span for hop in chosen)
    if chosen:
        added = {hop.span for hop in chosen}
        assert max(after[span] for span in added) <= min(after[span] for span in SPANS) + 1
