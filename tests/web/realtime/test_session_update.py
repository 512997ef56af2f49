"""A `session.update` with refused fields: the rest is applied, each is named, and no audio is read
in another format.
"""

import base64
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import SocketClient, opened
from tests.web.realtime.speech_samples import QUESTION, question, silence, speech
from web.realtime.protocol.client_events import SessionUpdate, parse_event
from web.realtime.protocol.session_update import read_patch
from web.realtime.protocol.settings import Settings, merge_settings

PCM = {"type": "audio/pcm", "rate": 24_000}
PCMU = {"type": "audio/pcmu"}
UNSERVED = "unsupported_value"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
LONG = Script(num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01)


def input_format(form: object) -> dict[str, object]:
    return {"audio": {"input": {"format": form}}}


def output_format(form: object) -> dict[str, object]:
    return {"audio": {"output": {"format": form}}}


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
        ({"type": "transcription"}, [], ["type"]),
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


REFUSED_FORMATS: dict[str, list[object]] = {
    "format": [PCMU, {"type": "audio/pcma"}, "pcm16", "g711_ulaw", ["audio/pcm"]],
    "format.type": [{"type": "audio/opus"}, {"type": 5}],
    "format.rate": [{"type": "audio/pcm", "rate": 4_000}, {"type": "audio/pcm", "rate": "24000"}],
}


@pytest.mark.parametrize(
    ("field", "form"), [(field, form) for field, forms in REFUSED_FORMATS.items() for form in forms]
)
async def test_audio_is_not_read_while_its_format_is_refused(
    client: SocketClient, gateway: ServedGateway, field: str, form: object
) -> None:
    """G.711 read as PCM16 would be noise, classified as speech or as silence."""
    spoken = question()
    errors, now = await client.update(**input_format(form))
    assert [error["param"] for error in errors] == [f"session.audio.input.{field}"]
    assert errors[0]["code"] == (
        UNSERVED if form in ({"type": "audio/pcma"}, PCMU) else "invalid_value"
    )
    assert now["audio"]["input"]["format"] is None
    await client.append(spoken)
    await client.send("input_audio_buffer.commit", event_id="commit")
    first, commit = await client.events_before_refusal()
    assert (
        first["error"]["param"] == "audio"
        and "session.audio.input.format" in first["error"]["message"]
    )
    assert (
        commit["error"]["code"] == "input_audio_buffer_commit_empty"
        and commit["error"]["event_id"] == "commit"
    )
    assert "session.audio.input.format" in commit["error"]["message"]
    content = [{"type": "input_audio", "audio": base64.b64encode(spoken).decode()}]
    await client.send(
        "conversation.item.create", item={"type": "message", "role": "user", "content": content}
    )
    (item,) = await client.events_before_refusal("after the item")
    assert item["error"]["param"] == "item.content[0].audio"
    assert not gateway.client.submitted
    errors, now = await client.update(**input_format(PCM))
    assert not errors and now["audio"]["input"]["format"] == PCM
    await client.append(spoken)
    await client.completed()


async def test_refused_audio_is_named_again_after_the_next_refused_format(
    client: SocketClient,
) -> None:
    for marker in ("first", "second"):
        await client.update(**input_format(PCMU))
        await client.append(silence(1000))
        assert len(await client.events_before_refusal(marker)) == 1
    errors, now = await client.update(instructions="Be brief.")
    assert not errors and now["audio"]["input"]["format"] is None, (
        "another update does not bring a format back"
    )


async def test_binary_audio_is_not_read_while_its_format_is_refused(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.update(**input_format(PCMU))
    await page.speak(question())
    (error,) = await page.events_before_refusal()
    assert error["error"]["param"] == "audio" and not gateway.client.submitted


async def test_turn_ends_unanswered_when_its_format_is_refused(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """Later audio does not continue the turn."""
    spoken = speech(QUESTION)
    await page.speak(silence(300) + spoken[: len(spoken) // 2])
    started = await page.until("input_audio_buffer.speech_started")
    await page.until("fleet.state", state="hearing")
    await page.send("session.update", session=input_format(PCMU))
    stopped = await page.until("input_audio_buffer.speech_stopped")
    assert (
        stopped["item_id"] == started["item_id"]
        and stopped["audio_end_ms"] > started["audio_start_ms"]
    )
    await page.until("fleet.state", state="listening")
    assert not gateway.client.submitted
    await page.send("session.update", session=input_format(PCM))
    await page.speak(silence(100) + spoken + silence(800))
    assert (await page.until("input_audio_buffer.committed"))["item_id"] != started["item_id"]
    await page.until("response.done")
    (spec, _), *_ = gateway.client.submitted
    assert spec.audio[0].num_samples < (len(spoken) // 48 + 1000) * 16


async def test_uncommitted_audio_is_dropped_when_its_format_is_refused(
    client: SocketClient,
) -> None:
    spoken = speech(QUESTION)
    await client.detect_turns(None)
    await client.append(spoken)
    await client.update(**input_format(PCMU))
    await client.update(**input_format(PCM))
    await client.send("input_audio_buffer.commit")
    (error,) = await client.events_before_refusal()
    assert error["error"]["code"] == "input_audio_buffer_commit_empty"


@pytest.mark.parametrize("event_id", [5, "x" * 600, ["e"]])
async def test_update_with_an_invalid_event_id_is_answered_with_an_error_that_names_it(
    client: SocketClient, event_id: object
) -> None:
    await client.send("session.update", event_id=event_id, session={"instructions": "Be brief."})
    (answer,) = await client.events_before_refusal()
    assert answer["error"]["param"] == "event_id" and answer["error"]["event_id"] is None


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("input_audio_format", "g711_ulaw", "input"),
        ("output_audio_format", "g711_alaw", "output"),
        ("input_audio_format", "pcm16", None),
        ("output_audio_format", "pcm16", None),
    ],
)
async def test_format_under_its_beta_name_counts_as_one(
    client: SocketClient, field: str, value: str, refused: str | None
) -> None:
    errors, now = await client.update(**{field: value})
    assert [(error["param"], error["code"]) for error in errors] == [(f"session.{field}", UNSERVED)]
    formats = {side: now["audio"][side]["format"] for side in ("input", "output")}
    assert formats == {side: None if side == refused else PCM for side in ("input", "output")}


@pytest.mark.parametrize("side", ["input", "output"])
async def test_null_under_a_beta_name_leaves_the_format_as_it_is(
    client: SocketClient, side: str
) -> None:
    """Clients that write every field of the beta dialect send null for those without a value."""
    errors, now = await client.update(**{f"{side}_audio_format": None, "modalities": None})
    assert not errors and now["audio"][side]["format"] == PCM


@pytest.mark.parametrize("side", ["input", "output"])
async def test_format_beside_its_beta_name_ends_an_earlier_refusal(
    client: SocketClient, side: str
) -> None:
    beta = f"{side}_audio_format"
    await client.update(audio={side: {"format": PCMU}})
    _, now = await client.update(**{beta: "pcm16"})
    assert now["audio"][side]["format"] is None, "the beta name sets no format"
    errors, now = await client.update(audio={side: {"format": PCM}}, **{beta: "pcm16"})
    assert [error["param"] for error in errors] == [f"session.{beta}"] and now["audio"][side][
        "format"
    ] == PCM


@pytest.mark.parametrize(
    ("form", "field", "code"),
    [
        (PCMU, "format", UNSERVED),
        ({"type": "audio/pcm", "rate": 16_000}, "format.rate", UNSERVED),
        ("pcm16", "format", "invalid_value"),
    ],
)
async def test_no_audio_is_sent_while_its_format_is_refused(
    client: SocketClient, gateway: ServedGateway, form: object, field: str, code: str
) -> None:
    errors, now = await client.update(**output_format(form))
    assert [(error["param"], error["code"]) for error in errors] == [
        (f"session.audio.output.{field}", code)
    ]
    assert now["audio"]["output"]["format"] is None
    await client.ask("hello")
    error = await client.error()
    assert error["param"] == "session.audio.output.format" and "text" in error["message"]
    await client.append(question())
    assert (await client.error())["param"] == "session.audio.output.format"
    assert not gateway.client.submitted
    await client.complete(output_modalities=["text"])
    await client.complete(**output_format(PCM))
    await client.update(**output_format(None))
    await client.complete("and now?")
    assert "response.output_audio.delta" in client.kinds()


async def test_response_ends_when_its_format_is_refused(
    client: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = LONG
    await client.ask("count")
    await client.until("response.output_audio.delta")
    begin = len(client.events)
    await client.update(**output_format(PCMU))
    kinds = [event["type"] for event in client.events[begin:]]
    after = await client.events_before_refusal()
    refused = kinds.index("error")
    assert "response.output_audio.delta" not in kinds[refused:] and not after
    assert kinds[refused:].count("response.done") == 1 and kinds[-1] == "session.updated"


async def test_refused_override_refuses_its_response_only(client: SocketClient) -> None:
    error = await client.refusal_of(
        "response.create", response={"instructions": "hi", **output_format(PCMU)}
    )
    assert error["param"] == "response.audio.output.format"
    await client.complete("hello")


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
                assert not errors and len(now["warnings"]) == 1 and now["tools"] == []
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
    ("kind", "fields", "param"),
    [
        ("response.create", {"response": {"tool_choice": "required"}}, "response.tool_choice"),
        ("response.create", {"response": {"prompt": {"id": "pmpt_1"}}}, "response.prompt"),
        (
            "response.create",
            {"response": {"audio": {"output": {"format": PCMU}}}},
            "response.audio.output.format",
        ),
        (
            "conversation.item.create",
            {
                "item": {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": "data:,"}],
                }
            },
            "item.content[0].type",
        ),
        ("output_audio_buffer.clear", {}, "type"),
    ],
)
async def test_event_with_a_field_that_is_not_served_has_the_code_of_chat(
    client: SocketClient, gateway: ServedGateway, kind: str, fields: dict[str, object], param: str
) -> None:
    error = await client.refusal_of(kind, **fields)
    assert (error["code"], error["param"]) == (UNSERVED, param) and not gateway.client.submitted


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
    """If it were ignored, the client would play audio in another format, or wait for text."""
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
async def test_tool_item_is_refused_naming_the_served_items(
    client: SocketClient, kind: str
) -> None:
    error = await client.refusal_of(
        "conversation.item.create", item={"type": kind, "call_id": "c", "output": "3"}
    )
    assert (error["code"], error["param"]) == (UNSERVED, "item.type")
    assert (
        kind in error["message"] and "message" in error["message"] and "tools" in error["message"]
    )


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
    """The fields left after the refusals are accepted, and a format is either the requested one or
    refused.
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
