"""Unserved features are refused with one error code and with advice for users of a chat page;
content is never ignored.
"""

from typing import Any

import httpx
import openai
import pytest

from tests.web.conftest import HELLO, ServedGateway, chat

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
UNSUPPORTED = "unsupported_value"


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == UNSUPPORTED and error["type"] == "invalid_request_error"
    assert error["param"] is None or error["message"].startswith(error["param"] + ": ")
    return error


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def part(**fields: object) -> dict[str, object]:
    return message(content=[{"type": "text", "text": "hi"}, fields])


CONTENT: list[tuple[dict[str, object], str]] = [
    *(
        ({name: ["data:;base64,AAAA"]}, name)
        for name in ("audios", "images", "videos", "files", "documents", "image_urls")
    ),
    *(
        ({name: "x"}, name)
        for name in (
            "ref_audio",
            "ref_text",
            "refAudio",
            "audio_url",
            "video",
            "system",
            "prompt",
            "instructions",
        )
    ),
    ({"references": [{"audio_path": "a.wav", "text": "a"}]}, "references"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"speaker_embedding": [0.1, 0.2]}, "speaker_embedding"),
    ({"prompt_token_ids": [1, 2]}, "prompt_token_ids"),
    ({"audio": {"voice": "ethan", "ref_audio": "x"}}, "audio.ref_audio"),
    ({"extra_body": {"images": ["data:image/png;base64,AAAA"]}}, "extra_body"),
    ({"multi_modal_data": {"image": "AAAA"}}, "multi_modal_data"),
    ({"options": [{"any": {"name": "DATA:audio/wav;base64,AAAA"}}]}, "options"),
    ({"medias": [{"type": "image", "data": "AAAA"}]}, "medias"),
    ({"imageurl": "x"}, "imageurl"),
    (message(extra={"images": ["x"]}), "messages[0].extra"),
    (
        part(type="text", text="x", source={"type": "base64", "data": "AAAA"}),
        "messages[0].content[1].source",
    ),
    (message(images=["AAAA"]), "messages[0].images"),
    (message(attachments=[{"url": "x"}]), "messages[0].attachments"),
    (part(type="text", text="x", image_url={"url": "data:,x"}), "messages[0].content[1].image_url"),
    (
        part(type="input_audio", input_audio={"data": "", "audio_url": "x"}),
        "messages[0].content[1].input_audio.audio_url",
    ),
]


@pytest.mark.parametrize(("fields", "param"), CONTENT, ids=[param for _, param in CONTENT])
def test_unknown_content_field_is_refused_in_chat(
    gateway: ServedGateway, fields: dict[str, object], param: str
) -> None:
    assert refusal(chat(gateway, **fields))["param"] == param
    assert not gateway.client.submitted


@pytest.mark.parametrize("empty", [None, "", [], {}, [""], [{}]])
def test_empty_content_field_is_ignored(gateway: ServedGateway, empty: object) -> None:
    names = ("images", "audios", "ref_audio", "prompt", "files")
    fields = {**dict.fromkeys(names, empty), **message(images=empty, attachments=empty)}
    assert chat(gateway, **fields).status_code == 200


def test_setting_of_another_server_without_effect_is_ignored_and_reported(
    gateway: ServedGateway,
) -> None:
    """Settings that only other servers and clients know are ignored and reported if their values
    have no content.
    """
    settings: dict[str, object] = {
        **{
            "use_audio_in_video": True,
            "client_reference_id": "c",
            "background_tasks": {"title_generation": True},
        },
        "model_item": {"meta": {"profile_image_url": "data:image/png;base64,A"}},
    }
    neutral = {
        "images": {"enabled": False},
        "file_search": {"enabled": False},
        "features": {"image_generation": False},
    }
    answer = chat(gateway, **settings, **neutral, **message(name="me", file_name=""))
    assert answer.status_code == 200 and answer.headers["x-fleet-ignored"] == ", ".join(
        sorted(settings)
    )


@pytest.mark.parametrize(
    "name",
    [
        "ref_audio",
        "ref_text",
        "references",
        "speaker_embedding",
        "audio_prompt",
        "prompt_text",
        "text",
    ]
    + ["reference_voice", "clone_voice", "voice_clone"],
)
def test_unknown_content_field_is_refused_in_speech(gateway: ServedGateway, name: str) -> None:
    said = {"model": "omni", "input": "hello", "response_format": "pcm"}
    assert refusal(gateway.http.post(SPEECH, json={**said, name: ["x"]}))["param"] == name
    assert gateway.http.post(SPEECH, json={**said, name: None}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        (
            part(type="image_url", image_url={"url": "data:image/png;base64,AAAA"}),
            "messages[0].content[1]",
            "cannot read images",
        ),
        (part(type="input_image", image_url="x"), "messages[0].content[1]", "cannot read images"),
        (
            part(type="video_url", video_url={"url": "x"}),
            "messages[0].content[1]",
            "cannot read video",
        ),
        (part(type="video", video=["x"]), "messages[0].content[1]", "cannot read video"),
        (part(type="file", file={"file_id": "x"}), "messages[0].content[1]", "cannot read files"),
        (part(type="audio", audio="x"), "messages[0].content[1]", "type input_audio"),
        (
            part(type="audio_url", audio_url={"url": "http://x/a.wav"}),
            "messages[0].content[1].audio_url.url",
            "the audio itself",
        ),
        (part(type="output_text", text="x"), "messages[0].content[1]", "type text"),
        (part(type="tool_result", content="x"), "messages[0].content[1]", "role tool"),
        (
            {"messages": [*HELLO, {"role": "tool", "content": "4", "tool_call_id": "1"}]},
            "messages[1].role",
            "start a new chat",
        ),
        (
            {"messages": [*HELLO, {"role": "function", "content": "4", "name": "f"}]},
            "messages[1].role",
            "role tool",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "start a new chat",
        ),
        (
            message(role="assistant", function_call={"name": "f"}),
            "messages[0].function_call",
            "tool_calls",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"best_of": 2}, "best_of", "with n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "in the client"),
        ({"logits_bias": {"5": 1}}, "logits_bias", "logit_bias in a chat"),
    ],
)
def test_unserved_feature_is_refused_with_advice(
    gateway: ServedGateway, fields: dict[str, object], param: str, advice: str
) -> None:
    error = refusal(chat(gateway, **fields))
    assert error["param"] == param and advice in error["message"]
    assert "leave it out" not in error["message"] and not gateway.client.submitted


@pytest.mark.parametrize("fields", [message(role="robot"), part(type="smell", smell="x")])
def test_unknown_role_or_part_is_refused_with_valid_ones(
    gateway: ServedGateway, fields: dict[str, object]
) -> None:
    answer = chat(gateway, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "invalid_value"
    assert "'user'" in error["message"] or "'input_audio'" in error["message"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "auto"}},
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": TOOLS},
            },
        },
    ],
)
def test_optional_tools_are_ignored_and_reported(
    gateway: ServedGateway, fields: dict[str, object]
) -> None:
    answer = chat(gateway, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-fleet-ignored"] == ", ".join(sorted(fields.keys() - {"tool_choice"}))


def test_empty_tools_are_not_reported(gateway: ServedGateway) -> None:
    assert "x-fleet-ignored" not in chat(gateway, tools=[], functions=[], tool_choice=None).headers


@pytest.mark.parametrize("name", ["tool_choice", "function_call"])
@pytest.mark.parametrize("empty", [None, "", {}, []])
def test_empty_tool_choice_is_absent(gateway: ServedGateway, name: str, empty: object) -> None:
    answer = chat(gateway, tools=TOOLS, **{name: empty})
    assert answer.status_code == 200 and answer.headers["x-fleet-ignored"] == "tools"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "any",
        {"type": "function", "function": {"name": "f"}},
        {"type": "custom", "custom": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}},
        5,
    ],
)
def test_required_tool_is_refused(gateway: ServedGateway, choice: object) -> None:
    error = refusal(chat(gateway, tools=TOOLS, tool_choice=choice))
    assert error["param"] == "tool_choice" and "calls no tools" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/v1/responses/resp_1/cancel", "close the connection"),
        ("GET", "/v1/responses/resp_1/nothing", "input_items of a stored response"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("POST", "/v1/messages", "/v1/chat/completions"),
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/realtime/calls/rtc_1/accept", "over WebRTC"),
        ("POST", "/v1/realtime/sessions", "/v1/realtime/client_secrets"),
        ("POST", "/v1/audio/translations", "/v1/audio/transcriptions"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "/v1/chat/completions"),
        ("GET", "/api/tags", "Ollama"),
        ("POST", "/api/chat", "Ollama"),
        ("POST", "//api//chat", "Ollama"),
        ("POST", "/v1//messages", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages", "not stored under their ids"),
    ],
)
def test_unserved_route_is_refused_with_alternative(
    gateway: ServedGateway, method: str, path: str, advice: str
) -> None:
    assert advice in refusal(gateway.http.request(method, gateway.url + path))["message"]


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("GET", "/v1/nothing", "/v1/chat/completions"),
        ("POST", "/v1/audio/nothing", "GET /openapi.json"),
        ("POST", "/chat/completions", "for /v1/chat/completions"),
        ("GET", "/models", "for /v1/models"),
        ("POST", "/v1/v1/chat/completions", "/v1 twice"),
        ("GET", "/v1", "the base URL of the API"),
        ("GET", "/v1/", "the base URL of the API"),
        *(
            ("POST", path, "base URL be http://HOST:PORT/v1, for /v1/chat/completions")
            for path in (
                "/openai/v1/chat/completions",
                "/api/v1/chat/completions",
                "/openai/deployments/x/chat/completions",
                "/v1/chat/completions/chat/completions",
                "/api/chat/completions",
                "/any/where/chat/completions",
                "//v1//v2/chat/completions",
            )
        ),
        ("GET", "/v1/chat/completions/models", "base URL be http://HOST:PORT/v1, for /v1/models"),
        ("GET", "/openai/v1/models", "base URL be http://HOST:PORT/v1, for /v1/models"),
        (
            "POST",
            "/openai/deployments/x/embeddings",
            "base URL be http://HOST:PORT/v1, for /v1/embeddings",
        ),
        ("GET", "/api/models", "base URL be http://HOST:PORT/v1, for /v1/models"),
        ("GET", "//models", "base URL be http://HOST:PORT/v1, for /v1/models"),
        *(
            (
                "POST",
                path,
                "ends in a slash; let it be http://HOST:PORT/v1, for /v1/chat/completions",
            )
            for path in (
                "/v1//chat/completions",
                "//v1/chat/completions",
                "//v1//chat//completions",
            )
        ),
        ("GET", "/v1//models", "ends in a slash; let it be http://HOST:PORT/v1, for /v1/models"),
    ],
)
def test_unknown_route_has_advice_on_base_url(
    gateway: ServedGateway, method: str, path: str, advice: str
) -> None:
    answer = gateway.http.request(method, gateway.url + path)
    error = answer.json()["error"]
    assert answer.status_code == 404 and error["code"] == "not_found" and advice in error["message"]


@pytest.mark.parametrize(
    "path", ["/nothing", "/static/files/x", "/api/config", "/v1beta/models/x:generateContent"]
)
def test_path_outside_api_has_no_advice(gateway: ServedGateway, path: str) -> None:
    assert gateway.http.get(path).json()["error"]["message"] == f"GET {path}: no such route"


def test_wrong_method_is_refused_with_allowed_one(gateway: ServedGateway) -> None:
    answer = gateway.http.get(CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"] == {
        "message": "GET /v1/chat/completions: this route takes POST only",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


def test_too_long_prompt_is_refused_with_openai_wording(gateway: ServedGateway) -> None:
    for text in ("word " * 3_000, "x" * 100_000):
        with pytest.raises(
            openai.BadRequestError, match=r"maximum context length is 2000 tokens"
        ) as refused:
            gateway.create(messages=[{"role": "user", "content": text}])
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"


LONG = "y" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"model": LONG},
        {"modalities": ["text", "audio"], "audio": {"voice": LONG}},
        {"modalities": ["text", "audio"], "audio": {"voice": {"id": LONG}}},
        part(type=LONG),
        {"fleet": {LONG: {}}},
        {"fleet": {LONG: 1}},
        {"fleet": {"talker": {LONG: 1}}},
        {f"image_{LONG}": "data:image/png;base64,AAAA"},
    ],
    ids=[
        "model",
        "voice",
        "voice id",
        "part",
        "stage",
        "stage type",
        "stage field",
        "unknown field",
    ],
)
def test_long_name_is_truncated_in_refusal(
    gateway: ServedGateway, fields: dict[str, object]
) -> None:
    answer = chat(gateway, **fields)
    message = answer.json()["error"]["message"]
    assert answer.status_code in (400, 404) and len(answer.content) < 1_000
    assert "yyyy" in message and "y" * 65 not in answer.text


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1/", "/v1/fleet/requests/", "/v1/fleet/jobs/", "/v1/nothing/", "/"]
)
def test_long_path_is_truncated_in_refusal(gateway: ServedGateway, path: str) -> None:
    answer = gateway.http.get(path + LONG[:15_000])
    assert answer.status_code == 404 and len(answer.content) < 1_000
