"""Function tools in chat completions: prompts with tools, calls whole and streamed, results, rules
of required calls, and models that call no functions.
"""

import json
from typing import Any

import httpx
import pytest

from fleet.core.ids import StageName, call_id
from fleet.core.request import RequestSpec, ToolUse
from tests.tool_template import ARGUMENTS, NOW, WEATHER, call_text, function
from tests.web.conftest import (
    ASK,
    HELLO,
    SAID,
    Loaded,
    ServedGateway,
    bounded,
    chat,
    request_id_of,
    serving,
)

CALL = {"name": "get_weather", "arguments": ARGUMENTS}
AUDIO: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}


def spec_of(gateway: ServedGateway) -> RequestSpec:
    ((spec, _),) = gateway.client.submitted
    return spec


def prompt_of(gateway: ServedGateway) -> str:
    return gateway.client.tokenizer.decode(spec_of(gateway).prompt_ids, skip_special_tokens=False)


def test_call_is_part_of_a_whole_answer(caller: ServedGateway) -> None:
    answer = caller.create(tools=[WEATHER, NOW])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == SAID
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.model_dump() == CALL
    assert call.id == call_id(spec_of(caller).id, 0)
    assert "warnings" not in (answer.model_extra or {})
    assert '"name": "get_weather"' in prompt_of(caller), "the template writes the tools"
    assert 'fleet_requests_total{outcome="tool_calls"}' in caller.http.get("/metrics").text


def test_call_without_text_has_no_content(caller: ServedGateway) -> None:
    caller.client.script.text = call_text() + call_text("now", "{}")
    message = caller.create(tools=[WEATHER, NOW]).choices[0].message
    assert message.content is None
    assert [c.function.name for c in message.tool_calls or [] if c.type == "function"] == [
        "get_weather",
        "now",
    ]


@pytest.mark.parametrize("fields", [{}, AUDIO])
def test_streamed_call_begins_with_id_and_name(
    caller: ServedGateway, fields: dict[str, Any]
) -> None:
    chunks = [chunk.choices[0] for chunk in caller.stream(tools=[WEATHER, NOW], **fields)]
    deltas = [delta for choice in chunks for delta in choice.delta.tool_calls or []]
    first, *others = deltas
    assert first.index == 0 and first.type == "function" and first.function is not None
    assert first.id == call_id(spec_of(caller).id, 0) and first.function.name == "get_weather"
    assert all(each.id is None and each.type is None and each.index == 0 for each in others)
    pieces = [each.function.arguments or "" for each in deltas if each.function is not None]
    assert "".join(pieces) == ARGUMENTS and len(pieces) > 3, "arguments are streamed"
    assert chunks[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in chunks) == SAID


def test_stream_of_a_call_is_resumed_at_any_event(caller: ServedGateway) -> None:
    options = {"include_event_ids": True}
    answer = chat(caller, tools=[WEATHER], stream=True, stream_options=options)
    events = [event for event in answer.text.split("\n\n") if event.startswith("id: ")]
    request = spec_of(caller).id
    for number, event in enumerate(events):
        position = event.splitlines()[0].removeprefix("id: ")
        rest = caller.http.get(
            f"/v1/fleet/requests/{request}/stream", headers={"last-event-id": position}
        )
        again = [one for one in rest.text.split("\n\n") if one.startswith("id: ")]
        assert again == events[number + 1 :]


def test_result_follows_its_call_in_the_prompt(caller: ServedGateway) -> None:
    answer = caller.create(tools=[WEATHER])
    caller.client.reset()
    caller.client.script.text = "It is warm."
    history = [
        *HELLO,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": "unknown", "content": [{"type": "text", "text": "25 C"}]},
    ]
    after = caller.create(messages=history, tools=[WEATHER])
    assert after.choices[0].finish_reason == "stop" and after.choices[0].message.tool_calls is None
    prompt = prompt_of(caller)
    assert f'{SAID}<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in prompt
    assert "<tool_response>25 C</tool_response>" in prompt


def test_system_message_in_parts_is_that_in_a_string(caller: ServedGateway) -> None:
    """Some clients send every text as a list of parts; templates add tools to a string."""
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    for content in ("Be brief.Be kind.", parts):
        messages = [{"role": "system", "content": content}, *HELLO]
        answer = chat(caller, messages=messages, tools=[WEATHER])
        assert answer.status_code == 200, answer.text
    first, second = (spec.prompt_ids for spec, _ in caller.client.submitted)
    assert first == second


@pytest.mark.parametrize("arguments", ["[" * 300, '{"a": "\\ud800"}', '{"a": NaN}', '{"a": '])
def test_arguments_that_are_no_json_are_shown_as_they_are(
    caller: ServedGateway, arguments: str
) -> None:
    """A model may have written them; they stay text, however a parser would fail at them."""
    called = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [called]}]
    assert chat(caller, messages=history, tools=[NOW]).status_code == 200
    written = json.dumps(arguments)[1:-1]
    assert written in prompt_of(caller) or arguments in prompt_of(caller)


BOTH = ("get_weather", "now")


@pytest.mark.parametrize(
    ("fields", "names", "max_calls"),
    [
        ({"tool_choice": "required"}, BOTH, 0),
        ({"tool_choice": "required", "parallel_tool_calls": False}, BOTH, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ("now",), 1),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, ("now",), 0),
        ({"tools": [function("now", strict=True)]}, ("now",), 0),
        ({"response_format": {"type": "json_object"}}, BOTH, 0),
    ],
)
def test_required_and_strict_calls_are_a_rule_of_the_answer(
    caller: ServedGateway, fields: dict[str, Any], names: tuple[str, ...], max_calls: int
) -> None:
    caller.create(**{"tools": [WEATHER, NOW], **fields})
    spec = spec_of(caller)
    assert spec.tools == ToolUse(format="hermes", names=names, max_calls=max_calls)
    constraint = spec.sampling[StageName("thinker")].constraint
    assert constraint is not None and constraint.kind == "grammar"
    ruled = [name for name in BOTH if f'{{\\"name\\": \\"{name}\\"' in constraint.text]
    assert tuple(ruled) == names
    assert ("{0,15}" in constraint.text) == (max_calls == 0)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_answer_that_may_not_call_has_no_tools(
    caller: ServedGateway, fields: dict[str, Any]
) -> None:
    answer = caller.create(**{"tools": [WEATHER], **fields})
    assert answer.choices[0].message.tool_calls is None
    assert call_text() in (answer.choices[0].message.content or "")
    assert spec_of(caller).tools is None and "get_weather" not in prompt_of(caller)


def test_at_most_one_call_without_parallel_calls(caller: ServedGateway) -> None:
    caller.client.script.text = call_text("now", "{}") + call_text()
    answer = caller.create(tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


def test_call_that_is_cut_by_the_length_ends_so(caller: ServedGateway) -> None:
    caller.client.script.end_token = False
    answer = caller.create(tools=[WEATHER], max_tokens=30)
    assert answer.choices[0].finish_reason == "length"


TWICE = [WEATHER, WEATHER]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "only functions"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ""),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "defer": True}}]},
        "tools[0].function.defer",
        "no such field",
    ),
    ({"tools": TWICE}, "tools[1]", "already"),
    ({"tools": [NOW] * 129}, "tools", "at most 128"),
    ({"tools": [function("f", x={"type": "<|im_end|>"})]}, "tools", "control token"),
    ({"tools": [function("f", x={"type": "no"})], "tool_choice": "required"}, "tools", "schema"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "use auto"),
    ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice", "use auto"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "no function 'f'",
    ),
    (
        {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "remove one of them",
    ),
    ({"tools": [NOW], "guided_regex": "a"}, "guided_regex", "or the tools"),
    *(
        ({"tools": [NOW], "guided_json": text}, "guided_json", "JSON schema cannot be used")
        for text in ("[" * 60_000, '{"title": "\\ud800"}', "null", "[]", "NaN", '{"type": "objct"}')
    ),
    (
        {
            "tools": [NOW],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": []},
            },
        },
        "tool_choice",
        "no tool is allowed",
    ),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
        "tools[0].parameters.type",
        "object",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    ({"function_call": {"name": "f"}}, "function_call", "send tools"),
    (
        {"messages": [*HELLO, {"role": "tool", "content": "x"}]},
        "messages[1].tool_call_id",
        "required",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
        "messages[0].tool_call_id",
        "in no other",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].type",
        "function",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_wrong_tools_are_refused_by_name(
    caller: ServedGateway, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = httpx.post(f"{caller.url}/v1/chat/completions", json={**ASK, **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert not caller.client.submitted


def test_named_form_serves_tools_on_a_template_without_them(loaded: Loaded) -> None:
    """A deployment may name the form of calls. A template that writes no tools then gets them in
    the system message, and calls and results as text.
    """
    with serving(bounded(loaded, tool_format="hermes")) as gateway:
        gateway.client.script.text = call_text()
        answer = gateway.create(
            messages=[{"role": "system", "content": "Be brief."}, *HELLO], tools=[WEATHER]
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        prompt = prompt_of(gateway)
        assert "Be brief.\n\n# Tools" in prompt and '"name": "get_weather"' in prompt
        gateway.client.reset()
        message = answer.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": request_id_of(answer), "content": "25 C"}
        gateway.create(messages=[*HELLO, message, result])
        prompt = prompt_of(gateway)
        assert f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in prompt
        assert "user\n<tool_response>\n25 C\n</tool_response>" in prompt


def test_deployment_may_call_no_functions(tooled: Loaded) -> None:
    with serving(bounded(tooled, tool_format="none")) as gateway:
        answer = chat(gateway, tools=[WEATHER], parallel_tool_calls=True)
        assert answer.headers["x-fleet-ignored"] == "parallel_tool_calls, tools"
        assert json.loads(answer.text)["warnings"][0].startswith("tools: ignored")
        assert spec_of(gateway).tools is None
