"""Claims of alerts in a real Redis: one gateway of the fleet has an alert, until its lease ends or
the alert has been sent.
"""

from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio

from fleet.control import keys
from fleet.control.alerts import KEPT_S, AlertStore
from fleet.core.ids import WorkerId
from fleet.telemetry.incidents import Alert

INCIDENT = "20261130T202000Z"
FIRST = Alert(event="opened", level="degraded", gateway=WorkerId("gateway@a"), at_us=1)
SECOND = msgspec.structs.replace(FIRST, gateway=WorkerId("gateway@b"))


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


async def test_alert_is_claimed_once_for_each_event(client: redis.asyncio.Redis) -> None:
    store, other = AlertStore(client), AlertStore(client)
    assert await store.claim(INCIDENT, FIRST, 60)
    assert not await other.claim(INCIDENT, SECOND, 60)
    assert await other.read(INCIDENT) == {"opened": FIRST}
    assert await other.claim(INCIDENT, msgspec.structs.replace(SECOND, event="ended"), 60)
    assert 0 < await client.ttl(keys.alert(INCIDENT, "opened")) <= 60


async def test_alert_whose_sender_ended_is_free_after_its_lease(
    client: redis.asyncio.Redis,
) -> None:
    store = AlertStore(client)
    assert await store.claim(INCIDENT, FIRST, 60)
    await client.pexpire(keys.alert(INCIDENT, "opened"), 0)
    assert await store.claim(INCIDENT, SECOND, 60)


async def test_sent_alert_is_known_as_long_as_the_incident_is_kept(
    client: redis.asyncio.Redis,
) -> None:
    store = AlertStore(client)
    await store.claim(INCIDENT, FIRST, 60)
    sent = msgspec.structs.replace(FIRST, state="sent", at_us=2)
    await store.end(INCIDENT, sent)
    assert await store.read(INCIDENT) == {"opened": sent}
    assert not await store.claim(INCIDENT, SECOND, 60)
    assert KEPT_S - 5 < await client.ttl(keys.alert(INCIDENT, "opened")) <= KEPT_S
