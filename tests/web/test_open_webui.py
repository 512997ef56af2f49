"""Requests that Open WebUI sends to a server compatible with OpenAI's, built as its source builds
them; its installation, which takes gigabytes, is not part of the tests.

Sources: open-webui 0.12.4, `routers/openai.py`, `routers/tasks.py` and `routers/audio`.
"""

import base64
import json
from typing import Any

import httpx
import pytest

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import Script
from tests.web.realtime.socket_client import opened
from tests.web.test_bad_input import error_of
from tests.web.test_transcription import sound

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello"}
CALL_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "generate_chat_completion",
    "description": "Handle substantive questions and tasks using the selected chat model.",
    "parameters": {
        "type": "object",
        "properties": {"request": {"type": "string"}},
        "required": ["request"],
        "additionalProperties": False,
    },
}


def post(gateway: ServedGateway, path: str, **body: object) -> httpx.Response:
    """Send a body as Open WebUI does: JSON text, with its content type and a key."""
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    return gateway.http.post(path, content=json.dumps(body), headers=headers)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_models_are_listed_for_any_key(gateway: ServedGateway) -> None:
    answer = gateway.http.get("/v1/models", headers={"authorization": "Bearer none"})
    assert [model["id"] for model in answer.json()["data"]] == ["omni"]


def test_chat_is_streamed_with_its_usage_and_the_fields_of_a_model(gateway: ServedGateway) -> None:
    answer = post(
        gateway,
        "/v1/chat/completions",
        stream=True,
        model="omni",
        messages=[SYSTEM, HELLO],
        stream_options={"include_usage": True},
        session_id="s1",
        chat_id="c1",
        id="m1",
        parent_id=None,
        background_tasks={"title_generation": True, "tags_generation": True},
        model_item={"id": "omni", "name": "omni"},
        temperature=0.7,
        top_p=0.9,
        min_p=0.0,
        max_tokens=100,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        seed=1,
        stop=["never"],
        logit_bias={"5": 1},
    )
    chunks = events_of(answer)
    said = [part["choices"][0]["delta"].get("content") for part in chunks if part["choices"]]
    assert "".join(filter(None, said)) == Script().text
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_title_of_a_chat_is_answered_whole(gateway: ServedGateway) -> None:
    answer = post(
        gateway,
        "/v1/chat/completions",
        model="omni",
        messages=[{"role": "user", "content": "### Task:\nGenerate a concise title."}],
        stream=False,
        max_tokens=100,
    )
    assert answer.json()["choices"][0]["message"]["content"] == Script().text


def test_connection_of_type_responses_is_served(gateway: ServedGateway) -> None:
    """The history is sent with each message; parts of an answer have no annotations."""

    def message(role: str, kind: str, text: str) -> dict[str, object]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    answer = post(
        gateway,
        "/v1/responses",
        stream=True,
        model="omni",
        temperature=0.7,
        top_p=0.9,
        max_output_tokens=100,
        instructions="Be brief.",
        input=[
            message("user", "input_text", "hello"),
            message("assistant", "output_text", "Good morning."),
            message("user", "input_text", "and now?"),
        ],
    )
    (ended,) = [event for event in events_of(answer) if event["type"] == "response.completed"]
    assert ended["response"]["output"][0]["content"][0]["text"] == Script().text


def test_speech_has_a_type_that_browsers_play(gateway: ServedGateway) -> None:
    answer = post(gateway, "/v1/audio/speech", input="Hello.", voice="alloy", model="omni")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "audio/mpeg" and len(answer.content) > 1_000


@pytest.mark.parametrize("language", [{}, {"language": "en"}], ids=["any", "english"])
def test_recording_is_transcribed(gateway: ServedGateway, language: dict[str, str]) -> None:
    """A recording is sent in chunks, under a name and without a content type of its own."""
    answer = gateway.http.post(
        "/v1/audio/transcriptions",
        data={"model": "omni", **language},
        files={"file": ("4c1f.wav", sound())},
        headers={"authorization": "Bearer none"},
    )
    assert answer.status_code == 200 and answer.json()["text"] == Script().text


def test_recording_as_json_is_refused_with_the_form_to_use(gateway: ServedGateway) -> None:
    """The setting `json` of its transcription sends what OpenRouter takes."""
    audio = {"data": base64.b64encode(sound()).decode(), "format": "wav"}
    answer = post(gateway, "/v1/audio/transcriptions", model="omni", input_audio=audio)
    assert 400 <= answer.status_code < 500
    message = error_of(answer, answer.status_code)["message"]
    assert message is not None and "multipart/form-data" in message


async def test_call_opens_with_its_session(tooled: Loaded) -> None:
    """A call that answers only when asked, and leaves it to the caller's page to interrupt."""
    with serving(tooled) as gateway:
        async with opened(gateway) as client:
            errors, session = await client.update(
                output_modalities=["audio"],
                instructions="Talk.",
                audio={
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "transcription": {"model": "omni"},
                        "turn_detection": {
                            "type": "server_vad",
                            "interrupt_response": False,
                            "create_response": False,
                        },
                    },
                    "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "marin"},
                },
                tools=[CALL_TOOL],
                tool_choice="auto",
            )
            assert errors == [], errors
            assert [tool["name"] for tool in session["tools"]] == [CALL_TOOL["name"]]
            detection = session["audio"]["input"]["turn_detection"]
            assert (detection["create_response"], detection["interrupt_response"]) == (False, False)
