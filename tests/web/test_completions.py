"""Completions of texts without a chat template, through the OpenAI client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from fleet.core.errors import EngineError, FleetError
from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from tests.support import wait_until
from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from web.openai.completions import merged

PATH = "/v1/completions"
PROMPT = "hello there"


def complete(gateway: ServedGateway, **fields: object) -> httpx.Response:
    return gateway.http.post(PATH, json={"model": "omni", "prompt": PROMPT, **fields})


def specs(gateway: ServedGateway) -> list[RequestSpec]:
    return [spec for spec, _ in gateway.client.submitted]


def test_completion_has_openai_shape_and_only_the_text_stage(gateway: ServedGateway) -> None:
    answer = gateway.openai().completions.create(model="omni", prompt=PROMPT, max_tokens=400)
    (spec,) = specs(gateway)
    assert (answer.object, answer.model, answer.id) == (
        "text_completion",
        "omni",
        f"cmpl-{spec.id.removeprefix('req-')}",
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (Script().text, "stop", 0)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(spec.prompt_ids)
    assert gateway.client.tokenizer.decode(spec.prompt_ids) == PROMPT
    assert spec.stages == ("thinker",) and spec.outputs == ("text",) and "hello" in spec.body


def test_answer_has_sixteen_tokens_unless_the_request_says_otherwise(
    gateway: ServedGateway,
) -> None:
    gateway.client.script = Script(text="a long answer " * 10, end_token=False)
    answer = gateway.openai().completions.create(model="omni", prompt=PROMPT)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    main = StageName("thinker")
    assert complete(gateway, max_tokens=40, temperature=0.5, stop=["x"], seed=3).status_code == 200
    first, second = (spec.sampling[main] for spec in specs(gateway))
    assert (first.max_tokens, second.max_tokens) == (16, 40)
    assert (second.temperature, second.stop, second.seed) == (0.5, ("x",), 3)


def test_streamed_completion_is_the_whole_one(gateway: ServedGateway) -> None:
    whole = gateway.openai().completions.create(model="omni", prompt=PROMPT, max_tokens=400)
    chunks = list(
        gateway.openai().completions.create(
            model="omni",
            prompt=PROMPT,
            max_tokens=400,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, last, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in (texts[0], last)] == [None, "stop"]
    assert usage.choices == [] and usage.usage == whole.usage and texts[0].usage is None
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_of_a_list_are_answered_each(gateway: ServedGateway, as_ids: bool) -> None:
    texts = ["hello", "good day", "hello there"]
    ids = [gateway.client.tokenizer.encode(text).ids for text in texts]
    prompt: Any = ids if as_ids else texts
    answer = gateway.openai().completions.create(model="omni", prompt=prompt, max_tokens=400)
    assert [list(spec.prompt_ids) for spec in specs(gateway)] == ids
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.text for choice in answer.choices} == {Script().text}
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
    assert len({spec.id for spec in specs(gateway)}) == 3
    assert len({spec.sampling[StageName("thinker")].seed for spec in specs(gateway)}) == 1
    joined = ["", "", ""]
    for chunk in gateway.openai().completions.create(
        model="omni", prompt=prompt, max_tokens=400, stream=True
    ):
        for choice in chunk.choices:
            joined[choice.index] += choice.text
    assert joined == [Script().text] * 3


def test_token_ids_are_taken_as_they_are(gateway: ServedGateway) -> None:
    ids = gateway.client.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n").ids
    assert complete(gateway, prompt=ids).status_code == 200
    assert complete(gateway, prompt="<|im_start|>user\nhello<|im_end|>\n").status_code == 200
    assert [list(spec.prompt_ids) for spec in specs(gateway)] == [ids, ids]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "say <|audio_pad|>"}, "prompt"),
        ({"prompt": "word " * 3_000}, "prompt"),
        ({"prompt": list(range(100)) * 30}, "prompt"),
        ({"max_tokens": 501}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 0}, "logprobs"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stream_options": {"include_event_ids": True}}, "stream_options.include_event_ids"),
        ({"model": "other"}, "model"),
    ],
)
def test_wrong_or_unserved_field_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, object], param: str
) -> None:
    answer = complete(gateway, **fields)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["param"] == param and not gateway.client.submitted


def test_neutral_fields_are_accepted_and_harmless_ones_listed(gateway: ServedGateway) -> None:
    answer = complete(gateway, n=1, best_of=1, echo=False, suffix=None, logprobs=None, user="u")
    assert answer.status_code == 200 and answer.headers["x-fleet-ignored"] == "user"


def test_rule_of_an_answer_is_kept(gateway: ServedGateway) -> None:
    assert complete(gateway, guided_choice=["yes", "no"]).status_code == 200
    (spec,) = specs(gateway)
    constraint = spec.sampling[StageName("thinker")].constraint
    assert constraint is not None and "yes" in constraint.text


def test_failure_of_one_prompt_ends_the_others(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("it broke"))
    with pytest.raises(openai.APIError, match="it broke"):
        list(gateway.openai().completions.create(model="omni", prompt=["a", "b"], stream=True))
    streams = gateway.client.streams.values()
    wait_until(lambda: all(one.aborted for one in streams), "both requests to be aborted")
    with pytest.raises(openai.InternalServerError, match="it broke"):
        gateway.openai().completions.create(model="omni", prompt=["a", "b"])


def test_disconnect_aborts_every_prompt(gateway: ServedGateway) -> None:
    gateway.client.script = Script(stall_at=2)
    body = {"model": "omni", "prompt": ["a", "b"], "stream": True}
    with gateway.http.stream("POST", PATH, json=body) as answer:
        next(answer.iter_lines())
    streams = gateway.client.streams.values()
    wait_until(lambda: all(one.aborted for one in streams), "both requests to be aborted")
    assert len(streams) == 2


async def test_streams_are_merged_as_their_items_arrive() -> None:
    gate = asyncio.Event()

    async def slow() -> AsyncIterator[str]:
        yield "a"
        await gate.wait()
        yield "b"

    async def quick() -> AsyncIterator[str]:
        for text in "cde":
            yield text
        gate.set()

    found = [item async for item in merged([slow(), quick()])]
    assert sorted(found) == [(0, "a"), (0, "b"), (1, "c"), (1, "d"), (1, "e")]
    assert found[-1] == (0, "b")


async def test_error_of_a_merged_stream_ends_all_of_them() -> None:
    ended: list[str] = []

    async def endless() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            ended.append("endless")

    async def failing() -> AsyncIterator[str]:
        yield "b"
        raise FleetError("it broke")

    with pytest.raises(FleetError, match="it broke"):
        async for _ in merged([endless(), failing()]):
            pass
    assert ended == ["endless"]
