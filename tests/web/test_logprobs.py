"""Log probabilities of an answer's tokens in the shape of OpenAI's chat completions: whole,
streamed and resumed.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletionTokenLogprob
from tokenizers import Tokenizer

from fleet.processing.token_bytes import TokenBytes
from fleet.processing.tokenizer import load_tokenizer
from tests.unit.test_processing_text import BYTES, FALLBACK
from tests.web.conftest import Loaded, ServedGateway, chat
from tests.web.test_resume import events

ASKED = {"logprobs": True, "top_logprobs": 2}


def ids_of(loaded: Loaded, text: str) -> list[int]:
    return load_tokenizer(loaded.checkpoint).encode(text, add_special_tokens=False).ids


def told(tokens: list[ChatCompletionTokenLogprob] | None) -> list[tuple[str, float]]:
    assert tokens is not None
    for number, one in enumerate(tokens):
        assert one.bytes is not None and bytes(one.bytes).decode("utf-8", "replace") == one.token
        assert [top.logprob for top in one.top_logprobs] == [0.0, -1.0], number
    return [(one.token, one.logprob) for one in tokens]


def test_whole_and_streamed_answers_tell_every_token_of_their_text(
    gateway: ServedGateway, loaded: Loaded
) -> None:
    gateway.client.script.text = text = "Grüße ☕ from here"
    (choice,) = gateway.create(**ASKED).choices
    assert choice.logprobs is not None and choice.logprobs.refusal is None
    whole = told(choice.logprobs.content)
    assert [logprob for _, logprob in whole] == [
        -number / 8 for number in range(len(ids_of(loaded, text)))
    ], "the end token is not told"
    content = choice.logprobs.content or []
    assert b"".join(bytes(one.bytes or []) for one in content).decode() == text
    streamed: list[tuple[str, float]] = []
    shown = sent = ""
    for chunk in gateway.stream(**ASKED):
        (part,) = chunk.choices
        shown += part.delta.content or ""
        if part.logprobs is not None:
            streamed += told(part.logprobs.content)
            sent += part.delta.content or ""
    assert streamed == whole and sent == shown == text


def test_answer_without_the_field_tells_nothing(gateway: ServedGateway) -> None:
    assert gateway.create().choices[0].logprobs is None
    assert gateway.create(logprobs=False, top_logprobs=0).choices[0].logprobs is None
    assert all(chunk.choices[0].logprobs is None for chunk in gateway.stream())
    (spec, _), *_ = gateway.client.submitted
    assert spec.sampling["thinker"].is_plain  # type: ignore[index]


def test_tokens_that_a_stop_string_cuts_off_are_not_told(
    gateway: ServedGateway, loaded: Loaded
) -> None:
    gateway.client.script.text = "one two three four"
    (choice,) = gateway.create(logprobs=True, stop=[" three"]).choices
    assert choice.message.content == "one two" and choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(one.bytes or []) for one in content) == b"one two"
    assert all(one.top_logprobs == [] for one in content)


def test_resumed_answer_tells_the_rest(gateway: ServedGateway) -> None:
    options = {"include_event_ids": True}
    whole = events(chat(gateway, **ASKED, stream=True, stream_options=options).text)
    request = gateway.client.submitted[0][0].id
    assert len(logprobs_in(whole)) > 3
    for number, (event_id, _) in enumerate(whole):
        if event_id:
            rest = gateway.http.get(
                f"/v1/fleet/requests/{request}/stream", headers={"last-event-id": event_id}
            )
            assert logprobs_in(events(rest.text)) == logprobs_in(whole[number + 1 :])


def logprobs_in(found: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, float]]:
    choices = [choice for _, data in found for choice in data.get("choices", [])]
    parts = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"] is not None]
    return [(one["token"], one["logprob"]) for part in parts for one in part]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "modalities": ["text", "audio"]}, "logprobs"),
    ],
)
def test_impossible_request_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, Any], param: str
) -> None:
    answer = chat(gateway, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte level", "byte fallback"])
def test_bytes_of_tokens_joined_are_the_text(tokenizer: Tokenizer) -> None:
    bytes_of = TokenBytes(tokenizer)
    text = "a☕ üa" if tokenizer is BYTES else "a☕ helloa"
    ids = tokenizer.encode(text.replace(" ", "▁") if tokenizer is FALLBACK else text).ids
    assert b"".join(map(bytes_of.of, ids)).decode() == text
    assert bytes_of.of(10**6) == b""
