"""No deadlock arises with more requests than slots, or when tasks claim slots in another order than
their requests arrived.
"""

import asyncio
from pathlib import Path

import pytest

from fleet.config.placement import for_role
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.engine.fake import FakeEngine, _Running  # pyright: ignore[reportPrivateUsage]
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage
from tests.harness import answer, assert_same, fake_spec, gateway, open_fleet, thread_fleet
from tests.support import await_until

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

THINKER, THOUGHT = StageName("thinker"), EdgeName("thought")
FEW_SLOTS = ("stages.talker.max_batch=1", "stages.thinker.extra={step_ms: 5}")
NUM_TOKENS = 60


async def test_reordered_requests_after_a_death_do_not_block_each_other(redis_url: str) -> None:
    async with open_fleet(
        redis_url, *FEW_SLOTS, "stages.thinker.max_batch=1", "edges.thought.credits=2"
    ) as (fleet, client):
        specs = [fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in (1, 2)]
        expected = [
            await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed))
            for seed in (1, 2)
        ]
        answers = [asyncio.create_task(answer(client, spec)) for spec in specs]
        first, second = (spec.id for spec in specs)

        async def first_speaks_and_second_waits() -> bool:
            views = [await client.telemetry.trace(request) for request in (first, second)]
            if None in views:
                return False
            edges = (
                {edge.name: edge.produced for edge in views[0].edges}
                if views[0] is not None
                else {}
            )
            return edges[THOUGHT] > 2 and len(fleet.owner(first, THINKER).tasks) == 1

        await await_until(
            first_speaks_and_second_waits, "the first to be answered while the second waits"
        )
        fleet.kill(fleet.owner(first, THINKER))
        fleet.add_worker("thinker")
        for pending_answer, expected_answer in zip(answers, expected, strict=True):
            assert_same(await pending_answer, expected_answer)


class DelayedPrefillEngine(FakeEngine):
    """Fake engine that leaves the prompt of the request `last` unread until the test clears
    `last`.
    """

    def __init__(self) -> None:
        super().__init__(max_batch=2, source=True)
        self.last = RequestId("")

    def _can_step(self, running: _Running) -> bool:
        return running.request.request_id != self.last and super()._can_step(running)


async def test_short_prompt_overtaking_a_long_one_does_not_block(redis_url: str) -> None:
    """A short prompt overtakes a long one without deadlock: the second request has credit for its
    prompt but not for its answer, holds the only decode slot, and its consumer is queued.
    """
    split = "stages.thinker.split={prefill: {max_batch: 2}, decode: {max_batch: 1}}"
    role = "thinker.prefill"
    with thread_fleet(
        redis_url, *FEW_SLOTS, split, "edges.thought.credits=20", without=role
    ) as fleet:
        engine = DelayedPrefillEngine()
        whole = build_stage(for_role(fleet.config, fleet.config.role(role)), THINKER, Path())
        fleet.add_worker(role, BuiltStage(engine=engine, adapter=whole.adapter))
        async with gateway(fleet) as client:
            expected = [
                await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed))
                for seed in (1, 2)
            ]
            specs = [fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in (1, 2)]
            engine.last = specs[0].id
            answers = [asyncio.create_task(answer(client, spec)) for spec in specs]
            await asyncio.to_thread(fleet.owner, specs[0].id, StageName("talker"))

            async def second_is_being_answered() -> bool:
                view = await client.telemetry.trace(specs[1].id)
                return view is not None and any(
                    edge.name == THOUGHT and edge.produced >= 20 for edge in view.edges
                )

            await await_until(second_is_being_answered, "the second to use up its credit")
            engine.last = RequestId("")
            for pending_answer, expected_answer in zip(answers, expected, strict=True):
                assert_same(await pending_answer, expected_answer)
