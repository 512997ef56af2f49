"""Responses of one request through the OpenAI client: shape, stream, input, form and refusals."""

import base64
import io
import itertools
from typing import Any

import httpx
import openai
import pydantic
import pytest
import soundfile
from openai.types.responses import Response, ResponseStreamEvent

from fleet.core.errors import EngineError
from fleet.core.ids import StageName
from fleet.core.request import RequestSpec, Sampling
from tests.support import wait_until
from tests.web.conftest import ServedGateway, chat
from tests.web.fake_client import Script, sine
from web.gateway.live_captures import NO_STORE

PATH = "/v1/responses"
MAIN = StageName("thinker")
EVENT = pydantic.TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def respond(gateway: ServedGateway, **fields: object) -> httpx.Response:
    return gateway.http.post(PATH, json={"model": "omni", "input": "hello", **fields})


def spec_of(gateway: ServedGateway) -> RequestSpec:
    return gateway.client.submitted[-1][0]


def prompt_of(gateway: ServedGateway) -> str:
    return gateway.client.tokenizer.decode(spec_of(gateway).prompt_ids, skip_special_tokens=False)


def test_response_has_openai_shape_and_only_the_text_stage(gateway: ServedGateway) -> None:
    answer = gateway.openai().responses.create(
        model="omni",
        input="hello",
        instructions="be brief",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=400,
        metadata={"a": "b"},
    )
    spec = spec_of(gateway)
    Response.model_validate(answer.model_dump())
    assert answer.id == f"resp_{spec.id.removeprefix('req-')}"
    assert (answer.status, answer.model, answer.output_text) == ("completed", "omni", Script().text)
    assert (answer.instructions, answer.metadata) == ("be brief", {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 400)
    assert answer.usage is not None and answer.usage.input_tokens == len(spec.prompt_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    main = spec.sampling[MAIN]
    assert (main.temperature, main.top_p, main.max_tokens) == (0.5, 0.9, 400)
    assert spec.stages == (MAIN,) and spec.outputs == ("text",)
    assert "be brief" in prompt_of(gateway)


def test_response_and_chat_are_the_same_request(gateway: ServedGateway) -> None:
    """A response and a chat with the same messages and options are the same request."""
    turns = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]
    options = {"temperature": 0.3, "seed": 5, "stop": ["x"], "top_k": 7}
    assert chat(gateway, messages=turns, **options).status_code == 200
    assert respond(gateway, instructions="brief", **options).status_code == 200
    assert respond(gateway, input=turns, **options).status_code == 200
    first, *others = (spec for spec, _ in gateway.client.submitted)
    for spec in others:
        assert (spec.prompt_ids, spec.sampling, spec.outputs, spec.stages) == (
            first.prompt_ids,
            first.sampling,
            first.outputs,
            first.stages,
        )


def test_stream_has_every_event_once_and_in_order(gateway: ServedGateway) -> None:
    with gateway.http.stream(
        "POST", PATH, json={"model": "omni", "input": "hello", "stream": True}
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.iter_lines() if line.strip()]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [EVENT.validate_json(line) for line in data]
    assert [event.type for event in events] == names
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [name for name, _ in itertools.groupby(names)] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == Script().text and len(deltas) > 1


def test_clients_stream_helper_ends_with_the_whole_response(gateway: ServedGateway) -> None:
    with gateway.openai().responses.stream(model="omni", input="hello") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.output_text == Script().text
    assert final.usage is not None and final.usage.output_tokens > 0
    again = gateway.openai().responses.retrieve(final.id)
    assert again.output_text == final.output_text and again.usage == final.usage


def test_answer_at_its_limit_is_incomplete(gateway: ServedGateway) -> None:
    gateway.client.script = Script(end_token=False)
    whole = gateway.openai().responses.create(model="omni", input="hello", max_output_tokens=4)
    assert whole.status == "incomplete" and whole.output[0].to_dict()["status"] == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.completed_at is None
    *_, last = gateway.openai().responses.create(
        model="omni", input="hello", max_output_tokens=4, stream=True
    )
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text


def test_failure_in_a_stream_is_an_event_and_stores_nothing(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("it broke"))
    *_, last = gateway.openai().responses.create(model="omni", input="hello", stream=True)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error is not None and "it broke" in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="it broke"):
        gateway.openai().responses.create(model="omni", input="hello")
    assert not gateway.client.responses.records


def test_disconnect_aborts_the_request_and_stores_nothing(gateway: ServedGateway) -> None:
    gateway.client.script = Script(stall_at=2)
    body = {"model": "omni", "input": "hello", "stream": True}
    with gateway.http.stream("POST", PATH, json=body) as raw:
        next(raw.iter_lines())
    (stream,) = gateway.client.streams.values()
    wait_until(lambda: stream.aborted is not None, "the request to be aborted")
    assert not gateway.client.responses.records


def audio_part() -> dict[str, object]:
    buffer = io.BytesIO()
    soundfile.write(buffer, sine(24_000), 24_000, format="WAV")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def test_messages_of_every_role_and_part_are_read(gateway: ServedGateway) -> None:
    own = gateway.openai().responses.create(model="omni", input="first").output[0].to_dict()
    turns = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "first"}]},
        own,
        {"role": "user", "content": [audio_part(), {"type": "input_text", "text": "what is it"}]},
    ]
    assert respond(gateway, input=turns).status_code == 200
    spec, prompt = spec_of(gateway), prompt_of(gateway)
    assert len(spec.audio) == 1 and spec.audio[0].num_samples == 16_000
    for text in ("be brief", "first", Script().text, "what is it"):
        assert text in prompt


def test_form_of_the_answer_is_kept_and_echoed(gateway: ServedGateway) -> None:
    class Letter(pydantic.BaseModel):
        a: str

    gateway.client.script = Script(text='{"a": "b"}')
    parsed = gateway.openai().responses.parse(model="omni", input="hello", text_format=Letter)
    assert parsed.output_parsed == Letter(a="b")
    form = {"type": "json_schema", "name": "letter", "schema": SCHEMA, "strict": True}
    answer = respond(gateway, text={"format": form, "verbosity": "medium"}).json()
    assert answer["text"]["format"] == {**form, "description": None}
    rules = [spec.sampling[MAIN].constraint for spec, _ in gateway.client.submitted]
    assert all(rule is not None and '"a"' in rule.text for rule in rules)
    assert respond(gateway, text={"format": {"type": "text"}}).status_code == 200
    assert spec_of(gateway).sampling[MAIN].constraint is Sampling().constraint is None


def message(**fields: object) -> dict[str, object]:
    return {"input": [{"role": "user", "content": "hi", **fields}]}


def part(**fields: object) -> dict[str, object]:
    return message(content=[{"type": "input_text", "text": "hi"}, fields])


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [CALL]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "input": "x"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input[0]"),
    (message(role="tool"), "input[0].role"),
    (message(content=[]), "input[0].content"),
    (message(tool_calls=[CALL]), "input[0].tool_calls"),
    (part(type="input_image", image_url="x"), "input[0].content[1]"),
    (part(type="input_file", file_id="x"), "input[0].content[1]"),
    (part(type="input_text"), "input[0].content[1].text"),
    (part(type="input_text", text="x", language="de"), "input[0].content[1].language"),
    (part(type="input_audio", input_audio={"data": "?"}), "input[0].content[1].input_audio.data"),
    (message(content="<|im_end|>"), "input[0].content"),
    ({"input": "<|im_end|>"}, "input"),
    ({"input": "word " * 3_000}, "input"),
    ({"input": [{"role": "user", "content": "a"}] * 9}, "input"),
    ({"instructions": "<|im_end|>"}, "instructions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"effort": "low"}}, "reasoning"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"max_output_tokens": 501}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
        "text.format.schema",
    ),
    ({"stream_options": {"include_event_ids": True}}, "stream_options.include_event_ids"),
    ({"any_new_setting": 1}, "any_new_setting"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_wrong_or_unserved_field_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, object], param: str
) -> None:
    answer = respond(gateway, **fields)
    assert 400 <= answer.status_code < 500, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param)
    assert not gateway.client.submitted


def test_neutral_and_harmless_fields_are_accepted(gateway: ServedGateway) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "top_logprobs": 0,
        "text": {},
        "metadata": {},
        "conversation": None,
    }
    harmless = {"parallel_tool_calls": True, "service_tier": "auto", "user": "u"}
    answer = respond(gateway, **neutral, **harmless)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-fleet-ignored"] == ", ".join(sorted(harmless))
    assert NO_STORE not in spec_of(gateway).reply
