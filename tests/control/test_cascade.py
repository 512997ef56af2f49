"""The graph `cascade` on fake engines: which stages a request runs, and that the death of any of
them changes no byte of an answer.
"""

import asyncio

import msgspec
import numpy as np
import pytest

from fleet.core.errors import NoWorker
from fleet.core.ids import CLIENT, EdgeName, StageName, new_request_id
from fleet.core.request import AudioClip, RequestSpec, Sampling
from fleet.graphs.base import inputs_of
from fleet.graphs.cascade import ASR, AUDIO, CASCADE, CLIP_ID, HEARD, LM, TEXT, TTS
from fleet.telemetry.trace import RequestTrace
from tests.disturbances import replace_worker
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    collected,
    gateway,
    held,
    in_step,
    open_fleet,
    wait_ended,
    wait_none_live,
)
from tests.support import wait_until

GRAPH = "graph=cascade"
CLIP = AudioClip(offset_samples=0, num_samples=160, rate_hz=16_000)
BLOB = np.zeros(160, "<f4").tobytes()
NUM_TOKENS = 24


def spec_of(
    *outputs: EdgeName, is_heard: bool = False, speech_text: str = "", num_tokens: int = NUM_TOKENS
) -> RequestSpec:
    """Return a request as the gateway submits it, with the stages that the graph decides on."""
    spec = RequestSpec(
        id=new_request_id(),
        graph=CASCADE.name,
        prompt_ids=(5, 6, CLIP_ID, 7) if is_heard else (5, 6, 7),
        audio=(CLIP,) if is_heard else (),
        outputs=outputs,
        sampling={stage.name: Sampling(max_tokens=num_tokens, seed=3) for stage in CASCADE.stages},
        speech_text=speech_text,
    )
    return msgspec.structs.replace(spec, stages=CASCADE.stages_for(outputs, inputs_of(spec)))


def stages_run(trace: RequestTrace | None) -> set[StageName]:
    assert trace is not None
    return {task.stage for task in trace.tasks} - {CLIENT}


REQUESTS: dict[str, tuple[RequestSpec, set[StageName]]] = {
    "typed": (spec_of(TEXT), {LM}),
    "typed, answered in speech": (spec_of(TEXT, AUDIO), {LM, TTS}),
    "spoken": (spec_of(HEARD, TEXT, AUDIO, is_heard=True), {ASR, LM, TTS}),
    "spoken, answered in text": (spec_of(TEXT, is_heard=True), {ASR, LM}),
    "transcription": (spec_of(HEARD, is_heard=True), {ASR}),
    "speech": (spec_of(AUDIO, speech_text="Hello there."), {TTS}),
}


async def test_request_runs_only_stages_that_have_work(redis_url: str) -> None:
    async with open_fleet(redis_url, GRAPH) as (_, client):
        for name, (given, stages) in REQUESTS.items():
            spec = msgspec.structs.replace(given, id=new_request_id())
            got = await answer(client, spec, BLOB if spec.audio else None)
            assert all(len(array) for array in got.values()), name
            assert stages_run(await wait_ended(client, spec.id)) == stages, name


async def test_request_needs_workers_of_its_own_stages_only(redis_url: str) -> None:
    async with open_fleet(redis_url, GRAPH, without=ASR) as (_, client):
        assert set(await answer(client, spec_of(TEXT, AUDIO))) == {TEXT, AUDIO}
        assert set(await answer(client, spec_of(AUDIO, speech_text="Hi."))) == {AUDIO}
        with pytest.raises(NoWorker, match=ASR):
            await client.requests.submit(spec_of(HEARD, is_heard=True), BLOB)


@pytest.mark.parametrize("source", ["producer", "conductor"])
@pytest.mark.parametrize("stage", [ASR, LM, TTS])
async def test_spoken_answer_is_the_same_after_any_worker_dies(
    redis_url: str, stage: StageName, source: str
) -> None:
    """The worker is killed at the third chunk of its stage's own edge to the client."""
    settings = (*in_step(CASCADE), f"transition_source={source}")
    own = {ASR: HEARD, LM: TEXT, TTS: AUDIO}[stage]
    async with open_fleet(redis_url, *settings) as (fleet, client):
        expected = await answer(client, spec_of(HEARD, TEXT, AUDIO, is_heard=True), BLOB)
        spec = spec_of(HEARD, TEXT, AUDIO, is_heard=True)

        def kill(edge: EdgeName, index: int) -> None:
            if (edge, index) == (own, 2):
                replace_worker(fleet, spec, stage)

        assert_same(await answer_disturbed(client, spec, BLOB, kill), expected)
        await wait_none_live(client)


async def test_split_language_model_answers_a_spoken_prompt_alike(redis_url: str) -> None:
    spec = spec_of(HEARD, TEXT, AUDIO, is_heard=True)
    async with open_fleet(redis_url, GRAPH) as (_, client):
        expected = await answer(client, spec, BLOB)
    split = f"stages.{LM}.split={{}}"
    async with open_fleet(redis_url, GRAPH, split) as (_, client):
        assert_same(
            await answer(client, spec_of(HEARD, TEXT, AUDIO, is_heard=True), BLOB), expected
        )


async def test_restored_request_runs_the_stages_it_was_submitted_with(redis_url: str) -> None:
    """A request whose stages differ from what its outputs alone would need keeps them when another
    gateway resumes it.
    """
    async with open_fleet(redis_url, *in_step(CASCADE)) as (fleet, client):
        spec = spec_of(AUDIO, speech_text="Hello there.", num_tokens=200)
        await client.requests.submit(spec, None)
        async with gateway(fleet) as other:
            found = await other.requests.resume(spec.id)
            assert found is not None and found[0].stages == (TTS,)
            got = await collected(found[1], found[0])
        assert len(got[AUDIO])
        assert stages_run(await wait_ended(client, spec.id)) == {TTS}


async def test_abort_ends_all_stages(redis_url: str) -> None:
    async with open_fleet(redis_url, *in_step(CASCADE)) as (fleet, client):
        spec = spec_of(HEARD, TEXT, AUDIO, is_heard=True, num_tokens=1000)
        stream = await client.requests.submit(spec, BLOB)
        while (await anext(stream)).edge != AUDIO:
            pass
        assert spec.id in held(fleet)
        await stream.abort("the client left")
        assert (await wait_ended(client, spec.id)).state == "aborted"
        await asyncio.to_thread(
            wait_until, lambda: spec.id not in held(fleet), "every worker to drop the request"
        )
