"""A request that runs out of memory fails with an error that names cause and remedy; other requests
of its batch are unaffected.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleet.control.client import FleetClient
from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineRequest
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.program import Forwarded
from fleet.models.qwen3_omni.thinker import Thinker, ThinkerTask
from tests.harness import EdgeArrays, ThreadFleet, answer, assert_same, gateway, thread_fleet
from tests.oracle.cases import CASES, Case, make_frontend, spec_of
from tests.storm import assert_nothing_left

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

TORCH = ("engine=torch", "device=cpu", "dtype=float32", "numerics=invariant")
SMALL_POOLS = (
    "stages.thinker.kv_pages=14",
    "stages.talker.kv_pages=14",
    "limits.max_prompt_tokens=200",
)
"""Settings of small KV pools: 224 positions in pages of 16, enough for each of the other requests
alone.
"""
MATES = [
    replace(case, tokens=24, frames=16)
    for case in CASES
    if case.name in ("text", "three turns", "text outlasts speech")
]
TOO_LONG = replace(MATES[0], name="too long an answer", tokens=400)
TOO_LONG_SPOKEN = replace(MATES[0], name="too long a speech", frames=400)
MORE_THAN_THERE_IS = 2**50


async def ask(
    client: FleetClient, spec: RequestSpec, blob: bytes | None
) -> EdgeArrays | FleetError:
    try:
        return await answer(client, spec, blob)
    except FleetError as error:
        return error


async def ask_beside_mates(
    fleet: ThreadFleet, client: FleetClient, checkpoint: Path, spec: RequestSpec, blob: bytes | None
) -> FleetError:
    """Run the request beside others; return its error, and check that the others and a later
    request are answered as without it.
    """
    frontend = make_frontend(checkpoint)
    expected = await asyncio.gather(*(answer(client, *spec_of(case, frontend)) for case in MATES))
    failed, *heard = await asyncio.gather(
        ask(client, spec, blob), *(ask(client, *spec_of(case, frontend)) for case in MATES)
    )
    for got, want in zip(heard, expected, strict=True):
        assert not isinstance(got, FleetError), f"a mate failed: {got}"
        assert_same(got, want)
    assert_same(await answer(client, *spec_of(MATES[0], frontend)), expected[0])
    assert isinstance(failed, FleetError), "it was answered"
    return failed


@pytest.mark.parametrize("case", [TOO_LONG, TOO_LONG_SPOKEN], ids=lambda case: case.name)
async def test_request_larger_than_the_pool_is_refused_with_a_remedy(
    redis_url: str, tiny_checkpoint: Path, case: Case
) -> None:
    with thread_fleet(redis_url, *TORCH, *SMALL_POOLS, checkpoint=tiny_checkpoint) as fleet:
        async with gateway(fleet) as client:
            spec, blob = spec_of(case, make_frontend(tiny_checkpoint))
            failed = await ask_beside_mates(fleet, client, tiny_checkpoint, spec, blob)
        assert failed.code == "context_length_exceeded" and failed.param == "max_tokens"
        assert "maximum context length is 224 tokens, what its KV pool holds" in failed.message
        assert not fleet.killed
        assert_nothing_left(fleet)


def make_hungry(monkeypatch: pytest.MonkeyPatch, hungry: RequestId, at_row: int) -> list[int]:
    """From row `at_row` on, make steps with the request allocate more memory than exists; return
    the list of their sizes.
    """
    sizes: list[int] = []
    found: list[ThinkerTask] = []
    forward, begin = Thinker.forward, Thinker.open

    def noticed(self: Thinker, request: EngineRequest) -> ThinkerTask:
        task = begin(self, request)
        found.extend([task] if request.request_id == hungry else [])
        return task

    def greedy(
        self: Thinker, rows_NH: Tensor, layout: Layout, tasks: Sequence[ThinkerTask]
    ) -> Forwarded:
        if any(task in found and task.num_rows >= at_row for task in tasks):
            sizes.append(len(tasks))
            torch.zeros(MORE_THAN_THERE_IS)
        return forward(self, rows_NH, layout, tasks)

    monkeypatch.setattr(Thinker, "open", noticed)
    monkeypatch.setattr(Thinker, "forward", greedy)
    return sizes


async def test_failed_torch_allocation_fails_one_request(
    redis_url: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_fleet(redis_url, *TORCH, checkpoint=tiny_checkpoint) as fleet:
        async with gateway(fleet) as client:
            spec, blob = spec_of(MATES[0], make_frontend(tiny_checkpoint))
            sizes = make_hungry(monkeypatch, spec.id, len(spec.prompt_ids) + 8)
            failed = await ask_beside_mates(fleet, client, tiny_checkpoint, spec, blob)
        assert failed.code == "out_of_memory"
        assert (
            "allocate" in failed.message
            and "shorten the prompt or lower max_tokens" in failed.message
        )
        assert max(sizes) > 1, "no mate was in a pass that failed"
        assert not fleet.killed
        assert_nothing_left(fleet)
