"""Recovery of real models from killed workers: in `invariant` numerics the answer is byte-equal to
the undisturbed one, sampled or greedy.

In `fast` numerics the published output stays, and the answer continues from there.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.core.ids import EdgeName, StageName
from fleet.core.request import RequestSpec
from fleet.graphs.qwen3_omni import CODE2WAV, QWEN3_OMNI, TALKER, THINKER
from tests.harness import (
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    gateway,
    held,
    in_step,
    thread_fleet,
    wait_ended,
)
from tests.oracle.cases import AUDIO, CASES, make_frontend, spec_of
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

TORCH = ("engine=torch", "device=cpu", "dtype=float32")
CASE = next(case for case in CASES if case.name == "audio")


def replace(fleet: ThreadFleet, spec: RequestSpec, *stages: StageName) -> None:
    """Kill the workers that own the stages' tasks, after new workers have joined."""
    for stage in stages:
        dying = fleet.owner(spec.id, stage)
        fleet.add_worker(stage)
        fleet.kill(dying)


def once(index: int, disturb: Callable[[], None]) -> Callable[[EdgeName, int], None]:
    """Return a callback that calls `disturb` once, at the audio chunk `index`."""
    return lambda edge, at: disturb() if (edge, at) == (AUDIO, index) else None


@pytest.mark.one_in(2, "recoveries")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_recovered_answer_equals_the_undisturbed_one(
    redis_url: str, tiny_checkpoint: Path, temperature: float
) -> None:
    frontend = make_frontend(tiny_checkpoint)
    ways = (*TORCH, "numerics=invariant", *in_step(QWEN3_OMNI))
    with thread_fleet(redis_url, *ways, checkpoint=tiny_checkpoint) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(
                client, *spec_of(CASE, frontend, temperature=temperature, seed=3)
            )
            for stages in ((THINKER,), (TALKER,), (CODE2WAV,), (THINKER, TALKER, CODE2WAV)):
                spec, blob = spec_of(CASE, frontend, temperature=temperature, seed=3)
                kill = once(1, lambda spec=spec, stages=stages: replace(fleet, spec, *stages))
                assert_same(await answer_disturbed(client, spec, blob, kill), expected)


@pytest.mark.one_in(2, "recoveries")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_answer_that_parks_repeatedly_equals_the_undisturbed_one(
    redis_url: str, tiny_checkpoint: Path, temperature: float
) -> None:
    """The client pauses until no worker has a task of its request, several times. Tensors that the
    Thinker published are not published again where it continues.
    """
    frontend = make_frontend(tiny_checkpoint)
    ways = (*TORCH, "numerics=invariant", *in_step(QWEN3_OMNI), "lease.park_after_s=0.1")
    with thread_fleet(redis_url, *ways, checkpoint=tiny_checkpoint, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(
                client, *spec_of(CASE, frontend, temperature=temperature, seed=3)
            )
            wait_until(lambda: not held(fleet), "workers to hold nothing")
            spec, blob = spec_of(CASE, frontend, temperature=temperature, seed=3)
            thinker = next(loop for loop in fleet.loops if loop.stage == THINKER)
            num_slots: list[int] = []

            def pause(edge: EdgeName, index: int) -> None:
                if edge == AUDIO and index < 3:
                    wait_until(
                        lambda: not any(spec.id in loop.tasks for loop in fleet.loops),
                        "no worker to have a task of the request",
                    )
                    num_slots.append(thinker.transfer.used_slots())

            assert_same(await answer_disturbed(client, spec, blob, pause), expected)
            trace = await wait_ended(client, spec.id)
    assert num_slots[0] == num_slots[-1] > 0
    parked = {event.stage for event in trace.events if event.what == "parked"}
    assert {TALKER, CODE2WAV} <= parked and not any(e.what == "lost" for e in trace.events)


async def test_recovered_answer_is_complete_in_fast_numerics(
    redis_url: str, tiny_checkpoint: Path
) -> None:
    """The recovered answer has no gap or repeat, and is as long as the undisturbed answer on every
    edge. The tokens may differ, but either answer ends at the length limits of the request.
    """
    frontend = make_frontend(tiny_checkpoint)
    with thread_fleet(redis_url, *TORCH, *in_step(QWEN3_OMNI), checkpoint=tiny_checkpoint) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, *spec_of(CASE, frontend))
            spec, blob = spec_of(CASE, frontend)
            kill = once(1, lambda: replace(fleet, spec, THINKER, TALKER, CODE2WAV))
            got = await answer_disturbed(client, spec, blob, kill)
    assert {edge: len(array) for edge, array in got.items()} == {
        edge: len(array) for edge, array in expected.items()
    }


@pytest.mark.parametrize("has_finished", [True, False])
async def test_tensors_lost_with_their_producer_are_recomputed(
    redis_url: str, tiny_checkpoint: Path, has_finished: bool
) -> None:
    """Tensors lost with their producer are recomputed: the Talker must read the prompt's hidden
    states again after the worker that held them died, perhaps long after it had finished.

    No conductor runs: the report of the lost tensors grants the finished task.
    """
    frontend = make_frontend(tiny_checkpoint)
    credits = (
        ("edges.codes.credits=2", "edges.audio.credits=2") if has_finished else in_step(QWEN3_OMNI)
    )
    ways = (*TORCH, "numerics=invariant", *credits)
    with thread_fleet(
        redis_url, *ways, checkpoint=tiny_checkpoint, transfer="nixl", conductor=False
    ) as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, *spec_of(CASE, frontend))
            spec, blob = spec_of(CASE, frontend)

            def kill() -> None:
                thinker = next(loop for loop in fleet.loops if loop.stage == THINKER)
                if has_finished:
                    wait_until(lambda: spec.id in thinker.tasks.lingering, "the Thinker to finish")
                else:
                    assert spec.id in thinker.tasks, "the Thinker is still at work"
                assert thinker.transfer.used_slots(), "the rows are pulled, not inline"
                fleet.add_worker(THINKER)
                fleet.kill(thinker)
                replace(fleet, spec, TALKER)

            assert_same(await answer_disturbed(client, spec, blob, once(1, kill)), expected)
        wait_until(lambda: not held(fleet), "workers to hold nothing")
        assert all(
            loop.transfer.used_slots() == 0
            for loop in fleet.loops
            if loop.worker not in fleet.killed
        )
