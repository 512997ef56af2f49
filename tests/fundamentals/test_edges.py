"""Edges: each chunk goes from task to task once, in order, and only as far as the consumer gives
credit.
"""

from msgspec.structs import replace

from fleet.control import keys
from fleet.core.ids import CLIENT, EdgeName, StageName
from tests.control_plane import REQUEST, TEXT, Control
from tests.harness import answer, fake_spec, held, open_fleet, wait_ended
from tests.support import wait_until

AUDIO = EdgeName("audio")
SAMPLES_PER_FRAME = 1920


def test_chunk_is_appended_once_and_in_order(control: Control) -> None:
    epoch = control.own()
    assert [control.append(epoch, i) for i in (0, 0, 2, 1)] == ["ok", "duplicate", "gap", "ok"]
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 2


def test_number_of_consumed_chunks_only_grows(control: Control) -> None:
    control.own()
    for consumed in (5, 3):
        assert control.acknowledge(consumed) == "ok"
    assert control.task(CLIENT)["consumed:text"] == "5"


async def test_every_client_edge_is_delivered_and_the_request_ends(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet, num_tokens=30)
        received = await answer(client, spec)
        assert (len(received[TEXT]), len(received[AUDIO])) == (30, 30 * SAMPLES_PER_FRAME)
        trace = await wait_ended(client, spec.id)
        assert trace.state == "finished"
        assert all(edge.produced == edge.consumed for edge in trace.edges)
        assert await client.telemetry.num_live() == 0
        wait_until(lambda: not held(fleet), "workers to hold nothing")


async def test_slow_client_blocks_only_its_own_producers(redis_url: str) -> None:
    """An answer that its client does not read stops at its credit; another request finishes
    meanwhile.
    """
    credits = ("edges.text.credits=8", "edges.audio.credits=4")
    async with open_fleet(redis_url, *credits) as (fleet, client):
        slow = await client.requests.submit(fake_spec(fleet, num_tokens=200), None)
        assert len((await answer(client, fake_spec(fleet, num_tokens=60)))[TEXT]) == 60
        trace = await client.telemetry.trace(slow.request_id)
        assert trace is not None
        produced = {edge.name: edge.produced for edge in trace.edges}
        assert produced[TEXT] <= 8 + 1 and produced[AUDIO] <= 4 + 25
        assert len([chunk async for chunk in slow if chunk.edge == TEXT]) == 200


async def test_stage_that_ends_early_does_not_block_its_producer(redis_url: str) -> None:
    """The stage that produces audio ends long before the text does, and the edge between them has
    few credits: the text is still complete.
    """
    talker = StageName("talker")
    async with open_fleet(redis_url, "edges.thought.credits=4") as (fleet, client):
        spec = fake_spec(fleet, num_tokens=60)
        short = replace(spec.sampling[talker], max_tokens=5)
        received = await answer(client, replace(spec, sampling={**spec.sampling, talker: short}))
        assert (len(received[TEXT]), len(received[AUDIO])) == (60, 5 * SAMPLES_PER_FRAME)
