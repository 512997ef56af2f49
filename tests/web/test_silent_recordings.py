"""Recordings without speech have an empty transcription, for which no request is submitted."""

import base64
import json
import random
from collections.abc import Callable, Mapping

import httpx
import numpy as np
import pytest
from openai.types.audio import TranscriptionVerbose

from tests.noises import Wave, clicks, hum, noise, wav
from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from tests.web.realtime.speech_samples import QUESTION, speech

RATE_HZ = 16_000
SECONDS = 2.0
SILENT: Mapping[str, Callable[[np.random.Generator], Wave]] = {
    "zeros": lambda chance: np.zeros(round(SECONDS * RATE_HZ), np.float32),
    "white noise": lambda chance: noise(chance, RATE_HZ, SECONDS, chance.uniform(-60, -10)),
    "pink noise": lambda chance: noise(chance, RATE_HZ, SECONDS, chance.uniform(-60, -10), 0.5),
    "hum of 50 Hz": lambda chance: hum(chance, RATE_HZ, SECONDS, chance.uniform(-60, -6)),
    "clicks": lambda chance: clicks(chance, RATE_HZ, SECONDS, 3),
}


def transcribe(gateway: ServedGateway, file: bytes, **fields: str) -> httpx.Response:
    data, files = {"model": "omni", **fields}, {"file": ("a.wav", file)}
    answer = gateway.http.post("/v1/audio/transcriptions", data=data, files=files)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("kind", sorted(SILENT))
def test_recording_without_speech_has_an_empty_transcription(
    gateway: ServedGateway, kind: str
) -> None:
    file = wav(SILENT[kind](np.random.default_rng(random.randrange(1 << 32))), RATE_HZ)
    answer = transcribe(gateway, file).json()
    assert answer["text"] == "" and not gateway.client.submitted
    usage = answer["usage"]
    assert usage["type"] == "tokens" and usage["output_tokens"] == 0
    assert usage["input_token_details"]["audio_tokens"] == 26
    assert usage["total_tokens"] == usage["input_tokens"] > 26


def test_every_format_of_an_empty_transcription_is_complete(gateway: ServedGateway) -> None:
    file = wav(np.zeros(round(SECONDS * RATE_HZ), np.float32), RATE_HZ)
    assert transcribe(gateway, file, response_format="text").text == ""
    verbose = TranscriptionVerbose.model_validate(
        transcribe(gateway, file, response_format="verbose_json", language="de").json(), strict=True
    )
    assert (verbose.text, verbose.duration, verbose.language) == ("", SECONDS, "de")
    assert verbose.segments == [] and verbose.usage is not None and verbose.usage.seconds == SECONDS
    events = [line for line in transcribe(gateway, file, stream="true").text.splitlines() if line]
    (done,) = [json.loads(line.removeprefix("data: ")) for line in events]
    assert done["type"] == "transcript.text.done" and done["text"] == ""
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] > 26
    assert not gateway.client.submitted


def test_headers_of_an_empty_transcription_are_those_of_any(gateway: ServedGateway) -> None:
    file = wav(np.zeros(RATE_HZ, np.float32), RATE_HZ)
    headers = transcribe(gateway, file, user="1").headers
    assert headers["x-fleet-ignored"] == "user" and "x-fleet-seed" in headers


def test_speech_after_a_long_silence_is_transcribed_whole(gateway: ServedGateway) -> None:
    spoken = np.frombuffer(speech(QUESTION), "<i2") / 32_768
    file = wav(np.pad(spoken / 50, (2 * 24_000, 0)).astype(np.float32), 24_000)
    assert transcribe(gateway, file).json()["text"] == Script().text
    (spec, _) = gateway.client.submitted[0]
    heard_s = sum(clip.num_samples / clip.rate_hz for clip in spec.audio)
    assert abs(heard_s - 2 - len(spoken) / 24_000) < 0.01


def test_silent_clip_in_a_chat_is_part_of_the_prompt(gateway: ServedGateway) -> None:
    file = base64.b64encode(wav(np.zeros(RATE_HZ, np.float32), RATE_HZ)).decode()
    part = {"type": "input_audio", "input_audio": {"data": file, "format": "wav"}}
    body = {"model": "omni", "messages": [{"role": "user", "content": [part]}]}
    answer = gateway.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == Script().text
    assert len(gateway.client.submitted[0][0].audio) == 1
