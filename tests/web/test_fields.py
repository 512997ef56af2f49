"""Fields of HTTP requests: each field is served, refused by its name, or ignored because it cannot
change the answer; no field is lost silently.
"""

import json
import logging
from functools import partial
from typing import Any

import httpx
import pytest

from tests.web.conftest import ASK, HELLO, ServedGateway, chat
from tests.web.test_transcription import write_down
from web.gateway.ignored_fields import IgnoredFieldLog

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def speak(gateway: ServedGateway, **fields: object) -> httpx.Response:
    return gateway.http.post(
        SPEECH, json={"model": "omni", "input": "hello", "response_format": "pcm", **fields}
    )


def refused(answer: httpx.Response) -> str:
    """Return the field that a refusal names in its message and its `param`."""
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == "unsupported_value" and error["message"].startswith(
        f"{error['param']}: "
    )
    return error["param"]


CONSTRAINTS: dict[str, object] = {
    **{
        "guided_whitespace_pattern": "a+",
        "grammar": "root ::= x",
        "format": "json",
        "banned_strings": ["a"],
        "logits_bias": {"1": 5},
    },
    **{
        "repeat_penalty": 1.2,
        "length_penalty": 0.5,
        "no_repeat_ngram_size": 2,
        "dry_multiplier": 0.8,
        "xtc_probability": 0.5,
    },
    **{
        "mirostat": 2,
        "typical_p": 0.5,
        "top_a": 0.2,
        "tfs_z": 0.5,
        "best_of": 2,
        "use_beam_search": True,
    },
    **{
        "echo": True,
        "suffix": "x",
        "prompt_logprobs": 0,
        "n_probs": 2,
    },
    **{
        "add_generation_prompt": False,
        "chat_template": "{{x}}",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    **{
        "documents": [{"text": "a"}],
        "web_search_options": {},
        "reasoning_effort": "low",
        "thinking": {"type": "disabled"},
    },
    **{
        "enable_thinking": False,
        "verbosity": "low",
        "max_new_tokens": 5,
        "num_predict": 5,
        "n_predict": 5,
        "max_length": 5,
    },
    **{
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "random_seed": 3,
        "do_sample": False,
        "plugins": ["web"],
    },
    **{
        "moderation": {"model": "m"},
        "truncate_prompt_tokens": 5,
    },
    **{
        "features": {"web_search": True},
        "any_new_setting": 1,
        "options": {"num_ctx": 512},
        "mm_processor_kwargs": {"fps": 2},
    },
}


@pytest.mark.parametrize("name", sorted(CONSTRAINTS))
def test_field_that_constrains_a_chat_is_refused_by_name(gateway: ServedGateway, name: str) -> None:
    assert (
        refused(chat(gateway, **{name: CONSTRAINTS[name]})) == name and not gateway.client.submitted
    )


NEUTRAL: dict[str, object] = {
    **{
        "guided_choice": None,
        "guided_json": {},
        "stop_token_ids": [],
        "bad_words": [],
        "logit_bias": {},
        "repeat_penalty": 1.0,
    },
    **{
        "length_penalty": 1,
        "min_p": 0.0,
        "top_a": 0,
        "typical_p": 1.0,
        "mirostat": 0,
        "n": 1,
        "best_of": 1,
        "logprobs": False,
    },
    **{
        "top_logprobs": 0,
        "echo": False,
        "suffix": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
    },
    **{
        "skip_special_tokens": True,
        "response_format": {"type": "text"},
        "reasoning_effort": None,
        "verbosity": "medium",
    },
    **{
        "any_new_setting": False,
        "another": "",
        "features": {"web_search": False},
        "documents": [],
        "use_beam_search": False,
    },
}


def test_neutral_values_are_accepted_without_a_word(gateway: ServedGateway) -> None:
    answer = chat(gateway, **NEUTRAL)
    assert answer.status_code == 200, answer.text
    assert "x-fleet-ignored" not in answer.headers and "warnings" not in answer.json()


HARMLESS: dict[str, object] = {
    **{
        "user": "u",
        "metadata": {"a": {"image": "data:image/png;base64,AAAA"}},
        "service_tier": "auto",
    },
    **{
        "safety_identifier": "s",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
    },
    **{
        "prediction": {"type": "content", "content": "x"},
        "parallel_tool_calls": True,
        "session_id": "s",
        "chat_id": "c",
    },
    **{"litellm_call_id": "c", "trace_id": "t", "timeout": 30, "cache_prompt": True, "priority": 1},
    **{"stream_options": {"include_obfuscation": True}},
}


def test_fields_that_cannot_change_the_answer_are_ignored_and_listed(
    gateway: ServedGateway,
) -> None:
    answer = chat(gateway, **HARMLESS)
    assert answer.status_code == 200, answer.text
    names = sorted({*HARMLESS, "stream_options.include_obfuscation"} - {"stream_options"})
    assert answer.headers["x-fleet-ignored"] == ", ".join(names) and "warnings" not in answer.json()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x", "reasoning_content": "hm"}, "messages[0].reasoning_content"),
        ({"content": "x", "weight": 1}, "messages[0].weight"),
        ({"content": "x", "prefix": True}, "messages[0].prefix"),
        (
            {"content": [{"type": "text", "text": "x", "language": "de"}]},
            "messages[0].content[0].language",
        ),
        (
            {"content": [{"type": "input_audio", "input_audio": {"data": "", "rate": 8}}]},
            "messages[0].content[0].input_audio.rate",
        ),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[0].refusal"),
    ],
)
def test_nested_field_is_refused_by_its_place(
    gateway: ServedGateway, message: dict[str, object], param: str
) -> None:
    assert refused(chat(gateway, messages=[{"role": "user", **message}])) == param


def test_unknown_field_of_a_served_object_is_refused(gateway: ServedGateway) -> None:
    assert refused(chat(gateway, audio={"voice": "ethan", "speed": 2})) == "audio.speed"
    assert (
        refused(chat(gateway, stream_options={"include_timings": True}))
        == "stream_options.include_timings"
    )


def test_own_answer_of_a_client_can_be_sent_back_whole(gateway: ServedGateway) -> None:
    """A client can send back a whole answer of the server: clients append the answer's message,
    with its empty fields, to the next chat.
    """
    answer = gateway.create().choices[0].message
    sent = {**answer.model_dump(), "annotations": [], "reasoning_content": None, "id": "m1"}
    assert chat(gateway, messages=[*HELLO, sent, *HELLO]).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("instructions", "cheerfully"),
            ("language", "de"),
            ("lang_code", "a"),
            ("task_type", "VoiceDesign"),
        ),
        *(
            ("sample_rate", 8_000),
            ("pitch", 2),
            ("ref_audio", "x"),
            ("top_p", 0.5),
            ("any_new_setting", "x"),
        ),
    ],
)
def test_field_that_conditions_a_speech_is_refused_by_name(
    gateway: ServedGateway, name: str, value: object
) -> None:
    assert refused(speak(gateway, **{name: value})) == name


def test_neutral_and_harmless_fields_of_a_speech_are_accepted(gateway: ServedGateway) -> None:
    answer = speak(
        gateway,
        instructions="",
        language="Auto",
        sample_rate=24_000,
        stream=True,
        user="u",
        any_new_setting=None,
    )
    assert answer.status_code == 200 and answer.headers["x-fleet-ignored"] == "stream, user"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("prompt", "names"),
            ("chunking_strategy", "auto"),
            ("chunking_strategy[type]", "server_vad"),
            ("hotwords", "a"),
        ),
        *(
            ("include[]", "logprobs"),
            ("keywords[]", "a"),
            ("known_speaker_names[]", "anna"),
            ("diarize", "true"),
        ),
        *(
            ("vad_filter", "true"),
            ("task", "translate"),
            ("any_new_setting", "1"),
            ("beam_size", "5"),
        ),
    ],
)
def test_field_that_conditions_a_transcription_is_refused_by_name(
    gateway: ServedGateway, name: str, value: str
) -> None:
    assert refused(write_down(gateway, None, **{name: value})) == name.split("[")[0]


def test_neutral_and_harmless_fields_of_a_transcription_are_accepted(
    gateway: ServedGateway,
) -> None:
    fields = {
        "prompt": "",
        "vad_filter": "false",
        "diarize": "False",
        "task": "transcribe",
        "n": "1",
        "user": "u",
        "new": "null",
    }
    answer = write_down(gateway, None, **fields)
    assert answer.status_code == 200 and answer.headers["x-fleet-ignored"] == "user"


def warnings_of(raw: str) -> list[list[str] | None]:
    """Return the warnings in each event of a stream."""
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
    return [json.loads(line).get("warnings") for line in lines]


def test_ignored_tools_are_a_warning_in_the_body_and_one_log_line(
    gateway: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Ignored tools cause a warning in the body and one log line. The warning is an extra field,
    which `openai` clients show, unlike a header.
    """
    with caplog.at_level(logging.WARNING):
        whole = gateway.create(tools=TOOLS)
        again = chat(gateway, tools=TOOLS, tool_choice="auto")
    (warning,) = (whole.model_extra or {})["warnings"]
    assert warning.startswith("tools: ignored: this model calls no tools") and again.json()[
        "warnings"
    ] == [warning]
    assert len([one for one in caplog.records if "tools: ignored" in one.getMessage()]) <= 1
    chunks = list(gateway.stream(tools=TOOLS))
    assert (chunks[0].model_extra or {})["warnings"] == [warning]
    events = warnings_of(chat(gateway, tools=TOOLS, stream=True).text)
    assert events[0] == events[-1] == [warning] and not any(events[1:-1])
    assert "warnings" not in chat(gateway).text


def test_log_of_ignored_fields_has_one_line_per_field_and_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    fields = IgnoredFieldLog(lambda: now)
    for second in range(90):
        now = float(second)
        fields.note(f"req-{second}", ["tools"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "req-0: tools: ignored" in lines[0] and "req-60" in lines[1]


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", CHAT, "temperature"),
        ("POST", SPEECH, "voice"),
        ("GET", "/v1/fleet/requests", "status"),
        ("GET", "/v1/fleet/logs", "stage"),
        ("GET", "/v1/fleet/workers", "role"),
        ("GET", "/v1/models", "q"),
        ("POST", "/v1/realtime/client_secrets", "model"),
    ],
)
def test_query_parameter_that_a_route_does_not_read_is_refused(
    gateway: ServedGateway, method: str, path: str, name: str
) -> None:
    body = ASK if path == CHAT else {"model": "omni", "input": "hello"}
    ask = partial(
        gateway.http.request,
        method,
        path,
        json=body if method == "POST" and "secrets" not in path else None,
    )
    assert refused(ask(params={name: "x"})) == name
    assert ask(params={name: "", "api-version": "2026-01-01"}).status_code == 200
