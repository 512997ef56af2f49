"""Given text spoken by a real voice in a fleet of threads: the same sound after its worker dies."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from fleet.core.ids import EdgeName, new_request_id
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineOutput
from fleet.engine.voice import Speaker, VoiceEngine
from fleet.graphs.base import inputs_of
from fleet.graphs.cascade import AUDIO, CASCADE, TTS, VOICE_PARAM
from fleet.models.voices.load import load_voice
from fleet.stages.cascade import tts
from fleet.stages.cascade.narration import ClauseSpeaker
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    gateway,
    thread_fleet,
    wait_ended,
)
from tests.stage_options import stage_options

TEXT = "Well, this is **one** sentence, and it costs $3.50. 😀 Here is another, as they say. So."


class StallingEngine(VoiceEngine):
    """Speaks two clauses after `num_left` is set to 2, and then none."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__(speaker)
        self.num_left = 1000

    def is_ready(self) -> bool:
        return self.num_left > 0 and super().is_ready()

    def step(self) -> Sequence[EngineOutput]:
        self.num_left -= 1
        return super().step()


def new_spec() -> RequestSpec:
    spec = RequestSpec(
        id=new_request_id(),
        graph=CASCADE.name,
        prompt_ids=(),
        outputs=(AUDIO,),
        params={VOICE_PARAM: "heart"},
        speech_text=TEXT,
    )
    return msgspec.structs.replace(spec, stages=CASCADE.stages_for((AUDIO,), inputs_of(spec)))


async def test_spoken_text_is_the_same_after_its_worker_dies(redis_url: str) -> None:
    folder = CASCADE.stage(TTS).shipped_folder("hibari")
    assert folder is not None
    stage = tts.build(stage_options(stage=TTS, checkpoint=folder))
    stalling = StallingEngine(ClauseSpeaker(load_voice(folder)))
    with thread_fleet(redis_url, "graph=cascade", without=TTS) as fleet:
        fleet.add_worker(TTS, replace(stage, engine=stalling))
        async with gateway(fleet) as client:
            expected = await answer(client, new_spec())
            stalling.num_left = 2
            spec, owners = new_spec(), list[str]()

            def kill(edge: EdgeName, index: int) -> None:
                if (edge, index) == (AUDIO, 2):
                    dying = fleet.owner(spec.id, TTS)
                    owners.append(dying.worker)
                    fleet.add_worker(TTS, stage)
                    fleet.kill(dying)

            assert len(expected[AUDIO]) > 5 * 24_000
            assert_same(await answer_disturbed(client, spec, None, kill), expected)
            trace = await wait_ended(client, spec.id)
            assert trace is not None
            (last_owner,) = (task.owner for task in trace.tasks if task.stage == TTS)
            assert len(owners) == 1 and last_owner not in owners
