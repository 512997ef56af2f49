"""Failures of one request: after a poisoned request, a lack of memory or a broken device, only the
request at fault fails, with an error that names the cause; other requests continue, here or at
another worker.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet.config.placement import for_role
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import text
from fleet.core.errors import (
    BadInput,
    EngineError,
    EngineStopped,
    FleetError,
    OutOfMemory,
    TransferStopped,
    failure_of,
    from_code,
)
from fleet.core.ids import EdgeName, RequestId, RoleName, StageName
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.fake import FakeEngine, FakeKVTransfer
from fleet.stages.base import BuiltStage
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.peer_link import NixlPull
from fleet.transfer.watch import AgentReport
from fleet.worker.loop import grants, maintenance
from fleet.worker.main import build_stage
from fleet.worker.worker_process import WorkerProcess
from tests.harness import (
    EdgeArrays,
    ThreadFleet,
    answer,
    assert_same,
    collected,
    fake_spec,
    gateway,
    ready,
    settings_of,
    thread_fleet,
)
from tests.storm import assert_nothing_left
from tests.support import REPO, wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

POISON, OTHERS = 666, (1, 2, 3)
"""Sampling seeds, by which the failing engine tells the requests apart."""
NUM_TOKENS_BEFORE_FAILURE = 5
ROLE, STAGE, TEXT = RoleName("lm"), StageName("lm"), EdgeName("text")


class FailingEngine(FakeEngine):
    """An engine whose steps fail once the poisoned request has `NUM_TOKENS_BEFORE_FAILURE` tokens;
    a failed step loses all its outputs.

    `num_required`: number of requests needed before anything runs. `min_batch`: smallest batch of
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
            expected = {seed: await answer(client, fake_spec(fleet, seed=seed)) for seed in OTHERS}
            specs = [fake_spec(fleet, seed=seed) for seed in (POISON, *OTHERS)]
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
            assert_same(await answer(client, fake_spec(fleet, seed=1)), expected[1])
        assert len(fleet.loops) == 1 and not fleet.killed, "the worker is alive"
        assert_nothing_left(fleet)


async def test_task_outside_the_failed_step_is_no_suspect(redis_url: str) -> None:
    """A task that waits for its client, outside the failed step, keeps its place and state when
    other tasks of its worker fail.
    """
    with thread_fleet(redis_url, "graph=text", "edges.text.credits=2", without=ROLE) as fleet:
        engine = add_failing_engine(fleet, RuntimeError("poison"))
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            spec = fake_spec(fleet)
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

            specs = [fake_spec(fleet, seed=seed) for seed in (POISON, *OTHERS)]
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


SPLIT = REPO / "configs" / "thinker_pd.yaml"
ERRORS = [MemoryError(), RuntimeError("can't allocate memory")]
"""Exceptions by which Python, numpy and torch report missing memory."""


def fail_calls(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: Exception,
    is_selected: Callable[..., bool],
) -> list[str]:
    """Make the calls of `owner.name` whose arguments `is_selected` accepts raise `error`; return a
    list that records them.
    """
    original, failed_calls = getattr(owner, name), list[str]()

    def call_or_fail(*args: Any, **named: Any) -> object:
        if is_selected(*args):
            failed_calls.append(name)
            raise error
        return original(*args, **named)

    monkeypatch.setattr(owner, name, call_or_fail)
    return failed_calls


class LendingPool:
    """Pool of a fake engine, in which no pages can be lent."""

    memory = None

    def lend(self, _request: RequestId) -> None:
        return None


def any_call(*_args: object) -> bool:
    return True


def is_kv_owner(_transfer: NixlTransfer, owner: RequestId, *_tensor: object) -> bool:
    return owner.endswith("/kv")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("owner", "name", "is_selected"),
    [
        (LendingPool, "lend", any_call),
        (FakeKVTransfer, "export_blocks", any_call),
        (NixlTransfer, "publish", is_kv_owner),
        (NixlPull, "poll", any_call),
        (FakeKVTransfer, "import_blocks", any_call),
    ],
    ids=["lend", "export", "publish", "pull", "import"],
)
async def test_hand_off_without_memory_recomputes_the_prefix(
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    is_selected: Callable[..., bool],
    error: Exception,
) -> None:
    if name == "lend":  # pages are lent only where memory is shared
        monkeypatch.setattr(NixlTransfer, "shares_memory", True)
        monkeypatch.setattr(FakeKVTransfer, "pages", LendingPool())
    with thread_fleet(redis_url, file=SPLIT, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            failed_calls = fail_calls(monkeypatch, owner, name, error, is_selected)
            for _ in range(2):
                assert_same(await answer(client, fake_spec(fleet)), expected)
        assert len(failed_calls) >= 2 and not fleet.killed, "no worker died"
        assert_nothing_left(fleet)


async def fail_one_of_two(url: str, fail_calls_of: Callable[[RequestId], list[str]]) -> FleetError:
    """Run two requests and fail memory allocations of the first; return its error. The second one
    must get its complete answer.
    """
    with thread_fleet(url, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            spec, other_spec = fake_spec(fleet), fake_spec(fleet)
            failed_calls = fail_calls_of(spec.id)

            async def read_error(spec: RequestSpec) -> FleetError:
                with pytest.raises(FleetError) as caught:
                    await answer(client, spec)
                return caught.value

            failed, received = await asyncio.gather(read_error(spec), answer(client, other_spec))
            assert_same(received, expected)
            assert_same(await answer(client, fake_spec(fleet)), expected)
        assert failed_calls and not fleet.killed, "no worker died"
        assert_nothing_left(fleet)
    return failed


async def test_chunk_without_memory_fails_its_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, pulled: EdgeName
) -> None:
    def fail_calls_of(request: RequestId) -> list[str]:
        return fail_calls(
            monkeypatch,
            NixlTransfer,
            "publish",
            MemoryError(),
            lambda _transfer, owner, *_: owner == request,
        )

    assert isinstance(await fail_one_of_two(redis_url, fail_calls_of), OutOfMemory), pulled


async def test_replayed_logs_without_memory_fail_their_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_calls_of(request: RequestId) -> list[str]:
        return fail_calls(
            monkeypatch,
            grants,
            "parse_claim",
            MemoryError(),
            lambda reply, *_: request.encode() in reply[1],
        )

    assert isinstance(await fail_one_of_two(redis_url, fail_calls_of), OutOfMemory)


NUM_STEPS, NUM_REQUESTS = 3, 4


class BrokenDevice(FakeEngine):
    """An engine whose device fails for good at step `NUM_STEPS`. `by_request`: whether the engine
    reports that as a failure of every request.
    """

    def __init__(self, *, by_request: bool = False) -> None:
        super().__init__(max_batch=16, source=True)
        self.by_request = by_request
        self.num_steps = self.num_tasks = 0
        self.failed = False

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
    """Run a worker with its process's main loop on a thread; yield the thread, and a list that
    receives the error that ends it.
    """
    whole = build_stage(fleet.config, STAGE, Path())
    config = for_role(fleet.config, fleet.config.role(ROLE))
    built = BuiltStage(engine=engine, adapter=whole.adapter)
    process = WorkerProcess(fleet.url, settings_of(config, ROLE, built))
    ended_by: list[Exception] = []

    def serve() -> None:
        try:
            process.run()
        except (EngineStopped, TransferStopped) as error:
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


async def test_worker_with_a_stuck_agent_leaves_and_its_tasks_continue_elsewhere(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of which NIXL is stuck leaves in the middle of its tasks, with an error for its
    keeper; no death is counted.
    """
    report = AgentReport()

    class StuckAfterSteps(FakeEngine):
        num_steps = 0

        def step(self) -> Sequence[EngineOutput]:
            nonlocal report
            self.num_steps += 1
            if self.num_steps < NUM_STEPS:
                return super().step()
            report = AgentReport(stalled=("an agent",), stuck=("an agent",))
            return ()

    monkeypatch.setattr(maintenance, "WATCH", SimpleNamespace(observe=lambda: report))
    with thread_fleet(redis_url, "graph=text", without=ROLE) as fleet:
        async with gateway(fleet) as client:
            with worker_process(fleet, StuckAfterSteps(max_batch=16, source=True)) as (
                thread,
                ended_by,
            ):
                await ready(client)
                spec = fake_spec(fleet)
                answered = asyncio.create_task(answer(client, spec))
                await asyncio.to_thread(thread.join, 20)
                assert [type(error) for error in ended_by] == [TransferStopped]
                assert await client.telemetry.missing_roles() == [ROLE]
            fleet.add_worker(ROLE)
            received = await answered
            assert_same(received, await answer(client, fake_spec(fleet)))
            deaths = fleet.clients[0].hget(keys.task(spec.id, STAGE), "deaths")
            assert text(deaths or b"0") == "0", "the request is suspected"


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
