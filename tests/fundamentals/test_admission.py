"""A request is admitted before its audio is decoded: the check replies as its submission would, and
reserves no place.
"""

import asyncio

import pytest

from fleet.core.errors import NoWorker, Overloaded
from tests.fundamentals.test_fleet_log import lines
from tests.fundamentals.test_restarting_worker import (
    SHORT_CLAIM_TIMEOUT,
    TALKER,
    TEXT,
    THINKER,
    kill,
    num_tokens,
    submit,
)
from tests.harness import fake_spec, open_fleet


async def test_admission_check_returns_free_places_and_reserves_none(redis_url: str) -> None:
    async with open_fleet(redis_url, SHORT_CLAIM_TIMEOUT, "limits.max_requests=2") as (
        fleet,
        client,
    ):
        kill(fleet, THINKER)
        spec = fake_spec(fleet)
        assert [await client.requests.check_admission(spec.id, spec.outputs) for _ in range(3)] == [
            2,
            2,
            2,
        ]
        streams = [await submit(fleet, client)]
        assert await client.requests.check_admission(spec.id, spec.outputs) == 1
        streams.append(await submit(fleet, client))
        for _ in range(3):
            with pytest.raises(Overloaded, match="2 requests are running or waiting already"):
                await client.requests.check_admission(spec.id, spec.outputs)
        (line,) = [line for line in lines(fleet.clients[0]) if "is refused" in line.message]
        assert line.request == spec.id and "limits.max_requests allows 2" in line.message
        assert await client.telemetry.num_live() == 2
        fleet.add_worker(THINKER)
        await asyncio.gather(*map(num_tokens, streams))


async def test_admission_check_refuses_only_for_roles_of_the_request(redis_url: str) -> None:
    async with open_fleet(redis_url, without=TALKER) as (fleet, client):
        spec = fake_spec(fleet)
        with pytest.raises(NoWorker, match="no worker serves the role talker"):
            await client.requests.check_admission(spec.id, spec.outputs)
        assert (
            await client.requests.check_admission(spec.id, (TEXT,))
            == fleet.config.limits.max_requests
        )
