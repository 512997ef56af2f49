"""A poisoned request fails alone, with an error that names the cause; requests in the same batch
receive their usual answers.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fleet.control.client import FleetClient
from fleet.core.errors import EngineError, FleetError, OutOfMemory, failure_of, from_code
from fleet.core.ids import EdgeName
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineOutput
from fleet.engine.fake import FakeEngine
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage
from tests.harness import (
    EdgeArrays,
    ThreadFleet,
    answer,
    assert_same,
    collected,
    fake_spec,
    gateway,
    thread_fleet,
)
from tests.storm import assert_nothing_left
from tests.support import wait_until

POISON, OTHERS = 666, (1, 2, 3)
"""Seeds, by which the engine distinguishes the requests."""
NUM_TOKENS, NUM_TOKENS_BEFORE_FAILURE = 40, 5
TEXT, ROLE = EdgeName("text"), "lm"


class FailingEngine(FakeEngine):
    """An engine whose steps fail once the poisoned request has `NUM_TOKENS_BEFORE_FAILURE` tokens;
    such a step loses all outputs.

    `num_required`: requests needed before anything runs. `min_batch`: minimum number of requests in
    the first failing step.
    """

    def __init__(self, max_batch: int, error: Exception) -> None:
        super().__init__(max_batch=max_batch, source=True)
        self.error, self.failed_with = error, list[int]()
        self.num_required, self.min_batch = 0, 1

    def due_in_s(self) -> float:
        if len(self._running) >= self.num_required:
            self.num_required = 0
        return math.inf if self.num_required else super().due_in_s()

    def step(self) -> Sequence[EngineOutput]:
        outputs = super().step()
        poisoned_tasks = [
            running for running in self._running.values() if running.request.sampling.seed == POISON
        ]
        is_poisoned = any(
            running.made >= NUM_TOKENS_BEFORE_FAILURE and not running.paused
            for running in poisoned_tasks
        )
        if is_poisoned and (self.failed_with or len(outputs) >= self.min_batch):
            self.failed_with.append(len(outputs))
            raise self.error
        return outputs


def add_failing_engine(fleet: ThreadFleet, error: Exception) -> FailingEngine:
    engine = FailingEngine(16, error)
    whole = build_stage(fleet.config, fleet.config.role(ROLE).stage, Path())
    fleet.add_worker(ROLE, BuiltStage(engine=engine, adapter=whole.adapter))
    return engine


async def answer_or_error(client: FleetClient, spec: RequestSpec) -> EdgeArrays | FleetError:
    try:
        return await answer(client, spec)
    except FleetError as error:
        return error


@pytest.mark.parametrize(
    ("error", "code", "phrases"),
    [
        (ValueError("a row that no kernel takes"), "engine_error", ("a row that no kernel takes",)),
        (
            MemoryError(),
            "out_of_memory",
            ("out of memory", "shorten the prompt", "lower max_tokens", "max_batch"),
        ),
        (AssertionError("a programming error"), "engine_error", ("a programming error",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_poisoned_request_fails_alone(
    redis_url: str, error: Exception, code: str, phrases: tuple[str, ...]
) -> None:
    with thread_fleet(redis_url, "graph=text", without=ROLE) as fleet:
        engine = add_failing_engine(fleet, error)
        async with gateway(fleet) as client:
            expected = {
                seed: await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed))
                for seed in OTHERS
            }
            specs = [
                fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in (POISON, *OTHERS)
            ]
            engine.num_required = len(specs)
            poisoned, *others = await asyncio.gather(
                *(answer_or_error(client, spec) for spec in specs)
            )
            assert isinstance(poisoned, FleetError), "the poisoned request was answered"
            assert poisoned.code == code and all(
                phrase in poisoned.message for phrase in phrases
            ), poisoned.message
            for seed, received in zip(OTHERS, others, strict=True):
                assert not isinstance(received, FleetError), f"another request failed: {received}"
                assert_same(received, expected[seed])
            assert max(engine.failed_with) > 1, "no other request was in a failed step"
            assert engine.failed_with[-1] == 1, "the last failed step has only the poisoned request"
            assert_same(
                await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS, seed=1)), expected[1]
            )
        assert len(fleet.loops) == 1 and not fleet.killed, "the worker is alive"
        assert_nothing_left(fleet)


async def test_task_outside_the_failed_step_is_no_suspect(redis_url: str) -> None:
    """A task that waits for its client keeps its place and its state when other tasks fail beside
    it.
    """
    with thread_fleet(redis_url, "graph=text", "edges.text.credits=2", without=ROLE) as fleet:
        engine = add_failing_engine(fleet, RuntimeError("poison"))
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet, num_tokens=NUM_TOKENS))
            spec = fake_spec(fleet, num_tokens=NUM_TOKENS)
            paused_stream = await client.requests.submit(spec, None)
            task = await asyncio.to_thread(
                lambda: fleet.owner(spec.id, fleet.loops[0].stage).tasks[spec.id]
            )
            await asyncio.to_thread(
                lambda: wait_until(lambda: task.paused, "the task to wait for its client")
            )

            async def read_late() -> EdgeArrays:
                await asyncio.to_thread(
                    lambda: wait_until(lambda: engine.failed_with, "a step to fail beside it")
                )
                assert fleet.loops[0].tasks[spec.id] is task
                return await collected(paused_stream, spec)

            specs = [
                fake_spec(fleet, num_tokens=NUM_TOKENS, seed=seed) for seed in (POISON, *OTHERS)
            ]
            engine.num_required, engine.min_batch = (
                1 + len(specs),
                2,
            )  # with so few credits the other requests also pause at times
            received, poisoned, *_ = await asyncio.gather(
                read_late(), *(answer_or_error(client, each) for each in specs)
            )
            assert isinstance(poisoned, EngineError) and max(engine.failed_with) > 1
            assert not isinstance(received, FleetError)
            assert_same(received, expected)


def test_out_of_memory_errors_name_the_remedy() -> None:
    import torch

    def message_of(allocate: object) -> str:
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate()  # type: ignore[operator]
        failure = failure_of("the engine failed the request", caught.value)
        assert isinstance(failure, OutOfMemory)
        assert isinstance(from_code(failure.code, failure.message), OutOfMemory)
        return failure.message

    for allocate in (lambda: torch.zeros(2**50), lambda: np.zeros(2**50), lambda: bytearray(2**62)):
        assert "shorten the prompt or lower max_tokens" in message_of(allocate)
    device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert isinstance(failure_of("", device), OutOfMemory)
    assert not isinstance(
        failure_of("", RuntimeError("mat1 and mat2 shapes cannot be multiplied")), OutOfMemory
    )
