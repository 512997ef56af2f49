"""The list of models says what the served model can do, and no other model's abilities."""

from typing import Any

import pytest

from tests.web.conftest import LIMITS, Loaded, ServedGateway, chat, serving
from tests.web.sounds import decoded


def described(gateway: ServedGateway) -> dict[str, Any]:
    """Return the model as the openai client reads it, with the fields that it does not know."""
    (model,) = gateway.openai().models.list().data
    fields = model.model_dump()
    assert fields == gateway.openai().models.retrieve(model.id).model_dump()
    return fields


def test_model_that_hears_and_speaks_lists_formats_languages_voices_and_limits(
    gateway: ServedGateway,
) -> None:
    model = described(gateway)
    able = model["capabilities"]
    assert model["max_model_len"] == LIMITS.max_prompt_tokens + LIMITS.max_answer_tokens
    assert able["input_modalities"] == able["output_modalities"] == ["text", "audio"]
    assert able["structured_output"] is True and able["tools"] is False
    assert {"en", "zh"} <= set(able["hearing"]["languages"])
    assert {"wav", "mp3", "webm"} <= set(able["hearing"]["formats"])
    assert able["hearing"]["max_audio_s"] == able["hearing"]["max_transcription_s"] == 5
    voices = gateway.http.get("/v1/audio/voices").json()["voices"]
    assert able["speech"]["voices"] == [voice["id"] for voice in voices]


def test_listed_formats_are_those_that_are_served(gateway: ServedGateway) -> None:
    speech = described(gateway)["capabilities"]["speech"]
    for kind in (*speech["formats"], "ogg"):
        answer = chat(gateway, modalities=["text", "audio"], audio={"format": kind})
        assert (answer.status_code == 200) is (kind in speech["formats"]), kind
    for kind in speech["formats"]:
        asked = {"modalities": ["text", "audio"], "audio": {"format": kind}, "stream": True}
        assert (chat(gateway, **asked).status_code == 200) is (kind in speech["streamed_formats"])
    for kind in speech["file_formats"]:
        body = {"model": "omni", "input": "hello", "response_format": kind}
        answer = gateway.http.post("/v1/audio/speech", json=body)
        is_bare = kind in ("pcm", "pcmu", "pcma")
        assert answer.status_code == 200 and (is_bare or len(decoded(answer.content)) > 0)


def test_recogniser_of_its_own_transcribes_longer_recordings(
    cascade_gateway: ServedGateway,
) -> None:
    able = described(cascade_gateway)["capabilities"]
    assert able["hearing"]["languages"] == ["de", "en"]
    assert able["hearing"]["max_transcription_s"] == LIMITS.max_transcription_s
    assert able["speech"]["voices"] == ["heart", "bella"]


def test_text_model_has_neither_speech_nor_hearing(
    text_only: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_only.frontend, "positions", 1_000)
    with serving(text_only) as gateway:
        model = described(gateway)
    able = model["capabilities"]
    assert able["input_modalities"] == able["output_modalities"] == ["text"]
    assert able["hearing"] is able["speech"] is None
    assert (model["max_model_len"], able["max_prompt_tokens"]) == (1_000, 999)
