"""More requests than slots, and tasks that come into them in another order than their requests: nobody waits in a ring."""

import asyncio

from fleet.core.ids import EdgeName, StageName
from tests.harness import answer, assert_same, fake_spec, gateway, thread_fleet
from tests.support import await_until

THINKER = StageName("thinker")
TIGHT = ("stages.talker.max_batch=1", "stages.thinker.extra={step_ms: 5}")
NUM_TOKENS = 60


async def test_a_death_that_puts_the_second_request_before_the_first_stops_neither(redis_url: str) -> None:
    with thread_fleet(redis_url, *TIGHT, "stages.thinker.max_batch=1", "edges.thought.credits=2") as fleet:
        async with gateway(fleet) as client:
            specs = [fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in (1, 2)]
            expected = [await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed)) for seed in (1, 2)]
            answers = [asyncio.create_task(answer(client, spec)) for spec in specs]
            first, second = (spec.id for spec in specs)

            async def first_speaks_and_second_waits() -> bool:
                views = [await client.request_view(request) for request in (first, second)]
                if None in views:
                    return False
                edges = {edge.name: edge.produced for edge in views[0].edges} if views[0] is not None else {}
                return edges[EdgeName("thought")] > 2 and len(fleet.owner(first, THINKER).tasks) == 1

            await await_until(first_speaks_and_second_waits, "the first to be answered while the second waits")
            fleet.kill(fleet.owner(first, THINKER))
            fleet.add_worker("thinker")
            for spoken, usual in zip(answers, expected, strict=True):
                assert_same(await spoken, usual)


async def test_a_short_prompt_that_overtakes_a_long_one_stops_neither(redis_url: str) -> None:
    """Credit for its prompt, and not for its answer: it is in the only slot for answers, and its consumer in a queue."""
    split = "stages.thinker.split={prefill: {max_batch: 2}, decode: {max_batch: 1}}"
    with thread_fleet(redis_url, *TIGHT, split, "edges.thought.credits=20") as fleet:
        async with gateway(fleet) as client:
            prompts = (400, 12)
            specs = [fake_spec(fleet, num_tokens=NUM_TOKENS, prompt_len=length) for length in prompts]
            expected = [await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, prompt_len=length)) for length in prompts]
            for spoken, usual in zip(await asyncio.gather(*(answer(client, spec) for spec in specs)), expected, strict=True):
                assert_same(spoken, usual)
