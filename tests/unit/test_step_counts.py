"""Number of operations of a decode step with the published numbers of layers and experts: it does
not depend on the batch.

Each torch operation that computes is one kernel on a GPU; views are not counted.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, EngineInput, EngineRequest
from fleet.engine.torch.experts import Experts, grouped_products, looped_experts
from fleet.engine.torch.graph_runner import GraphRunner
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import FastRunner, PassRunner
from fleet.engine.torch.program import GraphProgram, GraphTask
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.talker import VOICE, Talker
from fleet.models.qwen3_omni.thinker import Thinker
from fleet.models.random_weights import RandomWeightReader
from tests.decoder_weights import TRUE_COUNTS, random_model

SAMPLING = Sampling(temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.05, ignore_eos=True)
MAX_BATCH = 32
Model = tuple[RandomWeightReader, OmniConfig]
Program = GraphProgram[Any]


class OperationCount(TorchDispatchMode):
    """Torch dispatch mode that counts operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.total += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model() -> Model:
    """Return a model whose weights do not depend on what other tests have read."""
    return random_model(TRUE_COUNTS)


def make_thinker(model: Model, experts: Experts) -> Program:
    return Thinker(*model, frozenset([2]), experts, 4096, one_by_one=False)


def make_talker(model: Model, experts: Experts) -> Program:
    return Talker(*model, experts, 4096, tiled=False)


def count_decode_step(
    program: Program,
    num_requests: int,
    runner_of: Callable[[Program, KVPool], PassRunner[GraphTask]],
) -> int:
    """Return the operations of one step in which every request samples its second token."""
    pool = KVPool(
        program.kv_shape,
        num_pages=64,
        page_size=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    limits = LoopLimits(max_batch=MAX_BATCH, prefill_chunk_tokens=64)
    engine = LMEngine(program, pool, LocalPasses(runner_of(program, pool)), limits)
    for number in range(num_requests):
        request = RequestId(str(number))
        params = {NUM_POSITIONS: "64", VOICE: "chelsie"}
        engine.submit(
            EngineRequest(
                request_id=request, sampling=replace(SAMPLING, seed=number), params=params
            )
        )
        ids = np.random.default_rng(number).integers(5, 500, 4, dtype=np.int32)
        # the Thinker reads ids only; the Talker speaks those beside a header
        arrays = {"ids": ids, "header": ids[:3]} if isinstance(program, Talker) else {"ids": ids}
        engine.feed(request, EngineInput(walk=Walk("prefill"), arrays=arrays, final=True))
    assert len(engine.step()) == num_requests
    with OperationCount() as count:
        assert len(engine.step()) == num_requests
    return count.total


MOST_FUSED = {"thinker": 600, "talker": 900}
"""Largest numbers of operations of a step by fused kernels; each is one kernel too."""


@pytest.mark.parametrize("num_requests", [1, MAX_BATCH])
@pytest.mark.parametrize("stage", MOST_FUSED)
def test_fused_decode_step_has_a_quarter_of_the_operations(
    model: Model, stage: str, num_requests: int
) -> None:
    program = {"thinker": make_thinker, "talker": make_talker}[stage](model, grouped_products)
    plain, fused = (
        count_decode_step(
            program,
            num_requests,
            partial(GraphRunner, buckets=[1, MAX_BATCH], is_fused=is_fused),
        )
        for is_fused in (False, True)
    )
    assert fused <= MOST_FUSED[stage] and fused < 0.3 * plain, f"{fused} instead of {plain}"


@pytest.mark.parametrize("make", [make_thinker, make_talker], ids=["thinker", "talker"])
def test_decode_step_of_32_requests_has_as_many_operations_as_of_one(
    model: Model, make: Callable[[Model, Experts], Program]
) -> None:
    program, twin = make(model, grouped_products), make(model, looped_experts)
    one, many = (
        count_decode_step(
            program, size, lambda program, pool: GraphRunner(program, pool, [1, MAX_BATCH])
        )
        for size in (1, MAX_BATCH)
    )
    slow = count_decode_step(twin, MAX_BATCH, FastRunner)
    counted = f"{one} operations at batch 1, {many} at {MAX_BATCH}, {slow} of the twin"
    assert many <= 1.05 * one, counted
    # the code predictor's share of a frame has no experts, and is the same in both
    assert many <= slow / (10 if make is make_thinker else 2), counted
