"""Requests in the background: when they are admitted, beside what, and after whom."""

import asyncio
from collections.abc import Sequence

import pytest
import redis

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import run, texts
from fleet.control.waiting import BACKGROUND, Applicant, ClientShare
from fleet.core.errors import Overloaded
from fleet.core.ids import RequestId, new_request_id
from fleet.core.request import RequestSpec
from tests.control_plane import GATEWAY, TEXT, WORKER, Control, join
from tests.harness import gateway_at
from tests.support import await_until

LATER_US = 10**17
OTHER = ClientShare("10.0.0.1")


def is_admitted(control: Control, share: ClientShare = BACKGROUND, bound: int = 8) -> bool:
    request = f"req-{control.client.scard(keys.LIVE)}"
    return control.submit(request, bound=bound, client=share.key, waits="turn")[0] == "ok"


def turns(control: Control, *waiting: ClientShare) -> Sequence[str]:
    """Report waiting requests of a gateway; return the clients whose turn it is."""
    call = scripts.take_turns(
        GATEWAY, bound=8, roles=(), numbers={each.key: 1 for each in waiting}, is_all=True
    )
    return texts(run(control.client, call))[2:]


def begin(client: redis.Redis, num_others: int) -> Control:
    control = Control(client).lead()
    control.register(GATEWAY, "")
    assert all(is_admitted(control, OTHER) for _ in range(num_others))
    return control


@pytest.mark.parametrize(
    ("bound", "num_others", "voices", "admitted"),
    [
        (8, 0, {}, 6),
        (3, 0, {}, 3),
        (1, 0, {}, 1),
        (8, 1, {}, 1),
        (8, 6, {}, 0),
        (8, 0, {"s": LATER_US}, 1),
        (8, 0, {"s": 1}, 6),
    ],
)
def test_background_requests_leave_places_free(
    client: redis.Redis, bound: int, num_others: int, voices: dict[str, int], admitted: int
) -> None:
    """A quarter of the places; beside live requests and voice sessions all but one."""
    control = begin(client, num_others)
    if voices:
        client.zadd(keys.VOICES, voices)
    num = 0
    while is_admitted(control, bound=bound):
        num += 1
    assert num == admitted
    assert is_admitted(control, OTHER, bound) == (num + num_others < bound)
    client.delete(keys.VOICES)


def test_turn_of_the_background_comes_when_nobody_else_waits(client: redis.Redis) -> None:
    control = begin(client, 0)
    assert turns(control, BACKGROUND) == [BACKGROUND.key]
    assert turns(control, BACKGROUND, OTHER) == [OTHER.key]
    assert not is_admitted(control) and is_admitted(control, OTHER)
    assert turns(control, BACKGROUND) == [BACKGROUND.key]
    assert is_admitted(control) and turns(control, BACKGROUND) == []
    assert control.abort(RequestId("req-0")) == "ok"
    assert turns(control, BACKGROUND) == [BACKGROUND.key]
    assert turns(control) == []


async def test_full_queue_refuses_background_requests_first(
    redis_url: str, client: redis.Redis
) -> None:
    settings = ("limits.max_requests=1", "limits.max_waiting=2", "limits.max_wait_s=60")
    assert join(client, WORKER) == ["ok"]
    config = load_config(None, ("engine=fake", "device=cpu", "graph=text", *settings))
    async with gateway_at(redis_url, config) as gateway:
        await submit(gateway, OTHER)
        waiting = [asyncio.create_task(submit(gateway, BACKGROUND)) for _ in range(2)]

        async def both() -> bool:
            return gateway.requests.num_waiting == 2

        await await_until(both, "two requests to wait")
        other = asyncio.create_task(submit(gateway, OTHER))
        with pytest.raises(Overloaded):
            await waiting[1]
        assert gateway.requests.num_waiting == 2 and not other.done() and not waiting[0].done()
        for task in (*waiting, other):
            task.cancel()
        await asyncio.gather(*waiting, other, return_exceptions=True)


async def submit(gateway: FleetClient, share: ClientShare) -> None:
    spec = RequestSpec(id=new_request_id(), graph="text", prompt_ids=(1,), outputs=(TEXT,))
    await gateway.requests.submit(spec, None, Applicant(share))
