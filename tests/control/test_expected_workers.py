"""Announced worker starts and lost workers: the rule by which both admission and the conductor
expect workers.
"""

from typing import cast

import pytest

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.ids import RequestId, RoleName, WorkerId
from fleet.telemetry.views import WorkerOrder
from tests.control_plane import LEASE_US, OTHER, ROLE, WORKER, Control, set_deadline

GRACE_US = 30_000_000
KEEPER, LOADING = "test:1", "test:2"
"""Places of two worker processes; `LOADING` is the place of worker `OTHER`."""
MAX_FAILED_STARTS = 3
AVAILABILITY = keys.availability(ROLE)


class RoleStarts(Control):
    """A control plane with starts of one role's workers, announced by the workers or by their
    keeper.
    """

    def seen(self, grace_us: int = GRACE_US) -> tuple[bool, bool, int]:
        """Return (admits new requests, keeps requests in flight, number of starting workers) of the
        role.
        """
        admits, keeps, starting, _ = self.availability(grace_us)
        return bool(admits), bool(keeps), int(cast(int, starting))

    def availability(self, grace_us: int = GRACE_US) -> list[object]:
        reply = run(self.client, scripts.availability(grace_us, [ROLE]))
        return cast("list[list[object]]", reply)[0]

    def announce(
        self, place: str = LOADING, *, instead_of: str = "", percent: int | None = None
    ) -> str:
        call = scripts.announce_start(
            ROLE, place, LEASE_US, instead_of=instead_of, workers=1, loaded_percent=percent
        )
        return self.run(call)

    def announce_by_keeper(
        self,
        *,
        former: str = "",
        child: str = "",
        begins_us: int = 0,
        number: int = 1,
        stopped: bool = False,
    ) -> str:
        call = scripts.announce_start(
            ROLE,
            KEEPER,
            LEASE_US,
            instead_of=former,
            child=child,
            begins_us=begins_us,
            number=number,
            stopped=stopped,
        )
        return self.run(call)

    def end_start(
        self,
        place: str = LOADING,
        *,
        child: str = "",
        took_us: int | None = None,
        failed: bool = False,
    ) -> str:
        return self.run(scripts.end_start(ROLE, place, child=child, took_us=took_us, failed=failed))

    def num_starts(self) -> int:
        return int(text(self.client.hget(AVAILABILITY, "tries")) or "0")

    def expire_start(self, place: str = LOADING) -> None:
        self.client.hset(AVAILABILITY, f"start:{place}", 1)

    def ask(self, *roles: str, request: str = "req-2", grace_us: int = 0) -> list[str]:
        return self.submit(request, roles=roles or (ROLE,), grace_us=grace_us)


@pytest.fixture
def starts(control: Control) -> RoleStarts:
    return RoleStarts(control.client, control.leader)


@pytest.fixture
def lost(starts: RoleStarts) -> RoleStarts:
    """A role whose only worker was lost."""
    starts.kill()
    return starts


def test_lost_worker_is_expected_for_the_grace_time(starts: RoleStarts) -> None:
    assert starts.seen() == (True, True, 0)
    starts.kill()
    assert starts.seen() == (True, True, 0)
    assert starts.seen(grace_us=0) == (False, False, 0)
    assert starts.ask()[0] == "no_worker"
    assert not starts.client.exists(keys.request(RequestId("req-2"))), "nothing is written"
    assert starts.ask(grace_us=GRACE_US)[0] == "ok"
    starts.client.hset(AVAILABILITY, "lost_us", 1)
    assert starts.seen() == (False, False, 0)


def test_lapsed_unfenced_worker_is_expected_from_its_deadline(starts: RoleStarts) -> None:
    seconds, _ = starts.client.time()
    set_deadline(starts.client, WORKER, (seconds - 5) * 1_000_000)
    assert [starts.seen(grace_s * 1_000_000)[0] for grace_s in (3, 8)] == [False, True]


@pytest.mark.parametrize("orders", [["drain"], ["stop"], ["drain", "resume", "drain"]])
def test_drained_worker_is_not_expected_and_requests_in_flight_are_kept(
    starts: RoleStarts, orders: list[WorkerOrder]
) -> None:
    assert [starts.order(order) for order in orders] == ["ok"] * len(orders)
    assert starts.seen() == (False, True, 0)
    for leave in (starts.drain, starts.leave):
        assert leave() == "ok"
        assert starts.seen() == (False, True, 0)
    starts.client.hset(AVAILABILITY, "left_us", 1)
    assert starts.seen() == (False, False, 0)


@pytest.mark.parametrize("orders", [[], ["drain", "resume"], ["dump"]])
def test_worker_leaving_by_its_own_decision_is_expected_for_the_grace_time(
    starts: RoleStarts, orders: list[WorkerOrder]
) -> None:
    assert [starts.order(order) for order in orders] == ["ok"] * len(orders)
    for leave in (starts.drain, starts.leave):
        assert leave() == "ok"
        assert starts.seen() == (True, True, 0)
    assert starts.ask()[0] == "no_worker"
    assert starts.ask(grace_us=GRACE_US)[0] == "ok"


def test_drained_replica_does_not_hide_a_lost_replica(starts: RoleStarts) -> None:
    assert [starts.register(OTHER), starts.order("drain", OTHER)] == ["ok", "ok"]
    for leave in (starts.drain, starts.leave):
        assert leave() == "ok"
        assert starts.seen() == (True, True, 0)


def test_announced_start_counts_until_its_lease_lapses_or_it_ends(starts: RoleStarts) -> None:
    assert starts.announce() == "ok"
    starts.kill()
    assert starts.seen(grace_us=0) == (True, True, 1)
    starts.expire_start()
    assert starts.seen(grace_us=0) == (False, False, 0)
    assert [starts.announce(), starts.end_start()] == ["ok", "ok"]
    assert starts.seen(grace_us=0) == (False, False, 0)
    assert starts.end_start(took_us=7_000_000) == "unknown"
    assert starts.ask()[1] == "5000000", "the late report changed nothing"


def test_share_of_loaded_weights_is_that_of_the_most_advanced_start(starts: RoleStarts) -> None:
    def loaded() -> object:
        return starts.availability()[3]

    starts.announce()
    assert loaded() == b"", "a start that reports no progress"
    for place, percent in (("test:5", 0), ("test:6", 34)):
        assert starts.announce(place, percent=percent) == "ok"
        assert loaded() == percent
    starts.expire_start("test:6")
    assert loaded() == 0
    assert starts.num_starts() == 3


@pytest.mark.parametrize("field", ["lost_us", "left_us", "start:test:9"])
def test_times_far_in_the_future_are_ignored(lost: RoleStarts, field: str) -> None:
    seconds, _ = lost.client.time()
    lost.client.hset(AVAILABILITY, mapping={"lost_us": 1, field: (seconds + 300) * 1_000_000})
    assert lost.seen() == (False, False, 0)


def test_worker_continues_its_keepers_start_and_a_late_announcement_is_refused(
    lost: RoleStarts,
) -> None:
    assert lost.announce_by_keeper() == "ok"
    assert lost.announce(instead_of=KEEPER) == "ok"
    assert (lost.num_starts(), lost.seen(grace_us=0)) == (1, (True, True, 1))
    assert lost.announce_by_keeper(child=LOADING) == "begun"
    assert lost.announce(instead_of=KEEPER) == "ok"
    assert lost.register(OTHER) == "ok"
    assert lost.end_start(took_us=2_500_000) == "ok"
    assert lost.announce_by_keeper(child=LOADING) == "begun"
    lost.kill(OTHER)
    assert lost.ask()[1] == "2500000", "the last start took this long"


@pytest.mark.parametrize("announced_by", ["its keeper, then itself", "its keeper", "itself"])
def test_failed_starts_in_a_row_end_admission_until_a_worker_joins(
    lost: RoleStarts, announced_by: str
) -> None:
    counted: list[bool] = []
    former = ""
    for number in range(MAX_FAILED_STARTS + 2):
        if "keeper" in announced_by:
            begun = lost.announce_by_keeper(former=former, begins_us=9_000_000, number=number)
            assert begun == "ok"
        if "itself" in announced_by:
            former = f"test:{number + 10}"
            assert lost.announce(former, instead_of=KEEPER) == "ok"
        counted.append(lost.seen(grace_us=0)[0])
        if announced_by == "itself":
            lost.expire_start(former)
    assert counted == [True] * MAX_FAILED_STARTS + [False] * 2
    if "keeper" in announced_by:
        assert 13_000_000 < int(lost.ask()[1]) <= 14_000_000, (
            "until the next start, plus the duration of a start"
        )
    assert lost.register(OTHER) == "ok"
    lost.kill(OTHER)
    lost.announce()
    assert lost.seen(grace_us=0)[:2] == (True, True)


def test_failed_starts_are_bounded_per_configured_worker(lost: RoleStarts) -> None:
    counted: list[bool] = []
    for number in range(2 * MAX_FAILED_STARTS + 1):
        place = f"test:{number + 10}"
        assert lost.run(scripts.announce_start(ROLE, place, LEASE_US, workers=2)) == "ok"
        counted.append(lost.seen(grace_us=0)[0])
        lost.expire_start(place)
    assert counted == [True] * 2 * MAX_FAILED_STARTS + [False]


def test_restarted_redis_assumes_roles_served_and_keeps_later_losses(starts: RoleStarts) -> None:
    seconds, _ = starts.client.time()
    ears = RoleName("ears")
    assert starts.run(scripts.assume_served(seconds * 1_000_000, [ears, ROLE])) == "ok"
    assert starts.ask(ROLE, ears, grace_us=GRACE_US)[0] == "ok"
    starts.kill()
    lost_us = starts.client.hget(AVAILABILITY, "lost_us")
    assert starts.run(scripts.assume_served(seconds * 1_000_000 - 1, [ROLE])) == "ok"
    assert starts.client.hget(AVAILABILITY, "lost_us") == lost_us


def test_process_with_a_similar_place_is_not_mistaken_for_the_child(starts: RoleStarts) -> None:
    assert starts.register(WorkerId("lm@test:22:c")) == "ok"
    assert starts.announce_by_keeper(child=LOADING) == "ok"


@pytest.mark.parametrize(
    "stopped_by", ["its keeper, before it runs", "its keeper, while it loads", "itself"]
)
def test_stopped_starts_are_not_counted_as_failed(lost: RoleStarts, stopped_by: str) -> None:
    for number in range(MAX_FAILED_STARTS + 2):
        loading = f"test:{number + 10}"
        if "keeper" in stopped_by:
            assert lost.announce_by_keeper(number=number) == "ok"
        if stopped_by != "its keeper, before it runs":
            assert lost.announce(loading, instead_of=KEEPER) == "ok"
        assert lost.seen(grace_us=0) == (True, True, 1)
        ended = (
            lost.end_start(loading)
            if stopped_by == "itself"
            else lost.end_start(KEEPER, child=loading)
        )
        assert ended == "ok"
        assert (lost.num_starts(), lost.seen(grace_us=0)) == (0, (False, False, 0))


def test_stopped_process_is_not_counted_as_failed_start_of_its_keeper(lost: RoleStarts) -> None:
    former = ""
    for number in range(MAX_FAILED_STARTS + 2):
        assert lost.announce_by_keeper(former=former, number=number, stopped=True) == "ok"
        former = f"test:{number + 10}"
        assert lost.announce(former, instead_of=KEEPER) == "ok"
        assert (lost.num_starts(), lost.seen(grace_us=0)) == (1, (True, True, 1))


def test_leaving_worker_does_not_reset_failed_starts_of_another(starts: RoleStarts) -> None:
    assert starts.announce_by_keeper() == "ok"
    assert starts.announce(instead_of=KEEPER) == "ok"
    assert starts.register(OTHER) == "ok"
    assert starts.end_start(took_us=1) == "ok"
    assert [starts.announce("test:10"), starts.end_start("test:10", failed=True)] == ["ok", "ok"]
    assert starts.end_start(KEEPER, child=LOADING) == "unknown"
    assert starts.num_starts() == 1


def test_repeated_announcement_of_a_start_counts_once(lost: RoleStarts) -> None:
    for _ in range(MAX_FAILED_STARTS + 1):
        assert lost.announce_by_keeper(number=1) == "ok"
    assert (lost.num_starts(), lost.seen(grace_us=0)) == (1, (True, True, 1))


@pytest.mark.parametrize("reset_by", ["a new keeper", "a minute without starts", "none"])
def test_failed_starts_are_reset_without_an_announced_start(
    lost: RoleStarts, reset_by: str
) -> None:
    for number in range(MAX_FAILED_STARTS):
        place = f"test:{number + 10}"
        assert [lost.announce(place), lost.end_start(place, failed=True)] == ["ok", "ok"]
    if reset_by == "a minute without starts":
        seconds, _ = lost.client.time()
        lost.client.hset(AVAILABILITY, "tried_us", (seconds - 61) * 1_000_000)
    assert lost.announce_by_keeper() if reset_by == "a new keeper" else lost.announce()
    assert lost.seen(grace_us=0)[0] == (reset_by != "none")
