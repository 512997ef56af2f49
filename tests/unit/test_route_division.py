"""Automatic division of layers among all available span workers, changed no sooner and no later
than it should be.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.config.stage_schema import SpansConfig
from fleet.core.ids import StageName, WorkerId
from fleet.spans.protocol.plan import ModelSizes
from fleet.spans.route.division import (
    JOIN_GRACE_S,
    LOSS_GRACE_S,
    AutomaticDivision,
    Candidates,
    Placed,
    RouteGap,
    RouteWorker,
    fits_beside,
)

MIB = 1 << 20
SIZES = ModelSizes(
    layers=(100 * MIB,) * 12,
    embedding=50 * MIB,
    before=0,
    after=MIB,
    head=50 * MIB,
    tied=False,
    kv_bytes=10 * MIB,
    buffer_bytes=20 * MIB,
)
FORWARD, REVERSE = (
    SpansConfig(anchor="0:1", workers=("auto",), replicas=2),
    SpansConfig(anchor="10:output", workers=("auto",)),
)


class TurnedClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Route:
    """An anchor's automatic division as its route keeper uses it, with a clock that the test
    sets.
    """

    def __init__(self, spans: SpansConfig = FORWARD, *, head_on_anchor: bool = False) -> None:
        self.clock = TurnedClock()
        self.division = AutomaticDivision(
            StageName("lm"), spans, SIZES, head_on_anchor=head_on_anchor, now_s=self.clock
        )

    def place(self, *free: RouteWorker, limit: int = 99) -> list[str]:
        placed = self.division.place(Candidates(free=free, limit=limit))
        self.division.accept(placed)
        return described(placed)

    def better(self, *free: RouteWorker, limit: int = 99, is_leaving: bool = False) -> list[str]:
        return described(
            self.division.better(Candidates(free=free, limit=limit), is_leaving=is_leaving)
        )

    def losses(self, *free: RouteWorker) -> dict[WorkerId, str]:
        return dict(self.division.losses(Candidates(free=free, limit=99)) or {})


def described(placed: Placed) -> list[str]:
    return [f"{worker} {span}" for worker, span in placed]


def worker(
    number: int, memory_mib: int = 10_000, span: str = "", *, stands_by: bool = False
) -> RouteWorker:
    return RouteWorker(
        worker=WorkerId(f"w{number}"),
        address=("127.0.0.1", 1),
        key=b"",
        span=span,
        memory=memory_mib * MIB,
        stands_by=stands_by,
    )


ONE, TWO, THREE, STANDBY = worker(1), worker(2), worker(3), worker(9, stands_by=True)


def test_first_division_waits_for_the_expected_workers_and_not_for_ever() -> None:
    route = Route()
    with pytest.raises(
        RouteGap, match="only 1 of 2 span workers are here for layers 2 to 11 of lm"
    ):
        route.place(ONE)
    route.clock.now_s += LOSS_GRACE_S
    assert route.place(ONE) == ["w1 2:output"]
    assert Route().place(ONE, TWO) == ["w1 2:6", "w2 7:output"]


def test_anchor_that_is_last_leaves_no_head_to_workers() -> None:
    assert Route(REVERSE).place(ONE, TWO) == ["w1 0:4", "w2 5:9"]


def test_workers_without_a_head_end_at_the_last_layer() -> None:
    assert Route(head_on_anchor=True).place(ONE, TWO) == ["w1 2:6", "w2 7:11"]


def test_worker_that_comes_has_a_part_of_the_layers_after_a_moment() -> None:
    route = Route()
    route.place(ONE, TWO)
    assert route.better(ONE, TWO, THREE) == []
    route.clock.now_s += JOIN_GRACE_S - 0.1
    assert route.better(ONE, TWO, THREE, worker(4)) == [], "another one has come meanwhile"
    route.clock.now_s += JOIN_GRACE_S
    assert route.better(ONE, TWO, THREE, worker(4)) == [
        "w1 2:3",
        "w2 4:6",
        "w3 7:9",
        "w4 10:output",
    ]


def test_standby_worker_gets_layers_only_in_the_place_of_another() -> None:
    route = Route()
    with pytest.raises(RouteGap):
        route.place(ONE, STANDBY)
    route.place(ONE, TWO, STANDBY)
    route.clock.now_s += 2 * JOIN_GRACE_S
    assert route.better(ONE, TWO, STANDBY) == []
    assert route.place(TWO, STANDBY) == ["w9 2:6", "w2 7:output"]


def test_lost_worker_is_waited_for_before_the_others_divide_its_layers() -> None:
    route = Route()
    route.place(ONE, TWO, THREE)
    with pytest.raises(RouteGap, match="only 2 of 3"):
        route.place(ONE, THREE)
    assert route.place(ONE, THREE, worker(4)) == ["w1 2:4", "w4 5:8", "w3 9:output"], (
        "the next incarnation"
    )
    with pytest.raises(RouteGap, match="only 2 of 3"):
        route.place(ONE, THREE)
    route.clock.now_s += LOSS_GRACE_S
    assert route.place(ONE, THREE) == ["w1 2:6", "w3 7:output"]


def test_layers_of_a_leaving_worker_go_to_an_unused_one_else_to_all_others() -> None:
    route = Route()
    route.place(ONE, TWO, STANDBY)
    assert route.better(TWO, STANDBY, is_leaving=True) == ["w9 2:6", "w2 7:output"]
    assert route.better(TWO, is_leaving=True) == ["w2 2:output"]
    with pytest.raises(RouteGap, match="no span worker has layers 2 to 11 of lm"):
        route.better(is_leaving=True)


def test_worker_cannot_leave_if_its_layers_fit_nowhere_else_and_the_sum_says_why() -> None:
    route = Route()
    small = [worker(number, 700) for number in (1, 2, 3)]
    route.place(*small)
    assert route.losses(*small) == {}
    tight = [worker(number, 500) for number in (1, 2, 3)]
    route.place(*tight)
    losses = route.losses(*tight)
    why = (
        "without it layers 2 to 11 of lm need 1.16 GiB on 2 span workers, which may occupy "
        "1000 MiB: 191 MiB are missing"
    )
    assert losses == {each.worker: why for each in tight}
    assert route.losses(*tight, worker(4, 500)) == {}
    with pytest.raises(RouteGap, match="are missing"):
        Route().place(worker(1, 500), worker(2, 500))


def test_larger_memory_has_the_layers_that_a_smaller_one_cannot_have() -> None:
    assert Route().place(worker(1, 250), worker(2)) == ["w1 2:3", "w2 4:output"]


def test_successor_of_an_anchor_finds_the_division_that_is_loaded() -> None:
    first = Route()
    placed = first.place(ONE, TWO, THREE)
    spans = dict(each.split() for each in placed)
    loaded = [replace(each, span=spans[each.worker]) for each in (THREE, ONE, TWO)]
    assert Route().place(*loaded) == placed


def test_route_gives_up_workers_that_another_anchor_lacks() -> None:
    route = Route()
    route.place(*(four := [worker(number) for number in (1, 2, 3, 4)]))
    assert route.better(*four, limit=2) == []
    route.clock.now_s += LOSS_GRACE_S
    assert route.better(*four, limit=2) == ["w1 2:6", "w2 7:output"]


@given(memory=st.lists(st.integers(150, 2500), min_size=1, max_size=6), reverse=st.booleans())
def test_each_layer_is_had_once_and_none_has_more_than_needed(
    memory: Sequence[int], reverse: bool
) -> None:
    route = Route(REVERSE if reverse else FORWARD)
    free = [worker(number, mib) for number, mib in enumerate(memory)]
    candidates = Candidates(free=free, limit=99)
    route.clock.now_s = 0.0
    try:
        route.division.place(candidates)
    except RouteGap:
        route.clock.now_s += LOSS_GRACE_S
    try:
        placed = route.division.place(candidates)
    except RouteGap as gap:
        assert "are missing" in str(gap)
        return
    numbers = [number for _, span in placed for number in range(span.first, span.final + 1)]
    assert numbers == list(range(10) if reverse else range(2, 12))
    for each, span in placed:
        own = next(one for one in free if one.worker == each)
        assert SIZES.bytes_of(span, is_anchor=False) <= own.memory
    if min(memory) >= 1300:
        assert max(span.final - span.first + 1 for _, span in placed) == -(-10 // len(free))


def test_span_is_loaded_beside_another_if_memory_holds_both() -> None:
    (_, first), (_, second) = Route().division.place(Candidates(free=(ONE, TWO), limit=99))
    both = SIZES.bytes_of(first, is_anchor=False) + 5 * 100 * MIB + 51 * MIB
    assert fits_beside(SIZES, both, second, first) and not fits_beside(
        SIZES, both - 1, second, first
    )
