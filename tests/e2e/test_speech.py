"""Speech through `fleet up`: real processes, real NIXL, the unmodified `openai` client."""

import base64
import io
import json
import random
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import numpy as np
import pytest
import redis
import soundfile
from numpy.typing import NDArray
from openai import OpenAI

from fleet.control import keys
from fleet.control.connect import text
from tests.e2e.fleets import ProcessFleet, fleet_up, worker_ids
from tests.oracle.cases import speech_like
from tests.support import NEVER_EXPIRES, wait_until
from tests.web.realtime.speech_samples import RATE_HZ, spoken

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

SETTINGS = (
    "checkpoint=tiny",
    "device=cpu",
    "web.port=0",
    "transfer.kind=nixl",
    "web.max_leading_silence_ms=null",  # samples are counted and compared
)
SIX_SECONDS = {
    "fleet": {
        "thinker": {"temperature": 0, "max_tokens": 24},
        "talker": {"temperature": 0, "max_tokens": 76},
    }
}
"""Sampling fields for an answer of six seconds. Greedy, since one of a hundred sampled texts leads
the Talker to its end token earlier.
"""
NUM_REQUESTS, NUM_THOROUGH_REQUESTS = 100, 300
MAX_ROUNDING = 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[ProcessFleet]:
    with fleet_up(tmp_path_factory.mktemp("fleet"), *SETTINGS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def model(fleet: ProcessFleet) -> str:
    return fleet.api.model()


@pytest.fixture
def client(fleet: ProcessFleet) -> Generator[OpenAI]:
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def spoken_question() -> dict[str, object]:
    buffer = io.BytesIO()
    soundfile.write(buffer, speech_like(1.5, 3), 16000, format="WAV")
    audio = {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"}
    return {
        "role": "user",
        "content": [
            {"type": "input_audio", "input_audio": audio},
            {"type": "text", "text": "What?"},
        ],
    }


def test_spoken_question_is_answered_in_text_and_speech(model: str, client: OpenAI) -> None:
    """A spoken question is answered in text and speech, not streamed, with the unmodified
    client.
    """
    answer = client.chat.completions.create(
        model=model,
        messages=[spoken_question()],  # pyright: ignore[reportArgumentType]
        modalities=["text", "audio"],
        audio={"voice": "chelsie", "format": "wav"},
        extra_body=SIX_SECONDS,
    )
    message = answer.choices[0].message
    assert message.audio is not None and answer.usage is not None
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)))
    assert rate_hz == 24000
    assert len(samples) == 75 * 1920 - 555
    assert 0.02 < float(np.sqrt(np.mean(samples**2))) < 0.5
    assert message.audio.transcript
    assert answer.usage.completion_tokens > 0


def test_streamed_chat_has_all_audio_and_text(model: str, client: OpenAI) -> None:
    num_samples, words = 0, ""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me something."}],
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        stream=True,
        extra_body=SIX_SECONDS,
    )
    for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        audio = getattr(delta, "audio", None) or {}
        data = audio.get("data") if isinstance(audio, dict) else audio.data
        words += (delta.content or "") if delta else ""
        num_samples += len(base64.b64decode(data)) // 2 if data else 0
    assert words and num_samples == 75 * 1920 - 555


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_streamed_speech_has_all_audio(model: str, client: OpenAI, stream_format: Any) -> None:
    audio = b""
    with client.audio.speech.with_streaming_response.create(
        model=model,
        voice="chelsie",
        input="Say this.",
        response_format="pcm",
        stream_format=stream_format,
        extra_body=SIX_SECONDS,
    ) as answer:
        if stream_format == "sse":
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
            audio = b"".join(base64.b64decode(event.get("audio", "")) for event in events)
        else:
            audio = b"".join(answer.iter_bytes())
    assert len(audio) == 2 * (75 * 1920 - 555)


def spoken_minute(model: str) -> list[tuple[str, dict[str, object], str]]:
    """Return the route, the body and the sign of the first sound of answers of 80 seconds."""
    long: dict[str, object] = {
        "model": model,
        "fleet": {"talker": {"max_tokens": 1000, "ignore_eos": True}},
    }
    chat: dict[str, object] = {
        **long,
        "messages": [{"role": "user", "content": "Tell me something."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "stream": True,
    }
    speech = {**long, "input": "Say this.", "response_format": "pcm"}
    return [
        ("/v1/chat/completions", chat, '"data":"'),
        ("/v1/audio/speech", {**speech, "stream_format": "sse"}, '"audio":"'),
        ("/v1/audio/speech", {**speech, "stream_format": "audio"}, ""),
    ]


def test_sound_arrives_while_the_answer_is_generated(
    fleet: ProcessFleet, model: str, control: redis.Redis
) -> None:
    """When the first sound of a long answer arrives, in each form of streaming, the answer has not
    been generated yet.
    """
    for path, body, sound in spoken_minute(model):
        with httpx.stream("POST", fleet.url + path, json=body, timeout=60) as answer:
            parts = answer.iter_bytes()
            assert answer.status_code == 200
            assert any(sound.encode() in part for part in parts)
            traced = fleet.api.traced_request(answer.headers["x-request-id"])
            assert traced.state == "running", path
    wait_until_freed(control)


def test_disconnect_from_a_long_speech_frees_everything(
    fleet: ProcessFleet, model: str, control: redis.Redis
) -> None:
    body = {"model": model, "input": "A sentence of many. " * 40, "response_format": "mp3"}
    for _ in range(4):
        with httpx.stream("POST", f"{fleet.url}/v1/audio/speech", json=body, timeout=60) as answer:
            assert answer.status_code == 200 and next(answer.iter_raw())
    wait_until_freed(control)


def test_transcription_is_returned_whole_and_streamed(model: str, client: OpenAI) -> None:
    """A transcription is returned whole and streamed. The tiny checkpoint answers with noise, so
    only the delivery is checked.
    """
    file = io.BytesIO()
    soundfile.write(file, spoken(36_000), RATE_HZ, format="FLAC")
    call = {"model": model, "file": ("a.flac", file.getvalue())}
    transcribe: Any = client.audio.transcriptions.create
    whole = transcribe(**call)
    *deltas, done = transcribe(**call, stream=True)
    assert whole.text == done.text == "".join(delta.delta for delta in deltas) and len(deltas) > 2


def speech_body(
    model: str, message: Mapping[str, object], max_frames: int, **settings: object
) -> dict[str, object]:
    return {
        "model": model,
        "messages": [message],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "fleet": {"talker": {"max_tokens": max_frames}},
        **settings,
    }


def test_greedy_and_seeded_answers_are_reproducible(fleet: ProcessFleet, model: str) -> None:
    """Greedy and seeded answers are reproducible. With `numerics: fast` the audio may differ in
    rounding, since batches depend on timing.
    """

    def ask(**settings: object) -> tuple[str, NDArray[np.int16]]:
        body = speech_body(
            model, {"role": "user", "content": "Again?"}, 12, max_tokens=12, **settings
        )
        message = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60).json()[
            "choices"
        ][0]["message"]
        return message["content"], np.frombuffer(
            base64.b64decode(message["audio"]["data"]), np.int16
        )

    def same(one: tuple[str, NDArray[np.int16]], other: tuple[str, NDArray[np.int16]]) -> bool:
        alike = one[0] == other[0] and len(one[1]) == len(other[1])
        return alike and bool(np.abs(one[1].astype(int) - other[1]).max() <= MAX_ROUNDING)

    assert same(ask(temperature=0), ask(temperature=0))
    assert same(ask(temperature=0.9, seed=5), ask(temperature=0.9, seed=5))
    assert not same(ask(temperature=0.9, seed=5), ask(temperature=0.9, seed=6))


def test_many_requests_a_third_of_them_disconnected_free_everything(
    fleet: ProcessFleet, model: str, control: redis.Redis, thorough: bool
) -> None:
    """Of many requests, a third disconnects at random moments; afterwards KV pools and arenas are
    empty, and every remaining Redis key expires.
    """
    num_requests = NUM_THOROUGH_REQUESTS if thorough else NUM_REQUESTS
    rng = random.Random(11)
    plans = [
        (number, rng.random() < 1 / 3, rng.uniform(0.0, 0.25), rng.random() < 0.3)
        for number in range(num_requests)
    ]
    with ThreadPoolExecutor(max_workers=12) as pool:
        outcomes = list(pool.map(lambda plan: one_of_many(fleet.url, model, *plan), plans))
    assert {outcome for outcome in outcomes if outcome not in ("left", "whole")} == set()
    assert outcomes.count("whole") >= num_requests / 2
    wait_until_freed(control)
    for key in map(text, cast("list[bytes]", list(control.scan_iter(match=f"{keys.PREFIX}*")))):
        row = keys.row_of(key)
        assert row is not None, f"{key} has no row in the key table"
        assert row.life != "live", f"{key} outlives its request"
        assert row.life != "retention" or control.ttl(key) != NEVER_EXPIRES, f"{key} never expires"


def one_of_many(
    url: str, model: str, number: int, leaves: bool, after_s: float, spoken: bool
) -> str:
    message = spoken_question() if spoken else {"role": "user", "content": f"Question {number}"}
    body = speech_body(model, message, 4 + number % 20, stream=True, max_tokens=4 + number % 12)
    began, whole = time.monotonic(), False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        if response.status_code != 200:
            return response.read().decode()
        for line in response.iter_lines():
            whole |= line == "data: [DONE]"
            if '"error"' in line:
                return line
            if leaves and time.monotonic() - began > after_s:
                return "left"
    return "whole" if whole else "cut short"


def wait_until_freed(control: redis.Redis) -> None:
    wait_until(lambda: not control.scard(keys.LIVE), "every request to end", timeout_s=60)
    wait_until(
        lambda: not any(map(int, holdings(control))), "pools and arenas to be empty", timeout_s=60
    )


def holdings(control: redis.Redis) -> list[bytes]:
    """Return the numbers of tasks, KV pages and arena slots that the workers report as in use."""
    reports = [
        control.hmget(keys.worker(worker), ["running", "pages_used", "slots_used"])
        for worker in worker_ids(control)
    ]
    return [
        count for report in cast("list[list[bytes | None]]", reports) for count in report if count
    ]
