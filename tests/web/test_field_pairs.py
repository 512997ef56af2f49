"""Fields that are sent together: each pair is served, refused by the name of a field, or harmless,
which means that the request without the field is the same one.
"""

from typing import Any

import msgspec
import pytest

from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from tests.web.conftest import HELLO, ServedGateway

Fields = dict[str, Any]
CHAT, RESPONSES, COMPLETIONS, SPEECH = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/audio/speech",
)
BASE: dict[str, Fields] = {
    CHAT: {"model": "omni", "messages": HELLO},
    RESPONSES: {"model": "omni", "input": "hello"},
    COMPLETIONS: {"model": "omni", "prompt": "hello"},
    SPEECH: {"model": "omni", "input": "hello"},
}
MAIN = StageName("thinker")
SPOKEN: Fields = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
JSON: Fields = {"response_format": {"type": "json_object"}}
BEGUN: Fields = {
    "messages": [*HELLO, {"role": "assistant", "content": "Once"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
MAX_SEED = 2**63 - 1

REFUSED: list[tuple[str, Fields, str]] = [
    (CHAT, {"n": 2, **SPOKEN}, "n"),
    (
        CHAT,
        {"n": 2, "stream": True, "stream_options": {"include_event_ids": True}},
        "stream_options.include_event_ids",
    ),
    (CHAT, {"logprobs": True, **SPOKEN}, "logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens"),
    (CHAT, {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    (CHAT, {"ignore_eos": True, **JSON}, "ignore_eos"),
    (CHAT, {"fleet": {"thinker": {"ignore_eos": True}}, **JSON}, "ignore_eos"),
    (CHAT, {"fleet": {"talker": {"stop": ["a"]}}, **SPOKEN}, "fleet.talker.stop"),
    (CHAT, {"fleet": {"code2wav": {"top_k": 3}}, **SPOKEN}, "fleet.code2wav.top_k"),
    (CHAT, {"stream": True, **SPOKEN, "audio": {"format": "mp3"}}, "audio.format"),
    (CHAT, {**BEGUN, **SPOKEN}, "continue_final_message"),
    (CHAT, {**BEGUN, "messages": HELLO}, "continue_final_message"),
    (CHAT, {**BEGUN, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"seed": -1}, "seed"),
    (CHAT, {"seed": MAX_SEED + 1}, "seed"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"logit_bias": {"7": 1, "07": 2}}, "logit_bias.07"),
    (RESPONSES, {"max_tokens": 5, "max_output_tokens": 7}, "max_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": ""}, "input"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
    (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, {"background": True}, "background"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}, "max_tokens"),
    (COMPLETIONS, {"n": 2}, "n"),
    (SPEECH, {"speed": 0.2}, "speed"),
    (SPEECH, {"speed": 4.1}, "speed"),
    (SPEECH, {"word_timestamps": True}, "word_timestamps"),
    (SPEECH, {"logprobs": True}, "logprobs"),
]

SERVED: list[tuple[str, Fields, Fields]] = [
    (CHAT, {"n": 4, "seed": MAX_SEED}, {"seed": MAX_SEED}),
    (CHAT, {"n": 2, "store": True, "stream": True}, {}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHAT, {"seed": 3, "fleet": {"thinker": {"seed": 4}}}, {"seed": 4}),
    (CHAT, {"max_tokens": 5, "fleet": {"thinker": {"max_tokens": 9}}}, {"max_tokens": 9}),
    (CHAT, {"ignore_eos": True, "stop": ["a"]}, {"ignore_eos": True, "stop": ("a",)}),
    (CHAT, {**BEGUN, "stop": "Once", "n": 2}, {"stop": ("Once",)}),
    (CHAT, {**BEGUN, "logprobs": True}, {"top_logprobs": 0}),
    (CHAT, {**JSON, **SPOKEN, "stop": ["}"]}, {"stop": ("}",)}),
    (CHAT, {"top_k": -1, "min_p": 1}, {"top_k": 0, "min_p": 1.0}),
    (CHAT, {"temperature": 0, "n": 2}, {"temperature": 0.0}),
    (CHAT, {"messages": [{"role": "system", "content": "be brief"}]}, {}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "Once"}]}, {}),
    (CHAT, {"stop_token_ids": [5], "allowed_token_ids": [7]}, {"stop_token_ids": (5,)}),
    (RESPONSES, {"input": [{"role": "system", "content": "be brief"}]}, {}),
    (RESPONSES, {"input": [{"role": "assistant", "content": "Once"}]}, {}),
    (RESPONSES, {"max_output_tokens": 5, "store": True, "stream": True}, {"max_tokens": 5}),
    (COMPLETIONS, {"prompt": [[1], [2]], "stream": True, "seed": 5}, {"seed": 5}),
    (SPEECH, {"speed": 0.25}, {}),
    (SPEECH, {"speed": 4, "stream_format": "sse"}, {}),
]

HARMLESS: list[tuple[str, Fields]] = [
    (CHAT, {"audio": {"voice": "ethan", "format": "mp3"}}),
    (CHAT, {"fleet": {"talker": {"temperature": 0.1}}}),
    (CHAT, {"modalities": ["text", "text"]}),
    (CHAT, {"tool_choice": "auto"}),
    (CHAT, {"stop": [], "logit_bias": {}, "allowed_token_ids": [], "n": False}),
    (CHAT, {"stream_options": {"include_obfuscation": True}}),
    (RESPONSES, {"background": False, "messages": [], "user": "x"}),
    (COMPLETIONS, {"best_of": 1, "echo": False, "suffix": "", "logprobs": None}),
    (SPEECH, {"instructions": "", "speed": 1, "voice": ""}),
]


def ask(gateway: ServedGateway, path: str, fields: Fields) -> list[RequestSpec]:
    """Send a request that must be served; return what is submitted for it."""
    gateway.client.reset()
    answer = gateway.http.post(path, json={**BASE[path], **fields})
    assert answer.status_code == 200, answer.text
    return [spec for spec, _ in gateway.client.submitted]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=str)
def test_fields_that_cannot_both_be_kept_are_refused_by_name(
    gateway: ServedGateway, path: str, fields: Fields, param: str
) -> None:
    answer = gateway.http.post(path, json={**BASE[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param), error
    assert not gateway.client.submitted


@pytest.mark.parametrize(("path", "fields", "sampling"), SERVED, ids=str)
def test_fields_that_are_served_reach_the_stage_that_answers(
    gateway: ServedGateway, path: str, fields: Fields, sampling: Fields
) -> None:
    for number, spec in enumerate(ask(gateway, path, fields)):
        main = spec.sampling[MAIN]
        wanted = dict(sampling)
        if "seed" in wanted and "n" in fields:
            wanted["seed"] = (wanted["seed"] + number) % (MAX_SEED + 1)
        assert {name: getattr(main, name) for name in wanted} == wanted
        if "response_format" in fields and path == CHAT:
            assert main.constraint is not None


def comparable(spec: RequestSpec) -> RequestSpec:
    """Return a request without what differs between two equal ones."""
    return msgspec.structs.replace(
        spec,
        id=RequestId(""),
        created_us=0,
        body="",
        sampling={
            name: msgspec.structs.replace(one, seed=0)
            for name, one in spec.sampling.items()
            if one != Sampling()
        },
    )


@pytest.mark.parametrize(("path", "fields"), HARMLESS, ids=str)
def test_harmless_fields_leave_the_request_as_it_is(
    gateway: ServedGateway, path: str, fields: Fields
) -> None:
    with_fields, without = (ask(gateway, path, given) for given in (fields, {}))
    assert [comparable(one) for one in with_fields] == [comparable(one) for one in without]
