"""Speculation in a fleet: text and speech are byte-equal to those without it, also after the death of the drafting worker."""

import asyncio
from pathlib import Path

import pytest

from fleet.control.client import FleetClient
from fleet.core.ids import EdgeName
from fleet.core.speculation_figures import SpeculationFigures
from fleet.graphs.qwen3_omni import QWEN3_OMNI, THINKER
from tests.harness import EdgeArrays, ThreadFleet, answer, answer_disturbed, assert_same, gateway, in_step, thread_fleet
from tests.oracle.cases import AUDIO, CASES, make_frontend, spec_of
from tests.storm import assert_nothing_left
from tests.support import wait_until

WAYS = ("engine=torch", "device=cpu", "dtype=float32", "numerics=invariant", "lease.worker_ttl_s=60", *in_step(QWEN3_OMNI))
SPLIT = ("stages.thinker.split.prefill.replicas=1", "stages.thinker.split.decode.replicas=1")
CASE = next(case for case in CASES if case.name == "audio")
TEMPERATURE, SEED = 0.9, 3


async def ask(client: FleetClient, checkpoint: Path) -> EdgeArrays:
    return await answer(client, *spec_of(CASE, make_frontend(checkpoint), temperature=TEMPERATURE, seed=SEED))


def figures(fleet: ThreadFleet) -> list[SpeculationFigures]:
    found = [loop.engine.stats().speculation for loop in fleet.loops if loop.stage == THINKER]
    return [one for one in found if one is not None]


def drafters(fleet: ThreadFleet) -> set[str]:
    return {one.drafter for one in figures(fleet)}


def num_drafted(fleet: ThreadFleet) -> int:
    return sum(sum(one.drafted) for one in figures(fleet))


@pytest.mark.one_in(2, "drafting workers")
@pytest.mark.parametrize("split", [(), SPLIT], ids=["whole", "split"])
async def test_answer_is_equal_after_the_death_of_the_drafting_worker(
    redis_url: str, tiny_checkpoint: Path, split: tuple[str, ...]
) -> None:
    with thread_fleet(redis_url, *WAYS, *split, checkpoint=tiny_checkpoint) as fleet:
        async with gateway(fleet) as client:
            expected = await ask(client, tiny_checkpoint)
            await client.operations.choose_drafter(THINKER, "suffix")
            await asyncio.to_thread(wait_until, lambda: drafters(fleet) == {"suffix"}, "the drafter to be in use")
            for _ in range(2):
                assert_same(await ask(client, tiny_checkpoint), expected)
            assert num_drafted(fleet) > 0, "the answer is in the table"
            spec, blob = spec_of(CASE, make_frontend(tiny_checkpoint), temperature=TEMPERATURE, seed=SEED)

            def kill(edge: EdgeName, index: int) -> None:
                if (edge, index) == (AUDIO, 1):
                    dying = fleet.owner(spec.id, THINKER)
                    fleet.add_worker(dying.role)
                    fleet.kill(dying)

            assert_same(await answer_disturbed(client, spec, blob, kill), expected)
        fleet.loops = [loop for loop in fleet.loops if loop.worker not in fleet.killed]
        assert_nothing_left(fleet)
