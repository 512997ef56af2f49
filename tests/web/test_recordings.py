"""Audio files of browsers, phones and the server itself, on every route with audio input."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import soxr

from tests.recordings import RECORDERS, Wave
from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.speech_samples import spoken
from tests.web.test_bad_input import error_of
from web.openai.audio_encoder import encode_whole

FORMATS = {
    "webm": "webm of Chromium",
    "mp4": "fragmented mp4 of Safari",
    "m4a": "m4a of a phone",
    "aac": "aac",
    "amr": "amr",
}


def second(rate_hz: int) -> Wave:
    return soxr.resample(spoken(RATE_HZ).astype(np.float32) / 32_768, RATE_HZ, rate_hz)


def ask(gateway: ServedGateway, part: Mapping[str, object]) -> Any:
    return gateway.http.post(
        "/v1/chat/completions",
        json={"model": "omni", "messages": [{"role": "user", "content": [part]}]},
    )


def input_audio(file: bytes, kind: str | None) -> dict[str, object]:
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(file).decode(), "format": kind},
    }


def audio_len_s(gateway: ServedGateway) -> float:
    """Return the length in seconds of the audio in the last request's prompt."""
    spec, _ = gateway.client.submitted[-1]
    return sum(clip.num_samples / clip.rate_hz for clip in spec.audio)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_recording_is_accepted_by_chat_data_url_and_transcription(
    gateway: ServedGateway, kind: str
) -> None:
    recorder = next(recorder for recorder in RECORDERS if recorder.name == FORMATS[kind])
    file = recorder.record(second(recorder.rate_hz))
    url = f"data:audio/{kind};codecs=a,b;base64,{base64.b64encode(file).decode()}"
    for part in (input_audio(file, kind), {"type": "audio_url", "audio_url": {"url": url}}):
        assert ask(gateway, part).status_code == 200
        assert abs(audio_len_s(gateway) - 1) < 0.1
    answer = gateway.http.post(
        "/v1/audio/transcriptions", data={"model": "omni"}, files={"file": (f"voice.{kind}", file)}
    )
    assert answer.json()["text"] == Script().text and abs(audio_len_s(gateway) - 1) < 0.1


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "opus", "aac"])
def test_own_speech_is_accepted_as_input(gateway: ServedGateway, kind: str) -> None:
    gateway.client.script = Script(num_samples=RATE_HZ)
    speech = {"model": "omni", "input": "Hello there.", "voice": "alloy", "response_format": kind}
    said = gateway.http.post("/v1/audio/speech", json=speech).content
    whole = (
        gateway.create(modalities=["text", "audio"], audio={"voice": "alloy", "format": kind})
        .choices[0]
        .message
    )
    assert whole.audio is not None
    for file in (said, base64.b64decode(whole.audio.data)):
        assert ask(gateway, input_audio(file, kind)).status_code == 200
        assert abs(audio_len_s(gateway) - 1) < 0.1


NAMES = (
    None,
    "",
    "WAV",
    "wave",
    " wav ",
    ".wav",
    "audio/wav",
    "AUDIO/X-WAV",
    "webm;codecs=opus",
    "video/webm; codecs=vp8,opus",
)


@pytest.mark.parametrize(
    "kind",
    [
        *NAMES,
        "audio/mpeg",
        "audio/ogg;codecs=opus",
        "audio/x-m4a",
        "audio/x-flac",
        "audio/vnd.wave",
    ],
)
def test_format_name_variants_are_accepted(gateway: ServedGateway, kind: str | None) -> None:
    assert (
        ask(
            gateway, input_audio(encode_whole(bytes(2 * RATE_HZ), RATE_HZ, "wav"), kind)
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    "scheme", ["data:audio/wav;base64,", "DATA:audio/wav;BASE64,", " Data:;Base64,"]
)
def test_scheme_of_a_data_url_is_accepted_in_any_case(gateway: ServedGateway, scheme: str) -> None:
    url = scheme + base64.b64encode(encode_whole(bytes(2 * RATE_HZ), RATE_HZ, "wav")).decode()
    for part in (
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url}},
    ):
        assert ask(gateway, part).status_code == 200


@pytest.mark.parametrize("kind", ["audio/pcm", "audio/pcm;rate=16000", "PCM16", "audio/L16"])
def test_headerless_format_is_refused(gateway: ServedGateway, kind: str) -> None:
    error = error_of(ask(gateway, input_audio(bytes(3_200), kind)))
    assert error["param"] == "messages[0].content[0].input_audio.format"


def test_unknown_format_is_refused(gateway: ServedGateway) -> None:
    answer = ask(gateway, input_audio(bytes(3_200), "pcm16"))
    error = error_of(answer)
    assert error["param"] == "messages[0].content[0].input_audio.format" and "'wav'" in str(
        error["message"]
    )
