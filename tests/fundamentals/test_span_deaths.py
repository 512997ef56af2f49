"""A request over which span workers die runs alone, then becomes a dead letter; requests of the
same passes are answered.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fleet.control.dead_letters import read_letters
from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from fleet.engine.base import EngineOutput
from fleet.engine.fake import FakeEngine
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage
from tests.fundamentals.test_poison import OTHERS, POISON, answer_or_error
from tests.harness import ThreadFleet, answer, assert_same, fake_spec, gateway, thread_fleet
from tests.storm import assert_nothing_left

NUM_TOKENS, NUM_TOKENS_BEFORE_DEATHS = 30, 5
ROLE = "lm"


class LossyEngine(FakeEngine):
    """An engine whose span workers die over each pass of the poisoned request, from
    `NUM_TOKENS_BEFORE_DEATHS` tokens on.

    `deaths`: the number of requests in each such pass.
    """

    def __init__(self) -> None:
        super().__init__(max_batch=16, source=True)
        self.remote = self
        self.deaths: list[int] = []

    def _is_poisoned(self) -> bool:
        poisoned = [
            running for running in self._running.values() if running.request.sampling.seed == POISON
        ]
        return any(running.made >= NUM_TOKENS_BEFORE_DEATHS for running in poisoned)

    def accepts_requests(self) -> bool:
        return True

    def outage(self) -> None:
        return None

    def take_suspects(self) -> Sequence[RequestId]:
        if not self._is_poisoned():
            return ()
        self.deaths.append(len(self._running))
        return list(self._running)

    def step(self) -> Sequence[EngineOutput]:
        return () if self._is_poisoned() else super().step()


def add_lossy_engine(fleet: ThreadFleet) -> LossyEngine:
    engine = LossyEngine()
    fleet.add_worker(
        ROLE,
        BuiltStage(
            engine=engine,
            adapter=build_stage(fleet.config, fleet.config.role(ROLE).stage, Path()).adapter,
        ),
    )
    return engine


async def test_request_that_kills_span_workers_becomes_a_dead_letter_and_others_are_answered(
    redis_url: str,
) -> None:
    with thread_fleet(redis_url, "graph=text", without=ROLE) as fleet:
        engine = add_lossy_engine(fleet)
        async with gateway(fleet) as client:
            expected = {
                seed: await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed))
                for seed in OTHERS
            }
            specs = [
                fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in (POISON, *OTHERS)
            ]
            poisoned, *others = await asyncio.gather(
                *(answer_or_error(client, spec) for spec in specs)
            )
            assert isinstance(poisoned, FleetError) and poisoned.code == "worker_lost", poisoned
            for seed, received in zip(OTHERS, others, strict=True):
                assert not isinstance(received, FleetError), f"another request failed: {received}"
                assert_same(received, expected[seed])
        assert engine.deaths[-1] == 1, "the last pass has only the poisoned request"
        assert [letter.request for letter in read_letters(fleet.clients[0])] == [specs[0].id]
        assert len(fleet.loops) == 1 and not fleet.killed, "the anchor is alive"
        assert_nothing_left(fleet)
