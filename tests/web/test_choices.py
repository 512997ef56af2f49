"""Several answers to one chat (`n`): their seeds, events and usage, and what ends them."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet.control.waiting import Applicant
from fleet.core.errors import EngineError, Overloaded
from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec
from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import AttackTarget, read_up_to
from tests.web.conftest import ASK, ServedGateway, chat, usage_of
from tests.web.fake_client import FakeStream, Script
from tests.web.test_disconnect import in_flight

THINKER = StageName("thinker")


def specs_of(gateway: ServedGateway) -> list[RequestSpec]:
    return [spec for spec, _ in gateway.client.submitted]


def alike(spec: RequestSpec) -> RequestSpec:
    """Return a request without what is its own, whatever it asks."""
    return msgspec.structs.replace(
        spec, id=RequestId(""), created_us=0, session="", body="", reply={}
    )


def test_each_choice_is_the_request_with_the_next_seed(gateway: ServedGateway) -> None:
    own = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 50, "stop": ["x"]}
    answer = gateway.create(**own, n=3, seed=7, extra_body={"prompt_cache_key": "talk"})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {Script().text}
    specs = specs_of(gateway)
    assert len({spec.id for spec in specs}) == 3
    by_seed = sorted(specs, key=lambda spec: spec.sampling[THINKER].seed)
    assert [bool(spec.session) for spec in by_seed] == [True, False, False]
    for index, spec in enumerate(by_seed):
        gateway.create(**own, seed=7 + index)
        assert alike(specs_of(gateway)[-1]) == alike(spec)


def test_usage_counts_the_prompt_once(gateway: ServedGateway) -> None:
    single = usage_of(gateway.create())
    several = usage_of(gateway.create(n=4))
    assert several.prompt_tokens == single.prompt_tokens
    assert several.completion_tokens == 4 * single.completion_tokens
    assert several.total_tokens == several.prompt_tokens + several.completion_tokens


def test_streamed_choices_have_their_index_and_one_end(gateway: ServedGateway) -> None:
    raw = chat(gateway, n=2, stream=True, stream_options={"include_usage": True}).text
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line]
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert len({event["id"] for event in events}) == 1
    *events, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    for index in (0, 1):
        own = [each for event in events for each in event["choices"] if each["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(each["delta"].get("content") or "" for each in own) == Script().text
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_ends_all_choices(gateway: ServedGateway, stream: bool) -> None:
    gateway.client.script = Script(stall_at=3)
    with AttackTarget.of(gateway.url).connect() as wire:
        attacks.post(wire, {**ASK, "n": 3, "stream": stream})
        if stream:
            read_up_to(wire, b"data:")
        wait_until(lambda: len(gateway.client.submitted) == 3, "all choices to be submitted")
    streams = gateway.client.streams.values()
    wait_until(lambda: all(each.aborted == "the client left" for each in streams), "the aborts")
    wait_until(lambda: in_flight(gateway) == 0, "nothing in flight")


@pytest.mark.parametrize("stream", [True, False])
def test_choice_that_is_not_admitted_refuses_all(gateway: ServedGateway, stream: bool) -> None:
    gateway.client.script = Script(refusal=Overloaded("too many"), refusals=range(1, 2), stall_at=3)
    answer = chat(gateway, n=3, stream=stream)
    assert answer.status_code == 429 and answer.json()["error"]["message"] == "too many"
    wait_until(lambda: in_flight(gateway) == 0, "nothing in flight")
    assert all(each.aborted for each in gateway.client.streams.values())


def test_choice_that_fails_ends_the_stream_with_its_error(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("it broke"))
    raw = chat(gateway, n=2, stream=True).text
    last = json.loads(raw.strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["message"] == "it broke" and "[DONE]" not in raw
    assert chat(gateway, n=2).json()["error"]["message"] == "it broke"


def test_choice_does_not_wait_for_the_place_of_another(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one place in the fleet, each choice is read to its end before the next is admitted."""
    submit, turn = gateway.client.requests.submit, asyncio.Lock()
    streams = gateway.client.streams

    async def in_turn(
        spec: RequestSpec, blob: bytes | None, applicant: Applicant | None = None
    ) -> FakeStream:
        async with turn:
            await asyncio.to_thread(
                wait_until, lambda: all(each.finished for each in streams.values()), "a place"
            )
            return await submit(spec, blob, applicant)

    monkeypatch.setattr(gateway.client.requests, "submit", in_turn)
    answer = gateway.create(n=3)
    assert [choice.message.content for choice in answer.choices] == [Script().text] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "modalities": ["text", "audio"]}, "n"),
        (
            {"n": 2, "stream": True, "stream_options": {"include_event_ids": True}},
            "stream_options.include_event_ids",
        ),
    ],
)
def test_choices_that_cannot_be_given_are_refused_by_name(
    gateway: ServedGateway, fields: dict[str, Any], param: str
) -> None:
    answer = chat(gateway, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not gateway.client.submitted
