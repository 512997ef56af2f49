"""The lease of a worker whose loop makes one long step: kept while the step computes, and as long
as steps have taken before; given up by a loop that stands still.
"""

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import run
from fleet.worker.process import lease as leases
from fleet.worker.process.lease import Lease
from tests.control_plane import WORKER
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

LEASE_S, STUCK_S, MAX_STEP_S = 0.1, 0.4, 60.0


@pytest.fixture
def client(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """A fleet client of a Redis in which the worker is registered; short bounds of its loop."""
    monkeypatch.setattr(leases, "STUCK_S", STUCK_S)
    run(client, scripts.register(WORKER, "lm", 60_000_000, {"kind": "test"}))
    return client


@pytest.fixture
def lease(client: redis.Redis) -> Iterator[Lease]:
    lease = Lease(client, WORKER, LEASE_S, dict, max_step_s=MAX_STEP_S)
    lease.start()
    yield lease
    lease.stop()


class StepThread:
    """A loop that makes one step in a thread of its own, until `end`: it computes, or waits."""

    def __init__(self, lease: Lease, longest_step_s: float, *, computing: bool) -> None:
        self.end = threading.Event()
        self._lease = lease
        self._longest_step_s = longest_step_s
        self._computing = computing
        self._thread = threading.Thread(target=self._step, daemon=True)
        self._thread.start()

    def _step(self) -> None:
        self._lease.begin_step(self._longest_step_s)
        while self._computing and not self.end.is_set():
            sum(range(1000))
        self.end.wait(60)

    def __enter__(self) -> "StepThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self._thread.join(timeout=10)


def num_renewals(client: redis.Redis, seconds: float) -> int:
    """Return how often the lease is renewed within some seconds, at most once per look."""
    until_s, found, last = time.monotonic() + seconds, 0, client.zscore(keys.WORKERS, WORKER)

    def is_over() -> bool:
        nonlocal found, last
        now = client.zscore(keys.WORKERS, WORKER)
        found, last = found + (now != last), now
        return time.monotonic() > until_s

    wait_until(is_over, "the time to pass")
    return found


@pytest.mark.parametrize(
    ("longest_step_s", "computing"),
    [(0.01, True), (0.0, False), (10.0, False)],
    ids=["computing", "first step", "as long as others before"],
)
def test_lease_is_renewed_during_a_step_longer_than_the_usual_bound(
    client: redis.Redis, lease: Lease, longest_step_s: float, computing: bool
) -> None:
    """The lease is renewed during a step longer than the usual bound: one that computes, the first
    one, and one that is not much longer than others before it.
    """
    with StepThread(lease, longest_step_s, computing=computing):
        assert num_renewals(client, 2 * STUCK_S) > 0
        assert num_renewals(client, STUCK_S) > 0, "also beyond the usual bound"


def test_lease_is_given_up_by_a_step_that_waits_longer_than_any_before(
    client: redis.Redis, lease: Lease
) -> None:
    with StepThread(lease, 0.01, computing=False):
        wait_until(
            lambda: num_renewals(client, 2 * LEASE_S) == 0, "the lease to be renewed no longer"
        )
        lease.progress()
        assert num_renewals(client, 2 * LEASE_S) > 0, "a loop that goes on is renewed again"


def test_lease_is_given_up_by_a_loop_that_computes_for_too_long(client: redis.Redis) -> None:
    lease = Lease(client, WORKER, LEASE_S, dict, max_step_s=3 * STUCK_S)
    lease.start()
    with StepThread(lease, 0.01, computing=True):
        wait_until(
            lambda: num_renewals(client, 2 * LEASE_S) == 0, "the lease to be renewed no longer"
        )
    lease.stop()
