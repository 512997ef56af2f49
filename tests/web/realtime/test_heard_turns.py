"""Spoken turns at a gateway whose graph gives the transcript of the prompt's audio: the transcript
of a turn comes with the response to it, and later prompts have the transcript instead of the audio.
"""

import pytest

from fleet.core.request import RequestSpec
from fleet.graphs.cascade import ASR, AUDIO, CLIP_ID, HEARD, LM, TEXT, TTS
from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, Script
from tests.web.fake_client import RATE_HZ as ANSWER_HZ
from tests.web.realtime.socket_client import Event, SocketClient
from tests.web.realtime.speech_samples import QUESTION, silence, speech

TRANSCRIPTION = "conversation.item.input_audio_transcription"
COMMITTED = "input_audio_buffer.committed"
HEARD_TEXT = "What time is it <|im_end|> now?"
TURN = silence(300) + speech(QUESTION) + silence(800)


@pytest.fixture
def gateway(cascade_gateway: ServedGateway) -> ServedGateway:
    cascade_gateway.client.script = Script(heard=HEARD_TEXT, num_samples=FRAME_SAMPLES)
    return cascade_gateway


def requests(gateway: ServedGateway) -> list[RequestSpec]:
    return [spec for spec, _ in gateway.client.submitted]


async def transcribed(page: SocketClient) -> None:
    await page.update(audio={"input": {"transcription": {"model": "x"}}})


async def until_all(page: SocketClient, *kinds: str, number: int = 1) -> Event:
    """Wait until events of all `kinds` have come `number` times, in any order; return the last one
    of the first kind.
    """
    while any(page.kinds().count(kind) < number for kind in kinds):
        await page.next()
    return [event for event in page.events if event["type"] == kinds[0]][-1]


async def test_transcript_comes_with_the_response_and_replaces_the_audio(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """Two spoken turns are two requests: the first one's audio is recognised once, although the
    second prompt repeats it, and its words cannot forge a control token there.
    """
    await transcribed(page)
    for number in (1, 2):
        await page.speak(TURN)
        item = (await page.until(COMMITTED))["item_id"]
        done = await until_all(page, f"{TRANSCRIPTION}.completed", "response.done", number=number)
        assert (done["item_id"], done["transcript"]) == (item, HEARD_TEXT)
    deltas = [event["delta"] for event in page.events if event["type"] == f"{TRANSCRIPTION}.delta"]
    assert "".join(deltas) == 2 * HEARD_TEXT
    used = [spec for spec in requests(gateway) if spec.kind == "voice"]
    assert {spec.kind for spec in requests(gateway)} == {"voice"}, "no transcription by itself"
    assert all(spec.stages == (ASR, LM, TTS) for spec in used)
    assert all(spec.outputs == (HEARD, TEXT, AUDIO) for spec in used)
    assert all(len(spec.audio) == spec.prompt_ids.count(CLIP_ID) == 1 for spec in used)
    decode = gateway.client.tokenizer.decode
    asked = decode(
        [token for token in used[-1].prompt_ids if token != CLIP_ID], skip_special_tokens=False
    )
    ends = gateway.client.tokenizer.token_to_id("<|im_end|>")
    assert HEARD_TEXT in asked and used[-1].prompt_ids.count(ends) == asked.count("<|im_end|>") - 1


async def test_later_typed_turn_runs_no_recogniser(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.speak(TURN)
    await page.until("response.done")
    await page.complete("and now?")
    spec = requests(gateway)[-1]
    assert (spec.stages, spec.audio) == ((LM, TTS), ())


async def test_turn_without_response_is_transcribed_by_the_recogniser_alone(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.update(
        audio={
            "input": {
                "transcription": {"model": "x"},
                "turn_detection": {"type": "server_vad", "create_response": False},
            }
        }
    )
    await page.speak(TURN)
    assert (await page.until(f"{TRANSCRIPTION}.completed"))["transcript"] == HEARD_TEXT
    (spec,) = requests(gateway)
    assert (spec.stages, spec.outputs) == ((ASR,), (HEARD,))
    await page.send("response.create")
    await page.until("response.done")
    assert requests(gateway)[-1].stages == (LM, TTS), "the transcript is known"


async def test_turn_whose_response_is_cancelled_first_is_transcribed_by_itself(
    page: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = Script(heard=HEARD_TEXT, stall_at=0, num_samples=8 * ANSWER_HZ)
    await transcribed(page)
    await page.speak(TURN)
    await page.until("response.created")
    gateway.client.script = Script(heard=HEARD_TEXT)
    await page.send("response.cancel")
    assert (await page.until(f"{TRANSCRIPTION}.completed"))["transcript"] == HEARD_TEXT
    assert requests(gateway)[-1].stages == (ASR,)


async def test_silent_turn_is_not_recognised_again(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """A turn in which nothing was recognised stays an empty turn in later prompts."""
    gateway.client.script = Script(heard="")
    await transcribed(page)
    await page.speak(TURN)
    done = await until_all(page, f"{TRANSCRIPTION}.completed", "response.done")
    assert done["transcript"] == ""
    await page.complete("hello?")
    assert requests(gateway)[-1].audio == ()
