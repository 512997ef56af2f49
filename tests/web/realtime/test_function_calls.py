"""Function calls in voice sessions: their events, their results, interruptions, and sessions that
move to another gateway.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleet.core.ids import StageName, call_id
from tests.support import await_until
from tests.tool_template import ARGUMENTS, call_text
from tests.tool_template import WEATHER as NESTED
from tests.web.conftest import SAID, Loaded, ServedGateway, bounded, serving
from tests.web.fake_client import FRAME_SAMPLES, Script
from tests.web.realtime.socket_client import Event, SocketClient, opened
from web.realtime.snapshot import STATE

WEATHER = {"type": "function", **NESTED["function"]}
NOW = {"type": "function", "name": "now"}
CALLING = Script(text=f"{SAID}\n{call_text()}", num_samples=2 * FRAME_SAMPLES)
TEXT = {"output_modalities": ["text"]}
ARGUMENT_EVENT = "response.function_call_arguments"


@pytest.fixture
async def caller(shared_caller: ServedGateway) -> AsyncIterator[SocketClient]:
    """A client of a session with two tools, whose next response is words and a call."""
    shared_caller.client.reset()
    shared_caller.client.script = CALLING
    async with opened(shared_caller, "/v1/realtime") as client:
        errors, now = await client.update(tools=[WEATHER, NOW])
        assert not errors and [tool["name"] for tool in now["tools"]] == ["get_weather", "now"]
        yield client


def prompt_of(gateway: ServedGateway) -> str:
    spec, _ = gateway.client.submitted[-1]
    return gateway.client.tokenizer.decode(spec.prompt_ids, skip_special_tokens=False)


def of_calls(client: SocketClient) -> list[Event]:
    """Return the events about items and arguments of calls, in order."""
    return [
        event
        for event in client.events
        if event["type"].startswith(ARGUMENT_EVENT)
        or event.get("item", {}).get("type") == "function_call"
    ]


async def result(client: SocketClient, call: str, output: str = "25 C") -> None:
    item = {"type": "function_call_output", "call_id": call, "output": output}
    await client.send("conversation.item.create", item=item)


@pytest.mark.parametrize("response", [{}, TEXT])
async def test_call_has_its_events_after_the_words(
    caller: SocketClient, shared_caller: ServedGateway, response: dict[str, Any]
) -> None:
    done = await caller.complete("hello", **response)
    words, call = done["output"]
    assert words["type"] == "message" and call["type"] == "function_call"
    assert [SAID] == [part.get("transcript", part.get("text")) for part in words["content"]]
    assert (call["name"], call["arguments"], call["status"]) == (
        "get_weather",
        ARGUMENTS,
        "completed",
    )
    spec, _ = shared_caller.client.submitted[-1]
    assert call["call_id"] == call_id(spec.id, 0)
    events = of_calls(caller)
    assert [event["type"] for event in events if not event["type"].endswith("delta")] == [
        "response.output_item.added",
        "conversation.item.added",
        f"{ARGUMENT_EVENT}.done",
        "response.output_item.done",
        "conversation.item.done",
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
    assert "".join(deltas) == ARGUMENTS and len(deltas) > 1
    indexed = [event for event in events if "output_index" in event]
    assert {event["output_index"] for event in indexed} == {1}
    assert {event.get("call_id", call["call_id"]) for event in indexed} == {call["call_id"]}


async def test_next_response_sees_call_and_result(
    caller: SocketClient, shared_caller: ServedGateway
) -> None:
    call = (await caller.complete("hello"))["output"][1]
    shared_caller.client.script = Script(text="It is warm.", num_samples=FRAME_SAMPLES)
    await result(caller, call["call_id"])
    added = (await caller.until("conversation.item.done"))["item"]
    assert (added["type"], added["output"]) == ("function_call_output", "25 C")
    done = await caller.complete()
    assert [item["type"] for item in done["output"]] == ["message"]
    prompt = prompt_of(shared_caller)
    written = f'{SAID}<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
    assert f"{written}<|im_end|>\n<|im_start|>user\n<tool_response>25 C<" in prompt


async def test_result_counts_once_and_only_for_a_known_call(caller: SocketClient) -> None:
    call = (await caller.complete("hello"))["output"][1]["call_id"]
    await result(caller, call)
    await caller.until("conversation.item.done")
    await result(caller, call, "30 C")
    error = await caller.error()
    assert error["param"] == "item.call_id" and "already" in error["message"]
    await result(caller, "call_unknown")
    error = await caller.error()
    assert error["param"] == "item.call_id" and "no call 'call_unknown'" in error["message"]


async def test_client_may_write_calls_and_results(
    caller: SocketClient, shared_caller: ServedGateway
) -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    await caller.send("conversation.item.create", item=item)
    await result(caller, "c1", "noon")
    await caller.complete("hello", **TEXT)
    prompt = prompt_of(shared_caller)
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call>' in prompt
    assert "<tool_response>noon</tool_response>" in prompt


@pytest.mark.parametrize("in_session", [True, False])
async def test_required_call_is_a_rule_of_the_response(
    caller: SocketClient, shared_caller: ServedGateway, *, in_session: bool
) -> None:
    choice = {"type": "function", "name": "now"}
    if in_session:
        _, now = await caller.update(tool_choice=choice)
        assert now["tool_choice"] == choice
    await caller.complete("hello", **({} if in_session else {"tool_choice": choice}), **TEXT)
    spec, _ = shared_caller.client.submitted[-1]
    assert spec.tools is not None and spec.tools.names == ("now",) and spec.tools.max_calls == 1
    constraint = spec.sampling[StageName("thinker")].constraint
    assert constraint is not None and "get_weather" not in constraint.text


async def test_response_may_have_tools_of_its_own(
    caller: SocketClient, shared_caller: ServedGateway
) -> None:
    await caller.complete("hello", tools=[NOW], tool_choice="auto", **TEXT)
    spec, _ = shared_caller.client.submitted[-1]
    assert spec.tools is not None and spec.tools.names == ("now",)
    done = await caller.complete("hello", tool_choice="none", **TEXT)
    assert [item["type"] for item in done["output"]] == ["message"]
    assert shared_caller.client.submitted[-1][0].tools is None


async def test_cancelled_response_cuts_its_call(
    caller: SocketClient, shared_caller: ServedGateway
) -> None:
    shared_caller.client.script = Script(text=call_text(), num_samples=0, stall_at=-8)
    await caller.ask("hello")
    await caller.until(f"{ARGUMENT_EVENT}.delta")
    await caller.send("response.cancel")
    done = await caller.done()
    assert done["status"] == "cancelled"
    (call,) = done["output"]
    assert call["status"] == "incomplete" and call["call_id"]
    assert of_calls(caller)[-3]["type"] == f"{ARGUMENT_EVENT}.done"
    shared_caller.client.script = Script(text="Well.", num_samples=0)
    await caller.complete("hello", **TEXT)
    prompt = prompt_of(shared_caller)
    assert '<tool_call>{"name": "get_weather"' not in prompt, "a cut call is no part of the prompt"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "session.tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "session.tools[0].name"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "session.tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "session.tool_choice"),
    ],
)
async def test_wrong_tools_are_refused_by_name(
    caller: SocketClient, session: dict[str, Any], param: str
) -> None:
    before = (await caller.update())[1]
    errors, now = await caller.update(**session)
    assert [error["param"] for error in errors] == [param]
    assert now["tools"] == before["tools"] and now["tool_choice"] == before["tool_choice"]


async def test_choice_goes_with_its_tool(caller: SocketClient) -> None:
    await caller.update(tool_choice={"type": "function", "name": "now"})
    errors, now = await caller.update(tools=[WEATHER])
    assert not errors and now["tool_choice"] == "auto"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "mcp_call", "name": "f"},
    ],
)
async def test_model_without_calls_refuses_their_items(
    client: SocketClient, item: dict[str, Any]
) -> None:
    error = await client.refusal_of("conversation.item.create", item=item)
    assert error["param"] == "item.type"


async def written(gateway: ServedGateway, page: SocketClient, part: str) -> None:
    """Wait until `part` stands in what another gateway would read of the session."""

    async def is_written() -> bool:
        stored = gateway.client.voice.held[page.session].fields
        return part.encode() in stored.get(STATE, b"")

    await await_until(is_written, f"{part} to be written down")


async def test_call_that_the_next_gateway_continues_has_the_same_id(tooled: Loaded) -> None:
    """The gateway is lost within the call, and its client sends the result to the next one, which
    sent it the rest.
    """
    with serving(tooled) as first:
        first.client.script = Script(text=f"{SAID}{call_text()}", num_samples=0, stall_at=-8)
        async with opened(first) as page:
            await page.update(tools=[WEATHER])
            await page.ask("hello", **TEXT)
            begun = await page.until(f"{ARGUMENT_EVENT}.delta")
            response = begun["response_id"]
            await page.retrieve(begun["item_id"])
            await written(first, page, response)
            session = page.session
            await page.drop()
        first.client.script = Script(text=f"{SAID}{call_text()}", num_samples=0)
        with serving(tooled, client=first.client) as second:
            query: dict[str, Any] = {
                "session": session,
                "response": response,
                "samples": 0,
                "chars": 0,
            }
            async with opened(second, **query) as again:
                done = await again.until(f"{ARGUMENT_EVENT}.done")
                assert done["call_id"] == begun["call_id"] and done["arguments"] == ARGUMENTS
                assert done["item_id"] == begun["item_id"]
                await result(again, done["call_id"])
                assert (await again.done())["status"] == "completed"
                second.client.script = Script(text="Warm.", num_samples=0)
                await again.complete(None, **TEXT)
                assert "<tool_response>25 C" in prompt_of(second)


async def test_result_may_be_sent_to_another_gateway(tooled: Loaded) -> None:
    with serving(tooled) as first:
        first.client.script = CALLING
        async with opened(first) as page:
            await page.update(tools=[WEATHER], tool_choice="auto")
            call = (await page.complete("hello", **TEXT))["output"][1]["call_id"]
            await written(first, page, call)
            session = page.session
            await page.drop()
        with serving(tooled, client=first.client) as second:
            async with opened(second, session=session) as again:
                await result(again, call)
                second.client.script = Script(text="Warm.", num_samples=0)
                await again.complete(None, **TEXT)
                assert "<tool_response>25 C" in prompt_of(second)
                errors, now = await again.update()
                assert not errors and [tool["name"] for tool in now["tools"]] == ["get_weather"]


async def test_deployment_without_calls_ignores_tools(tooled: Loaded) -> None:
    with serving(bounded(tooled, tool_format="none")) as gateway:
        async with opened(gateway, "/v1/realtime") as client:
            errors, now = await client.update(tools=[WEATHER])
            assert not errors and now["tools"] == [] and "calls no tools" in now["warnings"][0]
