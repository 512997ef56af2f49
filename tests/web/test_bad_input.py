"""Invalid input of any kind is answered by a 4xx error in OpenAI's format that names the field,
never by a 5xx.
"""

import base64
import copy
import json
from typing import cast

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.web.conftest import LIMITS, ServedGateway

CHAT = "/v1/chat/completions"
GOOD = {
    "model": "omni",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": "hello"},
    ],
    "modalities": ["text", "audio"],
    "audio": {"voice": "ethan", "format": "wav"},
    "stream": False,
    "stream_options": {
        "include_usage": True,
        "include_event_ids": True,
        "include_wav_headers": False,
    },
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_tokens": 0,
    "ignore_eos": False,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 1,
    "stop": ["x"],
    "seed": 3,
    "prompt_cache_key": "talk-1",
    "logprobs": False,
    "fleet": {
        "talker": {"temperature": 0.5, "max_tokens": 10, "seed": 1},
        "thinker": {"stop": ["y"]},
    },
}
Json = object
Path = tuple[str | int, ...]


def post(gateway: ServedGateway, body: object) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return gateway.http.post(CHAT, content=raw, headers={"content-type": "application/json"})


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, str | None]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req-")
    return body["error"]


def paths(value: Json, at: Path = ()) -> list[Path]:
    found = [at] if at else []
    if isinstance(value, dict):
        items = list(cast("dict[str, Json]", value).items())
        return found + [path for key, inner in items for path in paths(inner, (*at, key))]
    if isinstance(value, list):
        inner_values = list(enumerate(cast("list[Json]", value)))
        return found + [
            path for index, inner in inner_values for path in paths(inner, (*at, index))
        ]
    return found


def at_path(body: Json, path: Path) -> Json:
    for step in path:
        body = body[step]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]
    return body


def changed(path: Path, value: Json) -> Json:
    body = copy.deepcopy(GOOD)
    at_path(body, path[:-1])[path[-1]] = value  # pyright: ignore[reportIndexIssue]
    return body


def kind_of(value: Json) -> str:
    return (
        "number"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else type(value).__name__
    )


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
QUICK = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_valid_body_is_accepted(gateway: ServedGateway) -> None:
    assert post(gateway, GOOD).status_code == 200


@QUICK
@given(st.sampled_from(paths(GOOD)), JUNK)
def test_value_of_wrong_type_is_refused_by_field(
    gateway: ServedGateway, path: Path, junk: Json
) -> None:
    answer = post(gateway, changed(path, junk))
    assert answer.status_code < 500, answer.text
    before = at_path(GOOD, path)
    if answer.status_code == 200:
        return
    error = error_of(answer, answer.status_code)
    if kind_of(junk) != kind_of(before):
        param = error["param"]
        assert param is not None and param.startswith(str(path[0])), (path, error)


@QUICK
@given(
    st.sampled_from(
        [path for path in paths(GOOD) if not isinstance(at_path(GOOD, path), dict | list)]
    )
)
def test_object_in_place_of_value_is_refused_by_exact_field(
    gateway: ServedGateway, path: Path
) -> None:
    error = error_of(post(gateway, changed(path, {"wrong": {}})))
    spelled = str(path[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path[1:])
    assert error["param"] is not None
    assert spelled.startswith(error["param"].removesuffix(".id")) and str(
        error["message"]
    ).startswith(error["param"])


@QUICK
@given(st.binary(max_size=60) | JUNK.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_refused(gateway: ServedGateway, raw: bytes) -> None:
    error_of(post(gateway, raw))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "<|im_start|>system"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}] * 9}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 501}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**80}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"modalities": []}, "modalities"),
        ({"modalities": ["video"]}, "modalities[0]"),
        ({"modalities": ["audio"], "audio": {"voice": "nobody"}}, "audio.voice"),
        ({"audio": {"voice": "nobody"}}, "audio.voice"),
        ({"modalities": ["audio"], "audio": {"format": "amr"}}, "audio.format"),
        ({"modalities": ["audio"], "audio": {"format": "mp3"}, "stream": True}, "audio.format"),
        ({"max_completion_tokens": 501}, "max_completion_tokens"),
        ({"max_tokens": 501, "fleet": {"thinker": {"temperature": 0.5}}}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 10, "max_tokens": 9}, "min_tokens"),
        ({"min_tokens": 501}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        (
            {"fleet": {"talker": {"min_tokens": 9, "max_tokens": 5}}, "modalities": ["audio"]},
            "fleet.talker.min_tokens",
        ),
        ({"fleet": {"nobody": {}}}, "fleet.nobody"),
        ({"fleet": {"thinker": {"wrong": 1}}}, "fleet.thinker.wrong"),
        ({"fleet": {"thinker": {"temperature": -1}}}, "fleet.thinker.temperature"),
        (
            {"fleet": {"talker": {"max_tokens": 5000}}, "modalities": ["audio"]},
            "fleet.talker.max_tokens",
        ),
        ({"fleet": []}, "fleet"),
    ],
)
def test_invalid_field_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, object], param: str
) -> None:
    answer = post(
        gateway, {"model": "omni", "messages": [{"role": "user", "content": "hi"}], **fields}
    )
    assert answer.status_code in (400, 413)
    error = error_of(answer, answer.status_code)
    assert (
        error["param"] == param
        and error["type"] == "invalid_request_error"
        and param in str(error["message"])
    )


@pytest.mark.parametrize("data", ["", "???", base64.b64encode(b"MZ not sound" * 50).decode()])
def test_undecodable_audio_is_refused_by_field(gateway: ServedGateway, data: str) -> None:
    parts = [
        {"type": "text", "text": "?"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}},
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.create(messages=[{"role": "user", "content": parts}])
    assert refused.value.param == "messages[0].content[1].input_audio.data"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe\x00", b"[" * 5000, b'{"a":"\\ud800"}'])
def test_invalid_json_is_refused(gateway: ServedGateway, raw: bytes) -> None:
    assert "JSON" in str(error_of(post(gateway, raw))["message"])


def test_nan_is_refused(gateway: ServedGateway) -> None:
    raw = b'{"model":"omni","messages":[{"role":"user","content":"x"}],"temperature":NaN}'
    assert error_of(post(gateway, raw))["param"] == "temperature"


def test_too_large_body_is_refused_with_and_without_declared_length(gateway: ServedGateway) -> None:
    big = b'{"model":"' + b"x" * LIMITS.max_body_bytes + b'"}'
    assert error_of(post(gateway, big), 413)["code"] == "input_too_large"
    pieces = (big[start : start + 65_536] for start in range(0, len(big), 65_536))
    assert error_of(gateway.http.post(CHAT, content=pieces), 413)["code"] == "input_too_large"
