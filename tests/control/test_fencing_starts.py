"""Announced starts and lost workers: the one rule by which admission and the conductor expect
workers.
"""

from typing import cast

import pytest

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.ids import RequestId, RoleName, WorkerId
from fleet.telemetry.views import WorkerOrder
from tests.control_plane import OTHER, ROLE, WORKER, Control, set_deadline

GRACE_US, LEASE_US = 30_000_000, 60_000_000
KEEPER, LOADING = "test:1", "test:2"
"""`LOADING` is the place of worker `OTHER`."""
MAX_FAILED_STARTS = 3


def read_availability(control: Control, grace_us: int = GRACE_US) -> tuple[bool, bool, int]:
    """Return (admits new requests, keeps those in flight, number of starting workers) of the
    role.
    """
    reply = run(control.client, scripts.availability(grace_us, [ROLE]))
    ((admits, keeps, starting, _),) = cast("list[tuple[bytes, bytes, int, int | bytes]]", reply)
    return bool(admits), bool(keeps), starting


def announce(control: Control, place: str, *, instead_of: str = "") -> str:
    return control.run(
        scripts.announce_start(ROLE, place, LEASE_US, instead_of=instead_of, workers=1)
    )


def announce_by_keeper(
    control: Control,
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
    return control.run(call)


def num_starts(control: Control) -> int:
    return int(text(control.client.hget(keys.availability(ROLE), "tries")) or "0")


def expire_start(control: Control, place: str) -> None:
    control.client.hset(keys.availability(ROLE), f"start:{place}", 1)


def submit(control: Control, request: str, *roles: str, grace_us: int = GRACE_US) -> list[str]:
    return control.submit(request, roles=roles, grace_us=grace_us)


def test_lost_worker_is_expected_for_the_grace_time(control: Control) -> None:
    assert read_availability(control) == (True, True, 0)
    control.kill()
    assert read_availability(control) == (True, True, 0)
    assert read_availability(control, grace_us=0) == (False, False, 0)
    assert submit(control, "req-2", ROLE)[0] == "ok"
    assert submit(control, "req-3", ROLE, grace_us=0) == ["no_worker", "5000000", ROLE]
    assert control.client.exists(keys.request(RequestId("req-3"))) == 0, (
        "a refused request is not written"
    )
    control.client.hset(keys.availability(ROLE), "lost_us", 1)
    assert read_availability(control) == (False, False, 0)


def test_lapsed_unfenced_worker_is_expected_from_its_deadline(control: Control) -> None:
    seconds, _ = control.client.time()
    set_deadline(control.client, WORKER, (seconds - 5) * 1_000_000)
    assert [read_availability(control, grace_us=grace_s * 1_000_000)[0] for grace_s in (3, 8)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("orders", [["drain"], ["stop"], ["drain", "resume", "drain"]])
def test_drained_worker_is_not_expected_and_requests_in_flight_are_kept(
    control: Control, orders: list[WorkerOrder]
) -> None:
    assert [control.run(scripts.order(WORKER, order)) for order in orders] == ["ok"] * len(orders)
    assert read_availability(control) == (False, True, 0)
    assert control.run(scripts.drain(WORKER)) == "ok"
    assert read_availability(control) == (False, True, 0)
    assert control.leave() == "ok"
    assert read_availability(control) == (False, True, 0)
    control.client.hset(keys.availability(ROLE), "left_us", 1)
    assert read_availability(control) == (False, False, 0)


@pytest.mark.parametrize("orders", [[], ["drain", "resume"], ["dump"]])
def test_worker_leaving_by_its_own_decision_is_expected_for_the_grace_time(
    control: Control, orders: list[WorkerOrder]
) -> None:
    assert [control.run(scripts.order(WORKER, order)) for order in orders] == ["ok"] * len(orders)
    for leave in (scripts.drain(WORKER), scripts.fence_worker("", WORKER)):
        assert control.run(leave) == "ok"
        assert read_availability(control) == (True, True, 0)
    assert submit(control, "req-2", ROLE)[0] == "ok"
    assert submit(control, "req-3", ROLE, grace_us=0)[0] == "no_worker"


def test_drained_replica_does_not_hide_a_lost_replica(control: Control) -> None:
    assert control.register(OTHER) == "ok"
    assert control.run(scripts.order(OTHER, "drain")) == "ok"
    for leave in (scripts.drain(WORKER), scripts.fence_worker("", WORKER)):
        assert control.run(leave) == "ok"
        assert read_availability(control) == (True, True, 0)


def test_announced_start_counts_until_its_lease_lapses_or_it_ends(control: Control) -> None:
    assert announce(control, LOADING) == "ok"
    control.kill()
    assert read_availability(control, grace_us=0) == (True, True, 1)
    expire_start(control, LOADING)
    assert read_availability(control, grace_us=0) == (False, False, 0)
    assert announce(control, LOADING) == "ok"
    assert control.run(scripts.end_start(ROLE, LOADING)) == "ok"
    assert read_availability(control, grace_us=0) == (False, False, 0)
    assert control.run(scripts.end_start(ROLE, LOADING, took_us=7_000_000)) == "unknown"
    assert submit(control, "req-2", ROLE, grace_us=0)[1] == "5000000", (
        "the late report changed nothing"
    )


def test_share_of_loaded_weights_is_that_of_the_most_advanced_start(control: Control) -> None:
    def loaded() -> object:
        ((*_, percent),) = cast(
            "list[list[object]]", run(control.client, scripts.availability(GRACE_US, [ROLE]))
        )
        return percent

    def announce_loaded(place: str, percent: int) -> None:
        assert (
            control.run(scripts.announce_start(ROLE, place, LEASE_US, loaded_percent=percent))
            == "ok"
        )

    announce(control, LOADING)
    assert loaded() == b"", "a start that reports no progress"
    announce_loaded("test:5", 0)
    assert loaded() == 0
    announce_loaded("test:6", 34)
    assert loaded() == 34
    expire_start(control, "test:6")
    assert loaded() == 0
    assert num_starts(control) == 3


@pytest.mark.parametrize("field", ["lost_us", "left_us", "start:test:9"])
def test_times_far_in_the_future_are_ignored(control: Control, field: str) -> None:
    control.kill()
    seconds, _ = control.client.time()
    control.client.hset(
        keys.availability(ROLE), mapping={"lost_us": 1, field: (seconds + 300) * 1_000_000}
    )
    assert read_availability(control) == (False, False, 0)


def test_worker_continues_its_keepers_start_and_a_late_announcement_is_refused(
    control: Control,
) -> None:
    control.kill()
    assert announce_by_keeper(control) == "ok"
    assert announce(control, LOADING, instead_of=KEEPER) == "ok"
    assert (num_starts(control), read_availability(control, grace_us=0)) == (1, (True, True, 1))
    assert announce_by_keeper(control, child=LOADING) == "begun"
    assert announce(control, LOADING, instead_of=KEEPER) == "ok"
    assert control.register(OTHER) == "ok"
    assert control.run(scripts.end_start(ROLE, LOADING, took_us=2_500_000)) == "ok"
    assert announce_by_keeper(control, child=LOADING) == "begun"
    control.kill(OTHER)
    assert submit(control, "req-2", ROLE, grace_us=0)[1] == "2500000", (
        "the last start took this long"
    )


@pytest.mark.parametrize("announced_by", ["its keeper, then itself", "its keeper", "itself"])
def test_failed_starts_in_a_row_end_admission_until_a_worker_joins(
    control: Control, announced_by: str
) -> None:
    control.kill()
    counted: list[bool] = []
    former = ""
    for number in range(MAX_FAILED_STARTS + 2):
        if "keeper" in announced_by:
            assert (
                announce_by_keeper(control, former=former, begins_us=9_000_000, number=number)
                == "ok"
            )
        if "itself" in announced_by:
            former = f"test:{number + 10}"
            assert announce(control, former, instead_of=KEEPER) == "ok"
        counted.append(read_availability(control, grace_us=0)[0])
        if announced_by == "itself":
            expire_start(control, former)
    assert counted == [True] * MAX_FAILED_STARTS + [False] * 2
    if "keeper" in announced_by:
        retry_us = int(submit(control, "req-2", ROLE, grace_us=0)[1])
        assert 13_000_000 < retry_us <= 14_000_000, (
            "until the next start, plus the duration of a start"
        )
    assert control.register(OTHER) == "ok"
    control.kill(OTHER)
    announce(control, LOADING)
    assert read_availability(control, grace_us=0)[:2] == (True, True)


def test_failed_starts_are_bounded_per_configured_worker(control: Control) -> None:
    control.kill()
    counted: list[bool] = []
    for number in range(2 * MAX_FAILED_STARTS + 1):
        assert (
            control.run(scripts.announce_start(ROLE, f"test:{number + 10}", LEASE_US, workers=2))
            == "ok"
        )
        counted.append(read_availability(control, grace_us=0)[0])
        expire_start(control, f"test:{number + 10}")
    assert counted == [True] * 2 * MAX_FAILED_STARTS + [False]


def test_restarted_redis_assumes_roles_served_and_keeps_later_losses(control: Control) -> None:
    seconds, _ = control.client.time()
    assert control.run(scripts.assume_served(seconds * 1_000_000, [RoleName("ears"), ROLE])) == "ok"
    assert submit(control, "req-2", ROLE, "ears")[0] == "ok"
    control.kill()
    lost = control.client.hget(keys.availability(ROLE), "lost_us")
    assert control.run(scripts.assume_served(seconds * 1_000_000 - 1, [ROLE])) == "ok"
    assert control.client.hget(keys.availability(ROLE), "lost_us") == lost


def test_process_with_a_similar_place_is_not_mistaken_for_the_child(control: Control) -> None:
    assert control.register(WorkerId("lm@test:22:c")) == "ok"
    assert announce_by_keeper(control, child=LOADING) == "ok"


@pytest.mark.parametrize(
    "stopped_by", ["its keeper, before it runs", "its keeper, while it loads", "itself"]
)
def test_stopped_starts_are_not_counted_as_failed(control: Control, stopped_by: str) -> None:
    control.kill()
    for number in range(MAX_FAILED_STARTS + 2):
        loading = f"test:{number + 10}"
        if "keeper" in stopped_by:
            assert announce_by_keeper(control, number=number) == "ok"
        if stopped_by != "its keeper, before it runs":
            assert announce(control, loading, instead_of=KEEPER) == "ok"
        assert read_availability(control, grace_us=0) == (True, True, 1)
        if stopped_by == "itself":
            assert control.run(scripts.end_start(ROLE, loading)) == "ok"
        else:
            assert control.run(scripts.end_start(ROLE, KEEPER, child=loading)) == "ok"
        assert (num_starts(control), read_availability(control, grace_us=0)) == (
            0,
            (False, False, 0),
        )


def test_stopped_process_is_not_counted_as_failed_start_of_its_keeper(control: Control) -> None:
    control.kill()
    former = ""
    for number in range(MAX_FAILED_STARTS + 2):
        assert announce_by_keeper(control, former=former, number=number, stopped=True) == "ok"
        former = f"test:{number + 10}"
        assert announce(control, former, instead_of=KEEPER) == "ok"
        assert (num_starts(control), read_availability(control, grace_us=0)) == (1, (True, True, 1))


def test_leaving_worker_does_not_reset_failed_starts_of_another(control: Control) -> None:
    assert announce_by_keeper(control) == "ok"
    assert announce(control, LOADING, instead_of=KEEPER) == "ok"
    assert control.register(OTHER) == "ok"
    assert control.run(scripts.end_start(ROLE, LOADING, took_us=1)) == "ok"
    assert announce(control, "test:10") == "ok"
    assert control.run(scripts.end_start(ROLE, "test:10", failed=True)) == "ok"
    assert control.run(scripts.end_start(ROLE, KEEPER, child=LOADING)) == "unknown"
    assert num_starts(control) == 1


def test_repeated_announcement_of_a_start_counts_once(control: Control) -> None:
    control.kill()
    for _ in range(MAX_FAILED_STARTS + 1):
        assert announce_by_keeper(control, number=1) == "ok"
    assert (num_starts(control), read_availability(control, grace_us=0)) == (1, (True, True, 1))


@pytest.mark.parametrize("reset_by", ["a new keeper", "a minute without starts", "none"])
def test_failed_starts_are_reset_without_an_announced_start(
    control: Control, reset_by: str
) -> None:
    control.kill()
    for number in range(MAX_FAILED_STARTS):
        assert announce(control, f"test:{number + 10}") == "ok"
        assert control.run(scripts.end_start(ROLE, f"test:{number + 10}", failed=True)) == "ok"
    if reset_by == "a minute without starts":
        seconds, _ = control.client.time()
        control.client.hset(keys.availability(ROLE), "tried_us", (seconds - 61) * 1_000_000)
    assert announce_by_keeper(control) if reset_by == "a new keeper" else announce(control, LOADING)
    assert read_availability(control, grace_us=0)[0] == (reset_by != "none")
