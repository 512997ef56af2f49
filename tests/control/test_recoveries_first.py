"""Order of claims after a death: answers that have begun continue before queued requests begin."""

import asyncio

from fleet.control import keys
from fleet.core.events import TaskClaimed, decode_event
from fleet.core.ids import RequestId, StageName
from fleet.graphs import get_graph
from tests.harness import ThreadFleet, collected, fake_spec, in_step, open_fleet
from tests.support import stream_entries, wait_until

STAGE, SLOTS, QUEUED = StageName("lm"), 2, 12


def claimed(fleet: ThreadFleet) -> list[RequestId]:
    """Return the requests whose task of the stage was claimed, in the order of claims."""
    events = [decode_event(f[b"e"]) for _, f in stream_entries(fleet.clients[0], keys.EVENTS)]
    return [event.request for event in events if isinstance(event, TaskClaimed)]


async def test_answers_in_progress_continue_before_queued_requests_begin(redis_url: str) -> None:
    """With a queue of six times its slots, the worker that replaces a dead one first claims the
    tasks that the dead one had, and then the queued ones in the order of their requests.
    """
    settings = (f"stages.{STAGE}.max_batch={SLOTS}", *in_step(get_graph("text")))
    async with open_fleet(redis_url, *settings) as (fleet, client):
        specs = [fake_spec(fleet, seed=number) for number in range(SLOTS + QUEUED)]
        streams = [await client.requests.submit(spec, None) for spec in specs]
        begun = {spec.id for spec in specs[:SLOTS]}
        (first,) = fleet.loops
        await asyncio.to_thread(wait_until, lambda: begun <= set(first.tasks), "slots to be full")
        assert set(claimed(fleet)) == begun
        fleet.kill(first)
        fleet.add_worker(STAGE)
        answers = [collected(stream, spec) for stream, spec in zip(streams, specs, strict=True)]
        received = await asyncio.gather(*answers)
        assert all(len(tokens) == 40 for got in received for tokens in got.values())
        order = claimed(fleet)[SLOTS:]
    assert set(order[:SLOTS]) == begun, "the dead worker's tasks come first"
    assert order[SLOTS:] == [spec.id for spec in specs[SLOTS:]]
