"""A worker's reads of grants: in the order of both streams of its role, no more than it has free
slots, in one round trip.
"""

import threading
from collections.abc import Sequence

import pytest
import redis

from fleet.control import keys
from fleet.control.connect import Reply
from fleet.control.scripts import Arg, Call
from fleet.core.ids import RequestId, WorkerId
from fleet.worker.process import redis_link
from fleet.worker.process.redis_link import RedisLink, TurnResult
from tests.control_plane import OTHER, REQUEST, ROLE, WORKER, Control
from tests.support import wait_until

NEW = [RequestId(f"req-{number}") for number in (2, 3, 4)]
LONG_MS = 20_000


@pytest.fixture
def queued(client: redis.Redis) -> Control:
    """A control plane with a recovered task, three new ones, and two workers."""
    control = Control(client).begin()
    for request in NEW:
        assert control.submit(request)[0] == "ok"
    assert control.claim() == "ok"
    control.register(OTHER)
    assert control.redeliver() == "ok"
    return control


def requests_of(result: TurnResult) -> list[RequestId]:
    return [grant.request for grant in result.grants]


@pytest.mark.parametrize("block_ms", [0, LONG_MS])
def test_worker_reads_no_more_grants_than_it_has_slots_and_recovered_ones_first(
    queued: Control, block_ms: int
) -> None:
    """Whether or not the worker would wait, it gets as many grants as it asks for; the others stay
    for other workers.
    """
    first, second = (RedisLink(queued.client, worker, ROLE) for worker in (WORKER, OTHER))
    first.exchange((), free_slots=0, block_ms=0)  # what the redelivery announced
    assert requests_of(first.exchange((), free_slots=1, block_ms=block_ms)) == [REQUEST]
    assert requests_of(second.exchange((), free_slots=2, block_ms=block_ms)) == NEW[:2]
    assert requests_of(first.exchange((), free_slots=9, block_ms=block_ms)) == NEW[2:]
    assert requests_of(second.exchange((), free_slots=9, block_ms=0)) == []


def test_worker_that_gets_its_grants_is_offered_no_others(queued: Control) -> None:
    """Grants that only wake the worker are those for which the queue had none before. Others would
    be claimed out of their order by a worker in which a slot became free meanwhile.
    """
    link = RedisLink(queued.client, OTHER, ROLE)
    for count in (1, 2, 1):
        result = link.exchange((), free_slots=count, block_ms=LONG_MS)
        assert (len(result.grants), result.woken) == (count, [])
    assert link.exchange((), free_slots=1, block_ms=1).woken == []


def test_read_of_grants_is_one_round_trip(queued: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[int] = []
    send = redis_link.exchange_each

    def counted(
        client: redis.Redis, calls: Sequence[Call], *commands: Sequence[Arg]
    ) -> list[Reply]:
        trips.append(len(calls) + len(commands))
        return send(client, calls, *commands)

    monkeypatch.setattr(redis_link, "exchange_each", counted)
    monkeypatch.setattr(redis_link, "exchange", counted)
    link = RedisLink(queued.client, OTHER, ROLE)
    assert requests_of(link.exchange((), free_slots=2, block_ms=LONG_MS)) == [REQUEST, NEW[0]]
    assert len(trips) == 1


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "recovered"])
def test_waiting_worker_is_woken_by_a_grant_and_may_claim_it(
    client: redis.Redis, *, is_new: bool
) -> None:
    """A grant wakes one of the workers that wait, which may claim it without reading it again."""
    control = Control(client).begin()
    assert control.read() == [REQUEST] and control.claim() == "ok"
    control.register(OTHER)
    link = RedisLink(client, OTHER, ROLE)
    results: list[TurnResult] = []
    waiting = threading.Thread(
        target=lambda: results.append(link.exchange((), free_slots=1, block_ms=LONG_MS))
    )
    waiting.start()
    wait_until(lambda: client.info("clients")["blocked_clients"] == 1, "the worker to wait")
    wanted = NEW[0] if is_new else REQUEST
    if is_new:
        assert control.submit(wanted)[0] == "ok"
    else:
        control.kill(WORKER)
    waiting.join(timeout=10)
    (result,) = results
    assert [grant.request for grant in result.woken] == [wanted] and not result.grants
    assert control.claim(worker=OTHER, request=wanted) == "ok"
    assert control.grants() == [] and requests_of(link.exchange((), free_slots=9, block_ms=0)) == []


def test_consumers_end_with_their_worker(client: redis.Redis) -> None:
    control = Control(client).begin()
    link = RedisLink(client, WORKER, ROLE)
    link.exchange((), free_slots=1, block_ms=LONG_MS)
    assert any(consumers(client))
    control.kill()
    assert [len(names) for names in consumers(client)] == [0, 0]


def consumers(client: redis.Redis) -> list[list[WorkerId]]:
    return [
        [each["name"] for each in client.xinfo_consumers(stream, keys.IDLE_GROUP)]
        for stream in keys.role_streams(ROLE)
    ]
