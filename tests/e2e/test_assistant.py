"""A real recogniser, language model and voice: real words on the Voice page in Chromium, an
interruption, and a spoken question by each third-party client.
"""

import asyncio
import base64
import json
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import soxr
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion
from openai.types.realtime import RealtimeSessionCreateRequestParam
from playwright.sync_api import expect

from fleet.lab.measure.word_errors import word_errors, words_of
from tests.e2e.assistant import (
    ANSWER,
    QUESTION,
    STORY,
    assistant_fleet,
    build_weights,
    spoken_question,
)
from tests.e2e.talking import VoiceFleet, answers, interrupt, microphone
from tests.e2e.test_voice_browser import assert_played_completely, wait_until_played
from tests.tool_template import WEATHER
from tests.web.realtime.speech_samples import RATE_HZ, blocks, silence
from tests.web.realtime.test_other_clients import LIVEKIT, PIPECAT, run_client
from tests.web.voice import probe
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers
from tests.web.voice.probe import Pcm
from tests.web.voice.test_spoken import MAX_BARGE_IN_MS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

MODEL = "voice"
SENTENCE = "The quick brown fox jumps over the lazy dog."
PATIENCE_S = 150


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[VoiceFleet]:
    cache = pytestconfig.cache
    assert cache is not None, "pytest runs without its cache"
    weights = build_weights(Path(cache.mkdir("whisper_base")).parent)
    with assistant_fleet(tmp_path_factory.mktemp("fleet"), weights) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def question(fleet: VoiceFleet) -> Pcm:
    return spoken_question(fleet.api, QUESTION)


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


def test_spoken_question_and_answer_are_real_words_on_the_page(
    browsers: Browsers, fleet: VoiceFleet, question: Pcm
) -> None:
    with microphone(browsers, fleet, question) as page:
        page.locator("#talk-button").click()
        expect(page.locator(".turn.user .words")).to_have_text(QUESTION)
        expect(page.locator(".turn.assistant .words")).to_contain_text(ANSWER)
        expect(page.locator(".turn.assistant .latency")).to_be_visible()
        wait_until_played(page)
        (answer,) = answers(page)
        assert_played_completely(page, fleet, answer)


def test_barge_in_silences_the_assistant(
    browsers: Browsers, fleet: VoiceFleet, question: Pcm
) -> None:
    with microphone(browsers, fleet, question) as page:
        interrupt(page, STORY)
        took_ms = probe.barge_in_ms(page)
        print(f"barge-in: {took_ms:.0f} ms from the first voiced sample to the last one played")
        assert 0 < took_ms <= MAX_BARGE_IN_MS
        expect(page.locator(".turn.user .words").last).to_have_text(QUESTION)
        expect(page.locator(".turn.assistant .words").nth(1)).to_contain_text(ANSWER)


@pytest.fixture(scope="module")
def recorded(question: Pcm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of the spoken question, as clients send it."""
    path = tmp_path_factory.mktemp("question") / "question.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(soxr.resample(question, MIC_RATE_HZ, RATE_HZ).astype("<i2").tobytes())
    return path


@pytest.mark.parametrize(
    ("script", "requirement"),
    [("livekit_client.script", LIVEKIT), ("pipecat_client.script", PIPECAT)],
    ids=["livekit", "pipecat"],
)
def test_spoken_question_of_a_client_is_heard_and_answered(
    fleet: VoiceFleet, recorded: Path, script: str, requirement: str
) -> None:
    printed = run_client(script, requirement, fleet.url, MODEL, str(recorded))
    assert f"heard: {QUESTION}" in printed and ANSWER in printed


def test_function_call_is_silent_and_its_result_is_spoken(fleet: VoiceFleet) -> None:
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=PATIENCE_S)
    fields = {
        "model": MODEL,
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "tools": [WEATHER],
    }
    create = cast(Callable[..., ChatCompletion], client.chat.completions.create)
    asked = {"role": "user", "content": "How warm is it in Rome on each of the next 3 days?"}
    called = create(messages=[asked], tool_choice="required", parallel_tool_calls=False, **fields)
    message = called.choices[0].message
    (call,) = message.tool_calls or []
    assert called.choices[0].finish_reason == "tool_calls" and call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert message.audio is not None and not message.audio.data, "a call is not spoken"
    said = message.model_dump(exclude_none=True, exclude={"audio"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 31 degrees in Rome."}
    again = create(messages=[asked, said, result], tool_choice="none", **fields)
    answer = again.choices[0].message
    assert answer.audio is not None and "31" in answer.audio.transcript and answer.audio.data


def test_openai_client_chats_speaks_and_transcribes(fleet: VoiceFleet) -> None:
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=PATIENCE_S)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    )
    speech = answer.choices[0].message.audio
    assert speech is not None and ANSWER in speech.transcript
    spoken = client.audio.speech.create(
        model=MODEL, voice="alloy", input=SENTENCE, response_format="wav"
    )
    for name, wav, words in (
        ("answer.wav", base64.b64decode(speech.data), speech.transcript),
        ("sentence.wav", spoken.read(), SENTENCE),
    ):
        heard = client.audio.transcriptions.create(model=MODEL, file=(name, wav)).text
        assert word_errors([(words, heard)]).percent <= 10, (words, heard)
    timed = client.audio.transcriptions.create(
        model=MODEL,
        file=("sentence.wav", spoken.read()),
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert timed.words is not None
    assert words_of(" ".join(word.word for word in timed.words)) == words_of(timed.text)
    times = [time for word in timed.words for time in (word.start, word.end)]
    assert times == sorted(times) and 0 <= times[0] < times[-1] <= timed.duration


def test_openai_client_speaks_and_hears(fleet: VoiceFleet, recorded: Path) -> None:
    """The thread of the tests runs the event loop of the browsers, so the client has its own."""
    with ThreadPoolExecutor(1) as pool:
        heard, said = pool.submit(asyncio.run, conversation(fleet, recorded)).result()
    assert heard == QUESTION and ANSWER in said


async def conversation(fleet: VoiceFleet, recorded: Path) -> tuple[str, str]:
    """Speak a recording to the fleet; return what was heard and what was answered."""
    with wave.open(str(recorded)) as file:
        pcm = file.readframes(file.getnframes())
    heard = said = ""
    async with (
        asyncio.timeout(PATIENCE_S),
        AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        audio = {"input": {"transcription": {"model": MODEL}}}
        session = cast(RealtimeSessionCreateRequestParam, {"type": "realtime", "audio": audio})
        await connection.session.update(session=session)
        for block in blocks(pcm + silence(1500), 100):
            await connection.input_audio_buffer.append(audio=base64.b64encode(block).decode())
        async for event in connection:
            if event.type == "conversation.item.input_audio_transcription.completed":
                heard = event.transcript
            elif event.type == "response.output_audio_transcript.done":
                said = event.transcript
            elif event.type == "response.done":
                break
    return heard, said
