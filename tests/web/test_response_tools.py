"""Function tools in responses, through the OpenAI client: calls whole and streamed, their outputs,
and conversations of stored responses with calls.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, cast

import openai
import pytest
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseFunctionToolCall,
    ResponseInputParam,
)

from fleet.core.ids import call_id
from fleet.core.request import RequestSpec, ToolUse
from tests.clients.environments import AGENTS, run_client
from tests.tool_template import ARGUMENTS, NOW, WEATHER, call_text
from tests.web.conftest import SAID, Loaded, ServedGateway, chat, serving
from tests.web.fake_client import Script
from tests.web.test_responses import EVENT, MAIN, PATH, prompt_of, respond, spec_of

WRITTEN = f'{SAID}<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


def flat(tool: dict[str, Any]) -> FunctionToolParam:
    """Return a tool of a chat in the form of responses."""
    function = tool["function"]
    return {
        "type": "function",
        "name": function["name"],
        "description": function["description"],
        "parameters": function["parameters"],
        "strict": function.get("strict", False),
    }


TOOLS = [flat(WEATHER), flat(NOW)]
CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "get_weather",
    "arguments": ARGUMENTS,
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "25 C"}
USER = {"role": "user", "content": "hello"}
NOW_CALL = {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"}


def call_of(response: Response) -> ResponseFunctionToolCall:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return call


def ask(gateway: ServedGateway, **fields: Any) -> Response:
    """Create a response with the OpenAI client; model, input and tools have defaults."""
    create = cast(Callable[..., Response], gateway.openai().responses.create)
    return create(**{"model": "omni", "input": "hello", "tools": TOOLS, **fields})


def test_call_is_an_item_after_the_message(caller: ServedGateway) -> None:
    answer = ask(caller)
    Response.model_validate(answer.model_dump())
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.output_text == SAID and answer.status == "completed"
    call, spec = call_of(answer), spec_of(caller)
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    assert call.call_id == call_id(spec.id, 0) and call.id == f"fc_{call.call_id[5:]}"
    assert [tool.model_dump(exclude_none=True) for tool in answer.tools] == TOOLS
    assert answer.tool_choice == "auto" and answer.parallel_tool_calls is True
    assert "warnings" not in (answer.model_extra or {})
    assert caller.openai().responses.retrieve(answer.id) == answer


def test_answer_that_only_calls_has_no_message(caller: ServedGateway) -> None:
    caller.client.script.text = call_text() + call_text("now", "{}")
    answer = ask(caller)
    names = [item.name for item in answer.output if item.type == "function_call"]
    assert names == ["get_weather", "now"] and len(answer.output) == 2


def test_response_and_chat_with_tools_are_the_same_request(caller: ServedGateway) -> None:
    """A response and a chat with the same tools, calls and results are the same request."""
    history = [
        USER,
        {
            "role": "assistant",
            "content": SAID,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": ARGUMENTS},
                },
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "content": "25 C"},
    ]
    items = [USER, {"role": "assistant", "content": SAID}, CALL, NOW_CALL]
    items += [{**OUTPUT, "call_id": "c2", "output": "noon"}, OUTPUT]
    options = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    assert chat(caller, messages=history, tools=[WEATHER, NOW], **options).status_code == 200
    assert respond(caller, input=items, tools=TOOLS, **options).status_code == 200
    first, second = (spec for spec, _ in caller.client.submitted)
    assert (second.prompt_ids, second.sampling, second.tools) == (
        first.prompt_ids,
        first.sampling,
        first.tools,
    )
    assert first.tools == ToolUse(format="hermes", names=("get_weather", "now"), max_calls=1)


@pytest.mark.parametrize("said", [f"{SAID}\n", ""])
def test_stream_has_the_events_of_each_item_in_order(caller: ServedGateway, said: str) -> None:
    caller.client.script.text = said + call_text() + call_text("now", "{}")
    body = {"model": "omni", "input": "hello", "tools": TOOLS, "stream": True}
    lines = caller.http.post(PATH, json=body).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [EVENT.validate_json(line) for line in data]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    message = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "created",
        "in_progress",
        *(message if said else []),
        *call,
        *call,
        "completed",
    ]
    last = json.loads(data[-1])["response"]["output"]
    placed = [json.loads(line) for line in data if '"output_index"' in line]
    for index, item in enumerate(last):
        own = [event for event in placed if event["output_index"] == index]
        ids = {event["item"]["id"] if "item" in event else event["item_id"] for event in own}
        assert ids == {item["id"]} and own[-1]["item"] == item
    assert [event["output_index"] for event in placed] == sorted(
        event["output_index"] for event in placed
    )
    first = [event for event in placed if event.get("item_id") == last[-2]["id"]]
    deltas = [event["delta"] for event in first if "delta" in event]
    assert "".join(deltas) == ARGUMENTS == first[-1]["arguments"] and len(deltas) > 3


def test_clients_stream_helper_accumulates_calls(caller: ServedGateway) -> None:
    with caller.openai().responses.stream(model="omni", input="hello", tools=TOOLS) as stream:
        deltas = [e for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert deltas[-1].snapshot == ARGUMENTS
    assert call_of(final).arguments == ARGUMENTS and final.output_text == SAID
    (stored,) = caller.openai().responses.retrieve(final.id).output[1:]
    assert stored.to_dict() == call_of(final).to_dict(exclude_none=True)


def output_of(call: ResponseFunctionToolCall, output: Any = "25 C") -> ResponseInputParam:
    return [{"type": "function_call_output", "call_id": call.call_id, "output": output}]


@pytest.mark.parametrize(
    "output", ["25 C", [{"type": "input_text", "text": "25"}, {"type": "input_text", "text": "C"}]]
)
def test_stored_response_with_a_call_continues_with_its_output(
    caller: ServedGateway, output: Any
) -> None:
    first = ask(caller)
    caller.client.script = Script(text="It is warm.")
    second = ask(caller, input=output_of(call_of(first), output), previous_response_id=first.id)
    text = output if isinstance(output, str) else "25\nC"
    after = f"{WRITTEN}<|im_end|>\n<|im_start|>user\n<tool_response>{text}</tool_response>"
    assert after in prompt_of(caller) and second.output_text == "It is warm."
    listed = list(caller.openai().responses.input_items.list(second.id))
    assert [item.type for item in listed] == ["function_call_output"]
    ask(caller, input="and now?", previous_response_id=second.id)
    assert f"{after}<|im_end|>\n<|im_start|>assistant\nIt is warm." in prompt_of(caller)


def test_whole_output_sent_back_is_the_same_prompt(caller: ServedGateway) -> None:
    """Clients that store nothing send the items of the answer back, with the outputs after them."""
    first = ask(caller)
    output = output_of(call_of(first))
    ask(caller, input=output, previous_response_id=first.id)
    own = [item.model_dump(exclude_none=True) for item in first.output]
    ask(caller, input=[USER, *own, *output], store=False)
    by_id, by_items = (spec.prompt_ids for spec, _ in caller.client.submitted[1:])
    assert by_id == by_items


def test_output_and_call_that_are_sent_again_count_once(caller: ServedGateway) -> None:
    items = [USER, CALL, CALL, OUTPUT, OUTPUT]
    first = ask(caller, input=items)
    assert prompt_of(caller).count("<tool_response>25 C</tool_response>") == 1
    listed = list(caller.openai().responses.input_items.list(first.id))
    assert [item.type for item in listed] == ["function_call_output", "function_call", "message"]
    ask(caller, input=[CALL, OUTPUT, USER], previous_response_id=first.id)
    assert prompt_of(caller).count("<tool_response>") == 1


def test_call_that_is_cut_is_incomplete_and_left_out_later(caller: ServedGateway) -> None:
    caller.client.script.end_token = False
    written = f"{SAID}\n{call_text()}".partition('"days"')[0]
    limit = len(caller.client.tokenizer.encode(written).ids)
    first = ask(caller, max_output_tokens=limit)
    call = call_of(first)
    assert first.status == call.status == "incomplete" and call.arguments
    assert ARGUMENTS.startswith(call.arguments) and call.arguments != ARGUMENTS
    assert first.output[0].to_dict()["status"] == "completed"
    *_, done, last = caller.openai().responses.create(
        model="omni", input="hello", tools=TOOLS, max_output_tokens=limit, stream=True
    )
    assert last.type == "response.incomplete" and done.type == "response.output_item.done"
    assert done.item.to_dict()["status"] == "incomplete"
    caller.client.script = Script()
    ask(caller, input="and now?", previous_response_id=first.id)
    assert f"<|im_start|>assistant\n{SAID}<|im_end|>" in prompt_of(caller)
    again = [item.model_dump(exclude_none=True) for item in first.output]
    ask(caller, input=[USER, *again, {"role": "user", "content": "and now?"}])
    by_id, by_items = (spec.prompt_ids for spec, _ in caller.client.submitted[2:])
    assert by_id == by_items
    with pytest.raises(openai.BadRequestError) as refused:
        ask(caller, input=output_of(call), previous_response_id=first.id)
    assert refused.value.param == "input[0].call_id"


CHOICES: list[tuple[Any, Any, tuple[str, ...]]] = [
    ("required", "required", ("get_weather", "now")),
    ({"type": "function", "name": "now"}, {"type": "function", "name": "now"}, ("now",)),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}],
        },
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}],
        },
        ("now",),
    ),
]


@pytest.mark.parametrize(("choice", "shown", "names"), CHOICES)
def test_required_call_is_a_rule_of_the_answer(
    caller: ServedGateway, choice: Any, shown: Any, names: tuple[str, ...]
) -> None:
    answer = respond(caller, tools=TOOLS, tool_choice=choice).json()
    assert answer["tool_choice"] == shown
    spec = spec_of(caller)
    constraint = spec.sampling[MAIN].constraint
    assert spec.tools is not None and spec.tools.names == names
    assert constraint is not None and constraint.kind == "grammar"


def test_strict_tool_and_form_are_one_rule(caller: ServedGateway) -> None:
    def rule(spec: RequestSpec) -> str:
        constraint = spec.sampling[MAIN].constraint
        assert constraint is not None
        return constraint.text

    strict = {**flat(WEATHER), "strict": True}
    ask(caller, tools=[strict])
    assert "get_weather" in rule(spec_of(caller))
    ask(caller, text={"format": {"type": "json_object"}})
    assert "get_weather" in rule(spec_of(caller)) and '{"type": "object"' in rule(spec_of(caller))


def test_answer_that_may_not_call_has_no_tools(caller: ServedGateway) -> None:
    answer = ask(caller, tool_choice="none")
    assert answer.tool_choice == "none" and call_text() in answer.output_text
    assert spec_of(caller).tools is None and "get_weather" not in prompt_of(caller)


def test_neutral_fields_of_tools_and_items_are_accepted(caller: ServedGateway) -> None:
    tool = {**flat(WEATHER), "defer_loading": False, "allowed_callers": ["direct"], "async": False}
    call = {**CALL, "id": "fc_1", "status": "completed", "caller": {"type": "direct"}}
    output = {**OUTPUT, "id": None, "status": "completed", "name": "get_weather", "caller": None}
    answer = respond(
        caller, tools=[tool], input=[USER, call, output], max_tool_calls=4, parallel_tool_calls=True
    )
    assert answer.status_code == 200, answer.text
    assert "max_tool_calls" in answer.headers["x-fleet-ignored"]


HOSTED = ["web_search", "file_search", "code_interpreter", "mcp", "image_generation", "custom"]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *(({"tools": [{"type": kind}]}, "tools[0].type", "only functions") for kind in HOSTED),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "use auto"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no function 'f'"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (
        {"tools": [{**TOOLS[0], "defer_loading": True}]},
        "tools[0].defer_loading",
        "no such field",
    ),
    ({"input": [USER, OUTPUT]}, "input[1].call_id", "no complete call"),
    ({"input": [OUTPUT, CALL]}, "input[0].call_id", "no complete call"),
    (
        {"input": [CALL, OUTPUT, {**OUTPUT, "output": "30 C"}]},
        "input[2].call_id",
        "an output of the call 'c1' already",
    ),
    ({"input": [CALL, {**CALL, "arguments": "{}"}]}, "input[1].call_id", "a call 'c1' already"),
    (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
        "required",
    ),
    ({"input": [CALL, {**OUTPUT, "output": None}]}, "input[1].output", "string"),
    ({"input": [{**CALL, "name": None}]}, "input[0].name", "string"),
    ({"input": [{**CALL, "arguments": "<|im_end|>"}]}, "input[0].arguments", "control token"),
    ({"input": [CALL, {**OUTPUT, "output": "<|im_end|>"}]}, "input[1].output", "control token"),
    (
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}]},
        "input[1].output[0]",
        "images",
    ),
    ({"input": [{**CALL, "namespace": "n"}]}, "input[0].namespace", "only functions"),
    ({"input": [{**CALL, "role": "user"}]}, "input[0].role", "no such field"),
    ({"input": [{**USER, "name": "anna"}]}, "input[0].name", "no such field"),
    ({"input": [{**USER, "call_id": "c1"}]}, "input[0].call_id", "no such field"),
    ({"input": [{"type": "mcp_call", "name": "x"}]}, "input[0]", "only functions"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_wrong_tools_and_items_are_refused_by_name(
    caller: ServedGateway, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = respond(caller, **{"tools": TOOLS, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert not caller.client.submitted


@pytest.mark.one_in(2, "typed questions of other clients")
def test_openai_agents_call_a_function_and_hand_off(caller: ServedGateway) -> None:
    """The default model of `openai-agents` calls a function, then hands off to another agent, with
    whole and with streamed responses.
    """
    turns = (call_text(), call_text("transfer_to_writer", "{}"), "It is warm.")
    caller.client.script = Script(answers=turns * 2)
    printed = run_client("agents_responses.script", AGENTS, caller.url, "omni").splitlines()
    called = "('Paris', 2)"
    assert printed == [
        f"called [{called}], writer: It is warm.",
        f"called [{called}, {called}], writer: It is warm.",
    ]
    prompts = [caller.client.tokenizer.decode(s.prompt_ids) for s, _ in caller.client.submitted]
    for prompt in (prompts[2], prompts[5]):
        assert "<tool_response>25 C</tool_response>" in prompt and "transfer_to_writer" in prompt


def test_model_that_calls_no_functions_ignores_tools_with_a_warning(
    gateway: ServedGateway,
) -> None:
    answer = respond(gateway, tools=TOOLS, parallel_tool_calls=True)
    assert answer.headers["x-fleet-ignored"] == "parallel_tool_calls, tools"
    body = answer.json()
    assert body["warnings"][0].startswith("tools: ignored") and body["tools"] == []
    assert spec_of(gateway).tools is None


def test_model_that_calls_no_functions_cannot_continue_from_calls(
    caller: ServedGateway, loaded: Loaded
) -> None:
    first = ask(caller)
    with serving(loaded, client=caller.client) as other:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(other, previous_response_id=first.id)
        assert refused.value.param == "previous_response_id"
