"""A page that follows the fleet's events receives every event once, however its connection is
cut.
"""

import asyncio
from collections.abc import AsyncGenerator

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.core.events import RequestEnded, encode_event
from fleet.core.ids import RequestId
from fleet.telemetry.views import FeedEntry
from tests.support import stream_entries


def publish_end(client: redis.Redis, number: int) -> None:
    client.xadd(
        keys.EVENTS,
        {"e": encode_event(RequestEnded(request=RequestId(f"req-{number}"), state="finished"))},
    )


async def read_entries(feed: AsyncGenerator[FeedEntry, None], count: int) -> list[FeedEntry]:
    return [await asyncio.wait_for(anext(feed), 10) for _ in range(count)]


def numbers(entries: list[FeedEntry]) -> list[int]:
    return [
        int(entry.event.request[4:]) for entry in entries if isinstance(entry.event, RequestEnded)
    ]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_feed_yields_each_event_once_in_order_across_reconnects(
    redis_url: str, client: redis.Redis, cuts: list[int]
) -> None:
    async def follow() -> list[int]:
        client_of_fleet, seen = await FleetClient.connect(redis_url, FleetConfig()), list[int]()
        events = client_of_fleet.telemetry._events  # pyright: ignore[reportPrivateUsage]
        last = await events.newest()
        for round_number, cut in enumerate(cuts):
            for number in range(cut):
                await asyncio.to_thread(publish_end, client, round_number * 100 + number)
            feed = client_of_fleet.telemetry.follow_events(after=last)
            entries = await read_entries(feed, cut)
            seen += numbers(entries)
            last = entries[-1].id if entries else last
            await feed.aclose()
        await client_of_fleet.stop()
        return seen

    publish_end(client, 9999)
    assert asyncio.run(follow()) == [
        round_number * 100 + n for round_number, cut in enumerate(cuts) for n in range(cut)
    ]


async def test_feed_serves_many_followers_over_one_connection(
    client: redis.Redis, gateway_client: FleetClient
) -> None:
    feeds = [gateway_client.telemetry.follow_events() for _ in range(40)]
    reads = [asyncio.ensure_future(read_entries(feed, 2)) for feed in feeds]
    await asyncio.sleep(0)
    while not all(task.done() for task in reads):
        await asyncio.to_thread(publish_end, client, 1)
        await asyncio.wait(reads, timeout=0.2)
    assert all(numbers(task.result()) == [1, 1] for task in reads)
    blocked = client.info("clients")["blocked_clients"]  # pyright: ignore[reportIndexIssue]
    assert blocked <= 1, "one connection waits for all followers"
    for feed in feeds:
        await feed.aclose()


async def test_feed_marks_missed_events_after_a_late_reconnect(
    client: redis.Redis, gateway_client: FleetClient
) -> None:
    for number in range(5):
        publish_end(client, number)
    first = stream_entries(client, keys.EVENTS)[0][0].decode()
    client.xtrim(keys.EVENTS, maxlen=2, approximate=False)
    feed = gateway_client.telemetry.follow_events(after=first)
    (missed,) = await read_entries(feed, 1)
    assert missed.missed and missed.event is None
    publish_end(client, 7)
    assert numbers(await read_entries(feed, 1)) == [7]
    await feed.aclose()
