"""Fields of session settings, events and items: each field is served, refused by its name, or
ignored because it cannot change the answer.
"""

from collections.abc import AsyncIterator

import pytest

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.realtime.socket_client import SocketClient, message, opened
from tests.web.realtime.speech_samples import question

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
NEAR = {"type": "near_field"}
UNSERVED = "unsupported_value"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"include": ["item.input_audio_transcription.logprobs"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temperature": 0.8}, "temperature"),
        ({"guided_choice": ["yes"]}, "guided_choice"),
        ({"any_new_setting": 1}, "any_new_setting"),
        ({"voice": "alloy"}, "voice"),
        ({"input_audio_transcription": {"model": "whisper-1"}}, "input_audio_transcription"),
        ({"max_response_output_tokens": 5}, "max_response_output_tokens"),
        ({"audio": {"input": {"noise_reduction": NEAR}}}, "audio.input.noise_reduction"),
        ({"audio": {"input": {"any_new_setting": 1}}}, "audio.input.any_new_setting"),
        (
            {"audio": {"input": {"transcription": {"prompt": "names"}}}},
            "audio.input.transcription.prompt",
        ),
        (
            {"audio": {"input": {"transcription": {"keywords": ["a"]}}}},
            "audio.input.transcription.keywords",
        ),
        (
            {"audio": {"input": {"transcription": {"language": "tlh"}}}},
            "audio.input.transcription.language",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "x": 1}}}},
            "audio.input.turn_detection.x",
        ),
        ({"audio": {"output": {"pitch": 2}}}, "audio.output.pitch"),
    ],
)
async def test_setting_without_effect_is_refused_alone(
    client: SocketClient, session: dict[str, object], param: str
) -> None:
    errors, now = await client.update(
        **{"type": "realtime", "instructions": "Be brief.", **session}
    )
    assert [(error["param"], error["code"]) for error in errors] == [(f"session.{param}", UNSERVED)]
    assert (
        errors[0]["message"].startswith(f"session.{param}: ") and now["instructions"] == "Be brief."
    )


@pytest.mark.parametrize("where", ["model", "audio.input.transcription.model"])
async def test_unknown_model_of_a_setting_is_refused_by_name(
    client: SocketClient, where: str
) -> None:
    fields: dict[str, object] = {"model": "gpt-9"}
    if where != "model":
        fields = {"audio": {"input": {"transcription": fields}}}
    errors, _ = await client.update(**fields)
    assert [(error["param"], error["code"]) for error in errors] == [
        (f"session.{where}", "model_not_found")
    ]


async def test_harmless_settings_are_accepted_without_a_word(client: SocketClient) -> None:
    audio = {
        "input": {
            "noise_reduction": None,
            "transcription": {"model": "gpt-4o-mini-transcribe", "language": "en"},
        }
    }
    labels = {
        "id": "sess_1",
        "object": "realtime.session",
        "expires_at": 0,
        "tracing": {"group_id": "g"},
    }
    errors, now = await client.update(
        type="realtime",
        model="gpt-realtime",
        parallel_tool_calls=True,
        include=None,
        audio=audio,
        prompt=None,
        **labels,
    )
    assert not errors and "warnings" not in now and now["tracing"] is None
    assert now["audio"]["input"]["transcription"]["language"] == "en"


async def test_language_of_the_transcription_is_in_its_prompt(
    client: SocketClient, gateway: ServedGateway
) -> None:
    await client.update(
        audio={"input": {"transcription": {"model": "whisper-1", "language": "de"}}}
    )
    await client.append(question())
    await client.until("conversation.item.input_audio_transcription.completed")
    prompts = [
        gateway.client.tokenizer.decode(list(spec.prompt_ids))
        for spec, _ in gateway.client.submitted
    ]
    assert any("Transcribe the German audio" in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("response.create", {"response": {"reasoning": {"effort": "low"}}}, "response.reasoning"),
        (
            "response.create",
            {"response": {"guided_json": {"type": "object"}}},
            "response.guided_json",
        ),
        ("response.create", {"response": {"any_new_setting": 1}}, "response.any_new_setting"),
        (
            "response.create",
            {"response": {"audio": {"output": {"speed": 1.2}}}},
            "response.audio.output.speed",
        ),
        (
            "response.create",
            {"response": {"input": [{**message("x"), "weight": 1}]}},
            "response.input[0].weight",
        ),
        ("response.create", {"response": {"prompt": {"id": "pmpt_1"}}}, "response.prompt"),
        (
            "response.create",
            {"response": {"audio": {"output": {"format": {"type": "audio/pcmu", "rate": 16_000}}}}},
            "response.audio.output.format.rate",
        ),
        (
            "conversation.item.create",
            {"item": message("", kind="input_image")},
            "item.content[0].type",
        ),
        ("output_audio_buffer.clear", {}, "type"),
        ("response.create", {"any_new_setting": 1}, "any_new_setting"),
        ("conversation.item.create", {"item": message("x"), "after": "a"}, "after"),
        ("input_audio_buffer.append", {"audio": "AAAA", "rate": 8_000}, "rate"),
        ("session.update", {"session": {}, "any_new_setting": 1}, "any_new_setting"),
    ],
)
async def test_field_of_an_event_without_effect_is_refused_by_name(
    client: SocketClient, gateway: ServedGateway, kind: str, fields: dict[str, object], param: str
) -> None:
    error = await client.refusal_of(kind, **fields)
    assert (error["code"], error["param"]) == (UNSERVED, param) and not gateway.client.submitted


async def test_labels_of_an_item_are_ignored(client: SocketClient) -> None:
    item = message("hello", object="realtime.item", status="completed", id="mine")
    await client.send("conversation.item.create", item=item)
    await client.complete(parallel_tool_calls=True, reasoning=None)


def test_secret_with_a_setting_without_effect_is_refused(gateway: ServedGateway) -> None:
    for session, param in (
        ({"audio": {"input": {"noise_reduction": NEAR}}}, "session.audio.input.noise_reduction"),
        ({"include": ["item.input_audio_transcription.logprobs"]}, "session.include"),
        (
            {"audio": {"input": {"transcription": {"model": "gpt-9"}}}},
            "session.audio.input.transcription.model",
        ),
    ):
        answer = gateway.http.post(
            "/v1/realtime/client_secrets", json={"session": {"type": "realtime", **session}}
        )
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param
    answer = gateway.http.post("/v1/realtime/client_secrets", json={"any_new_setting": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "any_new_setting"
    given = gateway.http.post(
        "/v1/realtime/client_secrets", json={"session": {"type": "realtime", "tools": TOOLS}}
    ).json()
    assert given["session"]["warnings"][0].startswith("session.tools: ignored")


@pytest.fixture
async def deaf(text_only: Loaded) -> AsyncIterator[SocketClient]:
    """A client of a voice session whose model accepts only text."""
    with serving(text_only) as gateway:
        async with opened(gateway, "/v1/realtime") as client:
            yield client


async def test_session_of_a_text_model_offers_no_audio_input(deaf: SocketClient) -> None:
    heard = deaf.events[0]["session"]["audio"]["input"]
    assert heard == {
        "format": None,
        "transcription": None,
        "noise_reduction": None,
        "turn_detection": None,
    }


async def test_text_model_refuses_settings_of_audio_input_by_name(deaf: SocketClient) -> None:
    given = {
        "format": {"type": "audio/pcm", "rate": 24_000},
        "transcription": {"model": "whisper-1"},
    }
    errors, now = await deaf.update(
        instructions="Be brief.",
        audio={"input": {**given, "turn_detection": {"type": "server_vad"}}},
    )
    fields = ["format", "transcription", "turn_detection"]
    assert [error["param"] for error in errors] == [
        f"session.audio.input.{name}" for name in fields
    ]
    assert all(
        error["code"] == UNSERVED and "takes text only" in error["message"] for error in errors
    )
    assert now["instructions"] == "Be brief." and not any(now["audio"]["input"].values())
    errors, _ = await deaf.update(audio={"input": dict.fromkeys(given)})
    assert not errors


async def test_text_model_refuses_audio_by_name(deaf: SocketClient) -> None:
    error = await deaf.refusal_of("input_audio_buffer.append", audio="AAAA" * 4_000)
    assert (error["code"], error["param"]) == (UNSERVED, "audio") and "takes text only" in error[
        "message"
    ]
    part = {"type": "input_audio", "audio": "AAAA" * 4_000}
    error = await deaf.refusal_of(
        "conversation.item.create", item={"type": "message", "role": "user", "content": [part]}
    )
    assert (error["code"], error["param"]) == (
        UNSERVED,
        "item.content[0].audio",
    ) and "takes text only" in error["message"]
    await deaf.send("input_audio_buffer.commit", event_id="commit")
    assert "takes text only" in (await deaf.error())["message"]
    done = await deaf.complete("hello")
    assert done["status"] == "completed"
