"""Spoken turns at a gateway whose graph gives the transcript of the prompt's audio: the transcript
of a turn comes with the response to it, and later prompts have the transcript instead of the audio.
"""

from dataclasses import replace
from itertools import takewhile

import pytest

from fleet.core.errors import Overloaded
from fleet.core.request import RequestSpec
from fleet.graphs.cascade import ASR, AUDIO, CLIP_ID, HEARD, LM, TEXT, TTS
from tests.support import await_until
from tests.web.conftest import Loaded, ServedGateway, serving, with_voice
from tests.web.fake_client import FRAME_SAMPLES, Script
from tests.web.fake_client import RATE_HZ as ANSWER_HZ
from tests.web.realtime.socket_client import Event, SocketClient, opened
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


def answers(gateway: ServedGateway) -> list[RequestSpec]:
    return [spec for spec in requests(gateway) if spec.kind == "voice"]


async def until_answered(gateway: ServedGateway, number: int) -> None:
    """Wait until `number` answers have been submitted."""

    async def are_submitted() -> bool:
        return len(answers(gateway)) >= number

    await await_until(are_submitted, f"{number} answers")


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
    used = answers(gateway)
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


async def test_instructions_are_read_while_the_first_turn_is_spoken(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """The model reads instructions once, in a request of one token that brings nothing, at the
    beginning of the next spoken turn; the prompt of its response begins with what was read.
    """
    for number, instructions in enumerate(("Be brief.", "Be brief.", "Speak like a pirate.")):
        await page.update(instructions=instructions)
        before = len(requests(gateway))
        await page.speak(TURN)
        while page.kinds().count("response.done") <= number:
            await page.next()
        sent = requests(gateway)[before:]
        assert sent[-1].stages == (ASR, LM, TTS)
        read = [spec for spec in sent if spec.stages == (LM,)]
        assert len(read) == (0 if number == 1 else 1)
        for spec in read:
            assert (spec.outputs, spec.sampling[LM].max_tokens) == ((TEXT,), 1)
            assert spec.session and spec.session == sent[-1].session
            shared = zip(spec.prompt_ids, sent[-1].prompt_ids, strict=False)
            num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared))
            beginning = gateway.client.tokenizer.decode(spec.prompt_ids[:num_equal])
            assert instructions in beginning


async def test_nothing_is_read_before_a_turn_without_speculation(cascade: Loaded) -> None:
    with serving(with_voice(cascade, speculate_ms=0, partial_ms=0)) as gateway:
        gateway.client.script = Script(heard=HEARD_TEXT, num_samples=FRAME_SAMPLES)
        async with opened(gateway) as page:
            await page.update(instructions="Be brief.")
            await page.speak(TURN)
            await page.until("response.done")
        assert [spec.stages for spec in requests(gateway)] == [(ASR, LM, TTS)]


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


@pytest.mark.parametrize("create_response", [True, False])
async def test_hints_of_the_transcription_reach_every_recognition(
    page: SocketClient, gateway: ServedGateway, create_response: bool
) -> None:
    hints = {"model": "omni", "language": "German", "prompt": "Wexelblat, Zürich"}
    detection = {"type": "server_vad", "create_response": create_response}
    errors, now = await page.update(
        audio={"input": {"transcription": hints, "turn_detection": detection}}
    )
    assert not errors and now["audio"]["input"]["transcription"] == hints
    await page.speak(TURN)
    await until_all(
        page, f"{TRANSCRIPTION}.completed", *(["response.done"] if create_response else [])
    )
    used = [spec.params for spec in requests(gateway) if spec.audio]
    assert used and all(
        (params["language"], params["prompt"]) == ("de", hints["prompt"]) for params in used
    )
    await page.complete("and now?")
    assert requests(gateway)[-1].params.keys() == {"voice"}


async def test_language_that_the_recogniser_does_not_know_is_refused_by_the_update(
    page: SocketClient,
) -> None:
    hints = {"model": "omni", "language": "tlh", "prompt": "Qapla"}
    (error,), now = await page.update(audio={"input": {"transcription": hints}})
    assert error["param"] == "session.audio.input.transcription.language"
    assert now["audio"]["input"]["transcription"] == hints | {"language": None}


async def test_speed_is_the_pace_of_spoken_responses_from_the_next_one_on(
    page: SocketClient, gateway: ServedGateway
) -> None:
    speeds: list[str | None] = []
    for speed, modality in ((0.5, "audio"), (0.5, "text"), (1.5, "audio"), (None, "audio")):
        errors, now = await page.update(
            output_modalities=[modality], audio={"output": {"speed": speed}}
        )
        assert not errors and now["audio"]["output"]["speed"] == (speed or 1)
        await page.complete("hello")
        speeds.append(requests(gateway)[-1].params.get("speed"))
    assert speeds == ["0.5", None, "1.5", None]


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


def recognised(gateway: ServedGateway) -> list[tuple[str, ...]]:
    """Return the stages of each request whose recogniser got audio."""
    return [spec.stages for spec in requests(gateway) if spec.audio]


async def committed(page: SocketClient, *, transcription: bool) -> None:
    """Speak a turn with push to talk, and request a response before anything is recognised."""
    await page.detect_turns(None)
    if transcription:
        await transcribed(page)
    await page.speak(speech(QUESTION))
    await page.send("input_audio_buffer.commit")
    await page.send("response.create")


@pytest.mark.parametrize("transcription", [True, False])
async def test_committed_turn_is_recognised_once(
    page: SocketClient, gateway: ServedGateway, transcription: bool
) -> None:
    await committed(page, transcription=transcription)
    await page.completed()
    await page.complete("and now?")
    assert recognised(gateway) == [(ASR,) if transcription else (ASR, LM, TTS)]
    answer = requests(gateway)[1 if transcription else 0]
    assert answer.outputs[-2:] == (TEXT, AUDIO)
    if transcription:
        prompt = gateway.client.tokenizer.decode(list(answer.prompt_ids))
        assert HEARD_TEXT in prompt, "the response waits for the transcript"


async def test_response_recognises_a_turn_whose_own_recognition_failed(
    page: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = Script(
        heard=HEARD_TEXT,
        num_samples=FRAME_SAMPLES,
        refusal=Overloaded("full"),
        refusals=range(1),
    )
    await committed(page, transcription=True)
    await until_all(page, "response.done", f"{TRANSCRIPTION}.failed")
    assert recognised(gateway) == [(ASR, LM, TTS)]


async def test_two_responses_to_one_turn_share_its_recognition(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await committed(page, transcription=False)
    item = (await page.until(COMMITTED))["item_id"]
    aside = {"conversation": "none", "input": [{"type": "item_reference", "id": item}]}
    await page.send("response.create", response=aside)
    await until_all(page, "response.done", number=2)
    assert recognised(gateway) == [(ASR, LM, TTS)] and len(requests(gateway)) == 2


async def test_short_interruption_is_recognised_once_and_its_answer_once_more_continued(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """A spoken question is answered, the answer interrupted by a cough and continued, and then by
    a word: each of the three clips is recognised once.
    """
    await transcribed(page)
    unending = Script(num_samples=50 * ANSWER_HZ, gap_s=0.02)
    gateway.client.script = replace(unending, heard=HEARD_TEXT)
    await page.speak(TURN)
    first = (await page.until("response.created"))["response"]
    await page.until_audio(first["id"], FRAME_SAMPLES)
    word = speech(QUESTION)[: 2 * ANSWER_HZ * 3 // 10]
    for num_answers, heard in ((2, ""), (3, "stop")):
        gateway.client.script = replace(unending, heard=heard)
        await page.speak(silence(100) + word + silence(700))
        begun = (await page.until("response.created"))["response"]
        await page.until_audio(begun["id"], FRAME_SAMPLES)
        # A continued answer begins with audio that was left, before its request is submitted.
        await until_answered(gateway, num_answers)
    assert recognised(gateway) == [(ASR, LM, TTS), (ASR,), (ASR,)]
    decode = gateway.client.tokenizer.decode
    prompts = [
        decode([t for t in spec.prompt_ids if t != CLIP_ID], skip_special_tokens=False)
        for spec in answers(gateway)
    ]
    assert HEARD_TEXT in prompts[1] and "stop" not in prompts[1]
    assert HEARD_TEXT in prompts[2] and "stop" in prompts[2]
    transcripts = [
        event["transcript"]
        for event in page.events
        if event["type"] == f"{TRANSCRIPTION}.completed"
    ]
    assert transcripts == [HEARD_TEXT, "stop"]


VOICE_DETECTION_MS = (90, 240)
"""Least and greatest time after the end of the speech for which voice detection still hears it."""


async def silence_before_the_end_ms(page: SocketClient) -> int:
    """Speak, and return the length of the silence with which the turn ends. The words are known
    before the shortest wait is over.
    """
    await page.speak(silence(300) + speech(QUESTION))
    for num_blocks in range(1, 200):
        await page.speak(silence(32))
        for _ in range(4):
            await page.events_before_refusal()
        if "input_audio_buffer.speech_stopped" in page.kinds():
            return 32 * num_blocks
    raise AssertionError("the turn does not end")


@pytest.mark.parametrize(
    ("detection", "heard", "wait_ms"),
    [
        ({"type": "semantic_vad"}, "Stop.", 320),
        ({"type": "semantic_vad"}, "I think that", 1600),
        ({"type": "semantic_vad", "eagerness": "low"}, "Stop.", 600),
        ({"type": "semantic_vad", "eagerness": "high"}, "I think that", 1000),
        ({"type": "server_vad"}, "Stop.", 500),
        ({"type": "server_vad"}, "I think that", 500),
    ],
)
async def test_words_decide_when_a_turn_ends(
    page: SocketClient, gateway: ServedGateway, detection: dict[str, str], heard: str, wait_ms: int
) -> None:
    gateway.client.script = Script(heard=heard, num_samples=FRAME_SAMPLES)
    await page.detect_turns(detection)
    least_ms, most_ms = VOICE_DETECTION_MS
    assert least_ms <= await silence_before_the_end_ms(page) - wait_ms <= most_ms
    await until_all(page, "response.done")
    assert recognised(gateway) == [(ASR, LM, TTS)], "one recognition, and it is the response's"


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
