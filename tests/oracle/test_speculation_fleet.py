"""Speculation in a fleet: text and speech are byte-equal to answers without speculation, also after
the death of the drafting worker.
"""

import asyncio
from pathlib import Path

import pytest

from fleet.control.client import FleetClient
from fleet.core.ids import EdgeName
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.graphs import get_graph
from fleet.graphs.qwen3_omni import QWEN3_OMNI, THINKER
from fleet.graphs.text import LM
from tests.harness import (
    EdgeArrays,
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    gateway,
    in_step,
    thread_fleet,
)
from tests.oracle.cases import AUDIO, CASES, make_frontend, spec_of
from tests.storm import assert_nothing_left
from tests.support import wait_until
from tests.train.fleets import prompt, training_fleet
from tests.train.test_versions import figures as figures_of
from tests.train.test_versions import question, verify_every_draft, wait_for_version

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

WAYS = (
    "engine=torch",
    "device=cpu",
    "dtype=float32",
    "numerics=invariant",
    "lease.worker_ttl_s=60",
    *in_step(QWEN3_OMNI),
)
SPLIT = ("stages.thinker.split.prefill.replicas=1", "stages.thinker.split.decode.replicas=1")
CASE = next(case for case in CASES if case.name == "audio")
TEMPERATURE, SEED = 0.9, 3


async def ask(client: FleetClient, checkpoint: Path) -> EdgeArrays:
    return await answer(
        client, *spec_of(CASE, make_frontend(checkpoint), temperature=TEMPERATURE, seed=SEED)
    )


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
            await asyncio.to_thread(
                wait_until, lambda: drafters(fleet) == {"suffix"}, "the drafter to be in use"
            )
            for _ in range(2):
                assert_same(await ask(client, tiny_checkpoint), expected)
            assert num_drafted(fleet) > 0, "the answer is in the table"
            spec, blob = spec_of(
                CASE, make_frontend(tiny_checkpoint), temperature=TEMPERATURE, seed=SEED
            )

            def kill(edge: EdgeName, index: int) -> None:
                if (edge, index) == (AUDIO, 1):
                    dying = fleet.owner(spec.id, THINKER)
                    fleet.add_worker(dying.role)
                    fleet.kill(dying)

            assert_same(await answer_disturbed(client, spec, blob, kill), expected)
        fleet.loops = [loop for loop in fleet.loops if loop.worker not in fleet.killed]
        assert_nothing_left(fleet)


async def test_answer_that_is_replayed_with_another_version_of_the_head_is_equal(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    """An answer replayed with another version of the draft head is equal: the worker dies in
    mid-answer, and its successor drafts with the next version, promoted meanwhile.
    """
    settings = (
        "numerics=invariant",
        "stages.lm.speculation.drafter=eagle3",
        "lease.worker_ttl_s=60",
        *in_step(get_graph("text")),
    )
    async with training_fleet(redis_url, text_checkpoint, tmp_path, *settings) as training:
        fleet, loop = training.fleet, asyncio.get_running_loop()
        first = next(each for each in fleet.loops if each.stage == LM)
        verify_every_draft(first)
        expected = await answer(training.client, question())
        for number in (1, 2):
            await training.run_over([prompt(number)]).run(asyncio.Event())
        await training.client.training.promote(1)
        await wait_for_version(first, 1)
        spec = question()

        def disturb(_: EdgeName, index: int) -> None:
            if index == 5:
                assert sum(figures_of(first).drafted) > 0
                verify_every_draft(fleet.add_worker(LM))
                asyncio.run_coroutine_threadsafe(training.client.training.promote(2), loop).result(
                    10
                )
                fleet.kill(fleet.owner(spec.id, LM))
            if index == 10:
                wait_until(
                    lambda: figures_of(fleet.owner(spec.id, LM)).version == 2,
                    "the next version to be in use",
                )

        assert_same(await answer_disturbed(training.client, spec, None, disturb), expected)
        second = next(each for each in training.alive if each.stage == LM)
        assert second is not first and sum(figures_of(second).drafted) > 0
        assert_same(await answer(training.client, question()), expected)
