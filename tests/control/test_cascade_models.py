"""The graph `cascade` with tiny models and a real voice: spoken chats answered side by side are the
same after workers of all stages die, and no stage works on for a client that has left.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleet.core.chunk import PROMPT_TOKENS
from fleet.core.ids import EdgeName, StageName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs.cascade import ASR, AUDIO, CASCADE, CLIP_ID, HEARD, LM, TEXT, TTS
from fleet.models.cascade_tiny import write_tiny_checkpoint
from fleet.processing import AudioPart, ChatRequest, Frontend, Message, open_frontend
from tests.disturbances import on_chunk, replace_worker
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
from tests.support import wait_until
from tests.web.realtime.speech_samples import QUESTION, speech

OUTPUTS = (HEARD, TEXT, AUDIO)
OWN_EDGE = {ASR: HEARD, LM: TEXT, TTS: AUDIO}
NUM_CLIPS = 4
SETTINGS = (
    *in_step(CASCADE),
    "engine=torch",
    "numerics=invariant",
    "limits.max_prompt_tokens=2000",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cascade") / "tiny")


def spoken_chat(frontend: Frontend, num_tokens: int = 60) -> tuple[RequestSpec, bytes | None]:
    samples = np.frombuffer(speech(QUESTION), "<i2")[::3].astype(np.float32) / np.float32(32_768)
    clips = [samples[100 * number :] for number in range(NUM_CLIPS)]
    parts = tuple(AudioPart(data=clip, where="m") for clip in clips)
    chat = ChatRequest(
        id=new_request_id(),
        graph=CASCADE.name,
        messages=(Message(role="user", content=parts),),
        outputs=OUTPUTS,
        stages=CASCADE.stages_for(OUTPUTS),
        spoken=True,
        sampling={
            stage.name: Sampling(max_tokens=12 if stage.name == ASR else num_tokens, seed=7)
            for stage in CASCADE.stages
        },
    )
    return frontend.prepare(chat)


def is_idle(fleet: ThreadFleet) -> bool:
    return not any(loop.engine.stats().running for loop in fleet.loops)


@pytest.mark.one_in(3, "cascade models")
async def test_spoken_chats_side_by_side_are_the_same_after_a_worker_of_each_stage_dies(
    redis_url: str, checkpoint: Path
) -> None:
    killed: list[StageName] = []
    with thread_fleet(redis_url, *SETTINGS, checkpoint=checkpoint) as fleet:
        frontend = open_frontend(fleet.config, checkpoint)
        chats = [spoken_chat(frontend) for _ in OWN_EDGE]

        def kill(spec: RequestSpec, stage: StageName) -> Callable[[EdgeName, int], None]:
            def replace() -> None:
                replace_worker(fleet, spec, stage)
                killed.append(stage)

            return on_chunk(OWN_EDGE[stage], 1, replace)

        async with gateway(fleet) as client:
            expected = await answer(client, *spoken_chat(frontend))
            assert all(len(expected[edge]) for edge in OUTPUTS)
            answers = await asyncio.gather(
                *(
                    answer_disturbed(client, spec, blob, kill(spec, stage))
                    for (spec, blob), stage in zip(chats, OWN_EDGE, strict=True)
                )
            )
    for got in answers:
        assert_same(got, expected)
    assert sorted(killed) == sorted(OWN_EDGE)


@pytest.mark.one_in(3, "cascade models")
@pytest.mark.parametrize("stage", [ASR, LM, TTS])
async def test_stages_stop_when_the_client_leaves_in_mid_turn(
    redis_url: str, checkpoint: Path, stage: StageName
) -> None:
    """The client leaves at the first chunk of the stage's own edge, while the stage still works."""
    with thread_fleet(redis_url, *SETTINGS, checkpoint=checkpoint) as fleet:
        frontend = open_frontend(fleet.config, checkpoint)
        async with gateway(fleet) as client:
            spec, blob = spoken_chat(frontend, num_tokens=1000)
            figures: dict[str, int] = {}
            stream = await client.requests.submit(spec, blob)
            while (chunk := await anext(stream)).edge != OWN_EDGE[stage]:
                figures |= chunk.figures
            assert not chunk.final and spec.id in fleet.owner(spec.id, stage).tasks
            await stream.abort("the client left")
            assert (await wait_ended(client, spec.id)).state == "aborted"
            await asyncio.to_thread(
                wait_until,
                lambda: spec.id not in held(fleet) and is_idle(fleet),
                "every worker to drop the request",
            )
            assert spec.prompt_ids.count(CLIP_ID) == NUM_CLIPS
            is_told = stage == TTS  # the length of a spoken prompt comes with the answer's begin
            assert (figures.get(PROMPT_TOKENS, 0) > len(spec.prompt_ids)) is is_told
