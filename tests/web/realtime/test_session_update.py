"""A `session.update` with refused fields: each refused field is named, and the other fields are
applied.
"""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.realtime.socket_client import SocketClient, opened
from web.realtime.protocol.client_events import SessionUpdate, parse_event
from web.realtime.protocol.session_update import read_patch
from web.realtime.protocol.settings import Settings, merge_settings

PCM = {"type": "audio/pcm", "rate": 24_000}
UNSERVED = "unsupported_value"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]


@pytest.mark.parametrize(
    ("session", "invalid", "unserved"),
    [
        ({"audio": {"output": {"voice": "unknown"}}}, ["audio.output.voice"], []),
        ({"audio": {"output": {"voice": 5}}}, ["audio.output.voice"], []),
        ({"audio": {"output": {"voice": {"id": 5}}}}, ["audio.output.voice"], []),
        ({"audio": {"output": {"speed": 1.2}}}, [], ["audio.output.speed"]),
        ({"audio": {"output": {"speed": "fast"}}}, ["audio.output.speed"], []),
        (
            {"audio": {"input": {"turn_detection": {"type": "magic"}}}},
            ["audio.input.turn_detection"],
            [],
        ),
        (
            {"audio": {"input": {"turn_detection": {"threshold": 0.6}}}},
            ["audio.input.turn_detection.type"],
            [],
        ),
        ({"audio": 5}, ["audio"], []),
        ({"prompt": {"id": "pmpt_1"}}, [], ["prompt"]),
        ({"truncation": {"type": "retention_ratio", "retention_ratio": 0.5}}, [], ["truncation"]),
        ({"tool_choice": "required", "tools": TOOLS}, [], ["tool_choice"]),
        ({"tool_choice": {"type": "function", "name": "weather"}}, [], ["tool_choice"]),
        ({"tools": "weather"}, ["tools"], []),
        ({"output_modalities": []}, ["output_modalities"], []),
        ({"max_output_tokens": 0}, ["max_output_tokens"], []),
        ({"modalities": ["text"], "turn_detection": None}, [], ["modalities", "turn_detection"]),
        (
            {
                "type": 1,
                "truncation": 5,
                "prompt": {},
                "audio": {"output": {"speed": 9, "voice": "unknown"}},
                "modalities": [],
            },
            ["audio.output.speed", "audio.output.voice", "truncation", "type"],
            ["modalities", "prompt"],
        ),
    ],
)
async def test_update_applies_all_but_the_refused_fields(
    client: SocketClient, session: dict[str, object], invalid: list[str], unserved: list[str]
) -> None:
    before = client.events[0]["session"]
    errors, now = await client.update(
        **{"type": "realtime", "instructions": "Be brief.", **session}
    )
    codes = {**dict.fromkeys(invalid, "invalid_value"), **dict.fromkeys(unserved, UNSERVED)}
    assert {
        error["param"].removeprefix("session."): error["code"] for error in errors
    } == codes and len(errors) == len(codes)
    assert all(error["message"].startswith(error["param"]) for error in errors), errors
    assert now["instructions"] == "Be brief." and now["audio"] == before["audio"]
    await client.complete("hello")


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({"audio": 5}, "session.audio: this field must be an object"),
        ({"audio": {"input": [PCM]}}, "session.audio.input: this field must be an object"),
        (
            {"audio": {"input": {"format": "pcm16"}}},
            "session.audio.input.format: this field must be an object",
        ),
        (
            {"audio": {"input": {"turn_detection": "server_vad"}}},
            "session.audio.input.turn_detection: this field must be an object",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": None}}}},
            "session.audio.input.turn_detection: no such type; use server_vad or semantic_vad",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 5}}}},
            "session.audio.input.turn_detection.threshold: Input should be less than or equal to 1",
        ),
        ({"tools": {"weather": 1}}, "session.tools: this field must be an array"),
        ({"output_modalities": "audio"}, "session.output_modalities: this field must be an array"),
        (
            {"max_output_tokens": {"int": 5}},
            "session.max_output_tokens: Input should be a valid integer",
        ),
    ],
)
async def test_refused_field_of_an_update_is_named_once_in_terms_of_json(
    client: SocketClient, session: dict[str, object], message: str
) -> None:
    errors, _ = await client.update(**session)
    assert [error["message"] for error in errors] == [message]


async def test_update_applies_fields_beside_a_refused_nested_field(client: SocketClient) -> None:
    detection = {
        "type": "server_vad",
        "threshold": 2,
        "silence_duration_ms": 300,
        "create_response": "yes",
    }
    audio_input = {
        "turn_detection": detection,
        "transcription": {"model": "whisper-1", "language": 5},
    }
    errors, now = await client.update(
        output_modalities=["text"],
        audio={"input": audio_input, "output": {"voice": "marin", "speed": 2}},
    )
    assert sorted(error["param"].rpartition(".")[2] for error in errors) == [
        "create_response",
        "language",
        "speed",
        "threshold",
    ]
    assert now["output_modalities"] == ["text"] and now["audio"]["output"]["voice"] == "marin"
    took = now["audio"]["input"]["turn_detection"]
    assert (took["silence_duration_ms"], took["threshold"], took["create_response"]) == (
        300,
        0.5,
        True,
    )
    assert now["audio"]["input"]["transcription"]["model"] == "whisper-1"


async def test_update_that_the_model_cannot_serve_changes_nothing(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        async with opened(gateway, "/v1/realtime") as page:
            errors, now = await page.update(
                output_modalities=["audio"], instructions="Be brief.", truncation="disabled"
            )
    assert [error["param"] for error in errors] == ["session.output_modalities"]
    assert (
        now["output_modalities"] == ["text"]
        and now["instructions"] == "Be brief."
        and now["truncation"] == "disabled"
    )


async def test_instructions_with_a_control_token_are_refused_alone(client: SocketClient) -> None:
    await client.update(instructions="Be brief.")
    errors, now = await client.update(instructions="<|im_end|>", output_modalities=["text"])
    assert [error["param"] for error in errors] == ["session.instructions"]
    assert now["instructions"] == "Be brief." and now["output_modalities"] == ["text"]


@pytest.mark.parametrize("event", [{"session": 5}, {"session": None}, {"session": []}, {}])
async def test_update_without_an_object_changes_nothing(
    client: SocketClient, event: dict[str, object]
) -> None:
    await client.send("session.update", event_id="e", **event)
    (answer,) = await client.events_before_refusal()
    assert answer["error"]["param"] == "session" and answer["error"]["event_id"] == "e"


@pytest.mark.parametrize("event_id", [5, "x" * 600, ["e"]])
async def test_update_with_an_invalid_event_id_is_answered_with_an_error_that_names_it(
    client: SocketClient, event_id: object
) -> None:
    await client.send("session.update", event_id=event_id, session={"instructions": "Be brief."})
    (answer,) = await client.events_before_refusal()
    assert answer["error"]["param"] == "event_id" and answer["error"]["event_id"] is None


@pytest.mark.parametrize(
    "choice", [{}, *({"tool_choice": given} for given in ("auto", "none", None, "", {}))]
)
async def test_optional_tools_are_ignored_with_a_warning(
    gateway: ServedGateway, choice: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with opened(gateway, "/v1/realtime") as page:
            for _ in range(3):
                errors, now = await page.update(type="realtime", tools=TOOLS, **choice)
                assert not errors and now["tools"] == []
                (warning,) = now["warnings"]
                assert warning.startswith("session.tools: ignored: this model calls no tools")
            await page.ask("hello", tools=TOOLS, **choice)
            done = await page.done()
            assert done["status"] == "completed" and len(done["warnings"]) == 1
            _, now = await page.update(tools=[])
            assert "warnings" not in now
    lines = [
        record.getMessage() for record in caplog.records if "tools: ignored" in record.getMessage()
    ]
    assert len(lines) == 2 and "session.tools" in lines[0] and "response.tools" in lines[1]


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "auto"),
    ],
)
async def test_tool_choice_in_an_object_is_accepted_as_in_chat(
    client: SocketClient, choice: object, kept: str
) -> None:
    errors, now = await client.update(tool_choice=choice)
    assert not errors and now["tool_choice"] == kept
    await client.complete("hello", tool_choice=choice)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}, "any"])
async def test_response_that_requires_a_tool_is_refused_by_name(
    client: SocketClient, gateway: ServedGateway, choice: object
) -> None:
    await client.ask("hello", tools=TOOLS, tool_choice=choice)
    error = await client.error()
    assert (
        error["param"] == "response.tool_choice"
        and "auto" in error["message"]
        and not gateway.client.submitted
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_audio_format", "g711_ulaw"),
        ("output_audio_format", {"type": "audio/pcm"}),
        ("modalities", ["text"]),
        ("voice", "alloy"),
        ("max_response_output_tokens", 5),
    ],
)
async def test_response_with_a_beta_field_is_refused_by_name(
    client: SocketClient, gateway: ServedGateway, field: str, value: object
) -> None:
    """A response with a field of the beta dialect is refused by the field's name; if it were
    ignored, the client would play audio in another format, or wait for text.
    """
    await client.ask("hello", **{field: value})
    error = await client.error()
    assert (error["code"], error["param"]) == ("unsupported_value", f"response.{field}")
    assert (
        "beta" in error["message"]
        and "use response." in error["message"]
        and not gateway.client.submitted
    )
    await client.complete(modalities=None, voice=None, output_audio_format="pcm16")


@pytest.mark.parametrize("kind", ["function_call_output", "function_call", "mcp_call"])
async def test_tool_item_is_refused_by_a_model_that_calls_no_functions(
    client: SocketClient, kind: str
) -> None:
    error = await client.refusal_of(
        "conversation.item.create", item={"type": kind, "call_id": "c", "output": "3"}
    )
    assert (error["code"], error["param"]) == (UNSERVED, "item.type")
    assert kind in error["message"] and "tools" in error["message"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 70_000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        [
            "x",
            "audio/pcm",
            "audio/pcmu",
            "server_vad",
            "semantic_vad",
            "auto",
            "none",
            "marin",
            "inf",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "rate",
                    "threshold",
                    "model",
                    "id",
                    "voice",
                    "speed",
                    "server_vad",
                    "VoiceId",
                    "format",
                ]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
AUDIO_INPUT = st.dictionaries(
    st.sampled_from(["format", "transcription", "noise_reduction", "turn_detection"]),
    JSON,
    max_size=4,
)
SPOKEN = st.dictionaries(st.sampled_from(["format", "voice", "speed"]), JSON, max_size=3)
SESSION = st.fixed_dictionaries(
    {"instructions": st.just("Be brief.")},
    optional={
        "audio": st.fixed_dictionaries(
            {}, optional={"input": AUDIO_INPUT | JSON, "output": SPOKEN | JSON}
        )
        | JSON,
        **dict.fromkeys(
            (
                "type",
                "tools",
                "tool_choice",
                "prompt",
                "truncation",
                "output_modalities",
                "modalities",
            ),
            JSON,
        ),
    },
)


@given(SESSION)
def test_any_update_applies_its_valid_fields_and_names_the_others(
    session: dict[str, object],
) -> None:
    """Any update applies its valid fields and names the others: the fields that remain after the
    refusals are accepted, and a format is either the requested one or refused.
    """
    event = parse_event(json.dumps({"type": "session.update", "session": session}))
    assert isinstance(event, SessionUpdate)
    patch, refused = read_patch(event.session)
    assert patch.instructions == "Be brief." and all(
        error.param and error.message for error in refused
    )
    again, none_left = read_patch(patch.model_dump(exclude_unset=True))
    assert not none_left and again == patch
    changed, unserved = merge_settings(Settings(), patch)
    assert changed.instructions == "Be brief." and all(error.param for error in unserved)
