"""Stored responses: conversations that continue from them, owners, deletion, and input items."""

import itertools
import re
from typing import Literal

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import EasyInputMessageParam

from fleet.core.errors import RedisUnreachable
from fleet.core.request import session_name
from tests.web.conftest import KEY, Loaded, ServedGateway, bearer, bounded, serving
from tests.web.fake_client import Script
from web.gateway.live_captures import NO_STORE
from web.openai.responses import conversation

PATH = "/v1/responses"


def respond(gateway: ServedGateway, **fields: object) -> httpx.Response:
    return gateway.http.post(PATH, json={"model": "omni", "input": "hello", **fields})


def prompts(gateway: ServedGateway) -> list[str]:
    decode = gateway.client.tokenizer.decode
    return [decode(spec.prompt_ids) for spec, _ in gateway.client.submitted]


def assert_missing(client: OpenAI, response_id: str) -> None:
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(response_id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="omni", input="and?", previous_response_id=response_id)
    assert refused.value.param == "previous_response_id"


def test_response_continues_a_conversation_at_any_gateway(
    gateway: ServedGateway, loaded: Loaded
) -> None:
    create = gateway.openai().responses.create
    first = create(model="omni", input="what is hot", instructions="be brief")
    second = create(model="omni", input="and cold", previous_response_id=first.id)
    with serving(loaded, client=gateway.client) as other:
        third = other.openai().responses.create(
            model="omni", input="and warm", previous_response_id=second.id
        )
    assert third.previous_response_id == second.id
    turns = [
        {"role": "user", "content": "what is hot"},
        {"role": "assistant", "content": Script().text},
        {"role": "user", "content": "and cold"},
        {"role": "assistant", "content": Script().text},
        {"role": "user", "content": "and warm"},
    ]
    gateway.create(messages=turns)
    *_, by_id, by_messages = prompts(gateway)
    assert by_id == by_messages and "be brief" in prompts(gateway)[0]
    sessions = [spec.session for spec, _ in gateway.client.submitted]
    assert sessions[:3] == ["", session_name(first.id), session_name(first.id)]


def test_conversation_may_fork_and_outlives_a_deleted_response(gateway: ServedGateway) -> None:
    client = gateway.openai()
    first = client.responses.create(model="omni", input="one")
    second = client.responses.create(model="omni", input="two", previous_response_id=first.id)
    client.responses.delete(first.id)
    assert_missing(client, first.id)
    for text in ("three", "four"):
        client.responses.create(model="omni", input=text, previous_response_id=second.id)
        assert "one" in prompts(gateway)[-1] and text in prompts(gateway)[-1]
    assert "three" not in prompts(gateway)[-1]


def test_stored_response_is_that_which_was_sent(gateway: ServedGateway) -> None:
    gateway.client.script = Script(end_token=False)
    sent = respond(gateway, metadata={"a": "b"}, max_output_tokens=4).json()
    assert sent["status"] == "incomplete" and sent["store"] is True
    assert gateway.http.get(f"{PATH}/{sent['id']}").json() == sent
    deleted = gateway.http.delete(f"{PATH}/{sent['id']}").json()
    assert deleted == {"id": sent["id"], "object": "response", "deleted": True}


def test_response_with_store_false_is_not_kept_or_trained_on(gateway: ServedGateway) -> None:
    answer = gateway.openai().responses.create(model="omni", input="hello", store=False)
    assert (answer.model_extra or {})["store"] is False
    assert_missing(gateway.openai(), answer.id)
    assert not gateway.client.responses.records
    assert gateway.client.submitted[0][0].reply[NO_STORE]


def test_response_belongs_to_the_key_that_asked_for_it(gateway: ServedGateway) -> None:
    anna, ben = gateway.openai("anna"), gateway.openai("ben")
    answer = anna.responses.create(model="omni", input="hello")
    assert_missing(ben, answer.id)
    assert gateway.http.get(f"{PATH}/{answer.id}").status_code == 404
    assert anna.responses.retrieve(answer.id).id == answer.id
    record = b"".join(record for _, record in gateway.client.responses.records.values())
    assert b"anna" not in record


def test_response_belongs_to_the_name_of_its_key(loaded: Loaded) -> None:
    """A key that replaces another one under its name owns the same responses."""
    client = loaded.fake_client()
    with serving(loaded, KEY, client) as gateway:
        answer = gateway.openai(KEY).responses.create(model="omni", input="hello")
        assert gateway.openai(KEY).responses.retrieve(answer.id).id == answer.id
    with serving(loaded, "another key", client) as gateway:
        assert gateway.openai("another key").responses.retrieve(answer.id).id == answer.id
    with serving(loaded, None, client) as gateway:
        assert_missing(gateway.openai(KEY), answer.id)


def test_input_items_are_listed_in_pages(gateway: ServedGateway) -> None:
    client = gateway.openai()
    turns: list[EasyInputMessageParam] = [
        {"role": "developer", "content": "0"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    answer = client.responses.create(model="omni", input=[*turns])
    orders: tuple[Literal["asc", "desc"], ...] = ("asc", "desc")
    for order, limit in itertools.product(orders, (1, 3, 100)):
        items = list(client.responses.input_items.list(answer.id, order=order, limit=limit))
        texts = re.findall(r"'text': '(\d)'", str([item.to_dict() for item in items]))
        assert texts == (list("0123") if order == "asc" else list("3210"))
    listed = gateway.http.get(f"{PATH}/{answer.id}/input_items", headers=bearer("none")).json()
    kinds = [part["type"] for item in listed["data"] for part in item["content"]]
    assert kinds == ["input_text", "output_text", "input_text", "input_text"]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        path = f"{PATH}/{answer.id}/input_items?{query}"
        wrong = gateway.http.get(path, headers=bearer("none"))
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param


def test_too_large_conversation_is_answered_and_not_stored(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MAX_STORED_CHARS", 5)
    answer = respond(gateway, input="hello there").json()
    assert answer["store"] is False and "characters" in answer["warnings"][0]
    refused = respond(gateway, input="hello there", store=True)
    assert refused.status_code == 413 and refused.json()["error"]["param"] == "store"
    assert not gateway.client.responses.records and respond(gateway).json()["store"] is True


def test_gateway_without_retention_stores_nothing(loaded: Loaded) -> None:
    with serving(bounded(loaded, response_retention_s=0)) as gateway:
        answer = respond(gateway).json()
        assert answer["store"] is False and "warnings" not in answer
        refused = respond(gateway, store=True)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "store"
        assert_missing(gateway.openai(), answer["id"])


def test_long_conversation_is_refused_by_the_limit_of_messages(gateway: ServedGateway) -> None:
    answer = respond(gateway)
    for _ in range(10):
        before = answer.json()["id"]
        answer = respond(gateway, previous_response_id=before)
        if answer.status_code != 200:
            break
    assert answer.status_code == 413 and answer.json()["error"]["param"] == "input"


def test_unreachable_redis_is_answered_503(gateway: ServedGateway) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    assert respond(gateway, previous_response_id="resp_1").status_code == 503
    assert gateway.http.get(f"{PATH}/resp_1").status_code == 503
