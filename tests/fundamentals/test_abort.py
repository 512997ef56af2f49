"""An abort stops all work for a request and frees its resources within a second."""

import asyncio
import random

from fleet.core.ids import CLIENT
from tests.control_plane import GATEWAY, OTHER_GATEWAY, Control
from tests.harness import answer, fake_spec, held, open_fleet, wait_none_live
from tests.storm import assert_nothing_left
from tests.support import wait_until


def test_abort_is_accepted_from_the_present_gateway_and_the_api(control: Control) -> None:
    """An abort by the gateway that reads the answer, or by the API, is accepted. After another
    gateway has attached, the first gateway's late disconnect has no effect.
    """
    old = control.epoch(CLIENT)
    control.register(OTHER_GATEWAY, "")
    assert control.attach(OTHER_GATEWAY) == "ok"
    rights = (old, control.epoch(CLIENT))
    assert [control.abort(right=right) for right in rights] == ["stale", "ok"]
    assert [control.abort(), control.attach(GATEWAY)] == ["ended", "ended"]


async def test_abort_ends_every_stage(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        stream = await client.requests.submit(fake_spec(fleet, num_tokens=100_000), None)
        async for chunk in stream:
            if chunk.edge == "audio":
                break
        assert held(fleet) == {stream.request_id}
        await stream.abort("the client left")
        wait_until(lambda: not held(fleet), "every worker to drop the request", timeout_s=1.0)
        trace = await client.telemetry.trace(stream.request_id)
        assert trace is not None and trace.state == "aborted"
        assert_nothing_left(fleet)


async def test_concurrent_aborts_leave_no_tasks_or_keys(redis_url: str) -> None:
    """Of 300 requests, a third is aborted at random moments; afterwards Redis holds no task or key
    of them.
    """
    rng = random.Random(7)
    async with open_fleet(redis_url, "limits.max_requests=400") as (fleet, client):
        slots = asyncio.Semaphore(40)

        async def run_one(number: int) -> None:
            async with slots:
                spec = fake_spec(fleet, num_tokens=rng.randrange(1, 30), seed=number)
                if number % 3:
                    await answer(client, spec)
                    return
                stream, leave_after = await client.requests.submit(spec, None), rng.randrange(12)
                async for chunk in stream:
                    if chunk.index >= leave_after:
                        break
                await stream.abort("the client left")

        await asyncio.gather(*(run_one(number) for number in range(300)))
        await wait_none_live(client, timeout_s=2.0)
        assert_nothing_left(fleet)
