"""A worker whose engine can compute nothing any more leaves: its tasks continue elsewhere, and no
request is held responsible.
"""

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.config.placement import for_role
from fleet.control import keys
from fleet.control.connect import text
from fleet.core.errors import BadInput, EngineError, EngineStopped
from fleet.core.ids import EdgeName, RequestId, RoleName, StageName
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.fake import FakeEngine
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage
from fleet.worker.worker_process import WorkerProcess
from tests.harness import (
    ThreadFleet,
    answer,
    assert_same,
    fake_spec,
    gateway,
    ready,
    settings_of,
    thread_fleet,
)

ROLE, STAGE, TEXT = RoleName("lm"), StageName("lm"), EdgeName("text")
NUM_STEPS, NUM_REQUESTS = 3, 4


class BrokenDevice(FakeEngine):
    """An engine whose device fails for good at step `NUM_STEPS`. `by_request`: it reports that as a
    failure of each request.
    """

    def __init__(self, *, by_request: bool = False) -> None:
        super().__init__(max_batch=16, source=True)
        self.by_request, self.num_steps, self.num_tasks, self.failed = by_request, 0, 0, False

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        self.num_tasks += 1

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        if self.failed and not self.by_request:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().feed(request_id, piece)

    def step(self) -> Sequence[EngineOutput]:
        self.num_steps += 1
        if self.num_steps < NUM_STEPS:
            return super().step()
        self.failed = True
        if not self.by_request:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        error = EngineError("the engine failed the request: CUDA error")
        return [replace_error(output, error) for output in super().step()]

    def check(self) -> None:
        if self.failed:
            raise EngineStopped("device cuda:0 fails every computation")


def replace_error(output: EngineOutput, error: EngineError) -> EngineOutput:
    return EngineOutput(request_id=output.request_id, walk=output.walk, error=error)


@contextmanager
def worker_process(
    fleet: ThreadFleet, engine: FakeEngine
) -> Generator[tuple[threading.Thread, list[Exception]]]:
    """Run a worker as its process does, on a thread; yield the thread, and the error that ended
    it.
    """
    whole = build_stage(fleet.config, STAGE, Path())
    config = for_role(fleet.config, fleet.config.role(ROLE))
    built = BuiltStage(engine=engine, adapter=whole.adapter)
    process = WorkerProcess(fleet.url, settings_of(config, ROLE, built))
    ended_by: list[Exception] = []

    def serve() -> None:
        try:
            process.run()
        except EngineStopped as error:
            ended_by.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield thread, ended_by
    finally:
        process.stop.set()
        thread.join(timeout=20)


@pytest.mark.parametrize("by_request", [False, True], ids=["step fails", "each request fails"])
async def test_worker_with_a_broken_device_leaves_and_its_tasks_continue_elsewhere(
    redis_url: str, *, by_request: bool
) -> None:
    broken = BrokenDevice(by_request=by_request)
    with thread_fleet(redis_url, "graph=text", without=ROLE) as fleet:
        async with gateway(fleet) as client:
            with worker_process(fleet, broken) as (thread, ended_by):
                await ready(client)
                specs = [fake_spec(fleet, seed=seed) for seed in range(NUM_REQUESTS)]
                answers = [asyncio.create_task(answer(client, spec)) for spec in specs]
                await asyncio.to_thread(thread.join, 20)
                assert [str(error) for error in ended_by] == [
                    "device cuda:0 fails every computation"
                ]
                assert await client.telemetry.missing_roles() == [ROLE], (
                    "the worker is still registered"
                )
            fleet.add_worker(ROLE)
            received = await asyncio.gather(*answers)
            expected = [
                await answer(client, fake_spec(fleet, seed=seed)) for seed in range(NUM_REQUESTS)
            ]
            for spec, got, whole in zip(specs, received, expected, strict=True):
                assert_same(got, whole)
                deaths = fleet.clients[0].hget(keys.task(spec.id, STAGE), "deaths")
                assert text(deaths or b"0") == "0", "the request is suspected"
    assert broken.num_tasks, "no task ran on the broken device"


async def test_failure_of_one_request_on_a_sound_device_leaves_the_worker_serving(
    redis_url: str,
) -> None:
    class RefusesOdd(FakeEngine):
        def submit(self, request: EngineRequest) -> None:
            if request.sampling.seed % 2:
                raise RuntimeError("a shape that this model lacks")
            super().submit(request)

    with thread_fleet(redis_url, "graph=text", without=ROLE) as fleet:
        async with gateway(fleet) as client:
            with worker_process(fleet, RefusesOdd(max_batch=16, source=True)) as (thread, ended_by):
                await ready(client)
                with pytest.raises((EngineError, BadInput), match="a shape that this model lacks"):
                    await answer(client, fake_spec(fleet, seed=1))
                assert len((await answer(client, fake_spec(fleet, seed=2)))[TEXT]) == 40
                assert thread.is_alive() and not ended_by
