"""Answers contained in requests (`RequestSpec.given`) are spoken and continued exactly like sampled
answers.

In `invariant` numerics the output is byte-equal: whole or split stages, undisturbed or after a
worker's death.
"""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet.core.ids import EdgeName, RoleName, StageName
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
)
from tests.oracle.cases import AUDIO, CASES, TEXT, make_frontend, spec_of
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(6, "engines")

WAYS = ("engine=torch", "device=cpu", "dtype=float32", "numerics=invariant", *in_step(QWEN3_OMNI))
SPLIT = ("stages.thinker.split.prefill.replicas=1", "stages.thinker.split.decode.replicas=1")
CASE = dataclasses.replace(next(case for case in CASES if case.name == "audio"), frames=24)
NUM_GIVEN = 9


@pytest.fixture(params=[(), SPLIT], ids=["whole", "split"])
async def fleet(
    request: pytest.FixtureRequest, redis_url: str, tiny_checkpoint: Path
) -> AsyncGenerator[ThreadFleet]:
    with thread_fleet(
        redis_url, *WAYS, *request.param, checkpoint=tiny_checkpoint, transfer="nixl"
    ) as fleet:
        yield fleet
        wait_until(lambda: not held(fleet), "workers to hold nothing")
        living = [loop for loop in fleet.loops if loop.worker not in fleet.killed]
        wait_until(
            lambda: all(loop.engine.stats().kv.pages_used == 0 for loop in living),
            "pools to be empty",
        )


def given_request(
    fleet: ThreadFleet, given: Sequence[int] = (), *, stop: str = "", **sampling: float
) -> tuple[RequestSpec, bytes | None]:
    """Return a request with the given answer tokens, stop string and sampling parameters of its
    main stage.
    """
    temperature = sampling.pop("temperature", 0.0)
    spec, blob = spec_of(CASE, make_frontend(fleet.checkpoint), temperature=temperature, seed=4)
    of_main = msgspec.structs.replace(
        spec.sampling[THINKER], stop=(stop,) if stop else (), **sampling
    )
    spec = msgspec.structs.replace(
        spec, given=tuple(given), sampling={**spec.sampling, THINKER: of_main}
    )
    return spec, blob


def tokens(answer: dict[EdgeName, np.ndarray]) -> list[int]:
    return [int(token) for token in answer[TEXT]]


async def test_given_answer_is_spoken_like_a_drawn_one(fleet: ThreadFleet) -> None:
    """A given answer is spoken like a sampled one. Its last token is the end token, after which
    nothing is sampled although the length limit would allow it.
    """
    end = min(make_frontend(fleet.checkpoint).end_ids())
    async with gateway(fleet) as client:
        drawn = await answer(client, *given_request(fleet, max_tokens=NUM_GIVEN + 1))
        given = [*tokens(drawn)[:NUM_GIVEN], end]
        assert_same(
            await answer(client, *given_request(fleet, given)),
            {TEXT: np.array(given), AUDIO: drawn[AUDIO]},
        )


@pytest.mark.one_in(3, "given answers")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_given", [1, NUM_GIVEN])
async def test_answer_continues_from_its_given_beginning(
    fleet: ThreadFleet, num_given: int, temperature: float
) -> None:
    async with gateway(fleet) as client:
        whole = await answer(client, *given_request(fleet, temperature=temperature))
        given = tokens(whole)[:num_given]
        assert_same(
            await answer(client, *given_request(fleet, given, temperature=temperature)), whole
        )


async def test_length_limit_counts_given_tokens(fleet: ThreadFleet) -> None:
    async with gateway(fleet) as client:
        whole = await answer(client, *given_request(fleet))
        given = tokens(whole)[:NUM_GIVEN]
        assert tokens(await answer(client, *given_request(fleet, given, max_tokens=4))) == given[:4]
        assert (
            tokens(await answer(client, *given_request(fleet, given, max_tokens=NUM_GIVEN + 2)))
            == tokens(whole)[: NUM_GIVEN + 2]
        )


async def test_stop_string_is_detected_in_drawn_tokens_only(fleet: ThreadFleet) -> None:
    detokenizer = make_frontend(fleet.checkpoint).detokenizer()
    async with gateway(fleet) as client:
        whole = await answer(client, *given_request(fleet))
        texts = [detokenizer.add([token]) for token in tokens(whole)]
        at = next(at for at in range(2, NUM_GIVEN) if texts[at])
        assert len(tokens(await answer(client, *given_request(fleet, stop=texts[at])))) <= at + 1
        later = len("".join(texts[NUM_GIVEN:]).partition(texts[at])[0])
        got = tokens(
            await answer(client, *given_request(fleet, tokens(whole)[:NUM_GIVEN], stop=texts[at]))
        )
        assert got == tokens(whole)[: len(got)] and len(got) > NUM_GIVEN
        assert len("".join(texts[NUM_GIVEN : len(got)])) >= min(
            later, len("".join(texts[NUM_GIVEN:]))
        )


async def test_given_answer_survives_worker_deaths(fleet: ThreadFleet) -> None:
    """A given answer survives worker deaths at the first audio chunk, when the text's log holds
    little more than the given tokens.
    """
    async with gateway(fleet) as client:
        whole = await answer(client, *given_request(fleet, temperature=0.9))
        for given in (tokens(whole)[:NUM_GIVEN], tokens(whole)):
            for stages in ((THINKER,), (THINKER, TALKER, CODE2WAV)):
                spec, blob = given_request(fleet, given, temperature=0.9)

                def kill(
                    edge: EdgeName,
                    index: int,
                    spec: RequestSpec = spec,
                    dying: Sequence[StageName] = stages,
                ) -> None:
                    if (edge, index) == (AUDIO, 0):
                        replace(fleet, spec, dying)

                assert_same(await answer_disturbed(client, spec, blob, kill), whole)


def replace(fleet: ThreadFleet, spec: RequestSpec, stages: Sequence[StageName]) -> None:
    """Kill the workers that own the stages' tasks, each after a new worker of its role has
    joined.
    """
    for stage in stages:
        for loop in [
            loop
            for loop in fleet.loops
            if loop.stage == stage and spec.id in (*loop.tasks, *loop.tasks.lingering)
        ]:
            if loop.worker not in fleet.killed:
                fleet.add_worker(RoleName(loop.role))
                fleet.kill(loop)
