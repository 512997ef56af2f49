"""Fields of a chat about single tokens of its answer: what reaches the stage that answers, what is
refused, and how an answer ends at a stop token.
"""

from typing import Any

import pytest

from fleet.core.ids import StageName
from fleet.core.request import Sampling
from fleet.processing.tokenizer import load_tokenizer
from tests.web.conftest import Loaded, ServedGateway, chat
from tests.web.fake_client import Script
from web.schema.chat import parse_chat

THINKER = StageName("thinker")


def main_of(gateway: ServedGateway) -> Sampling:
    ((spec, _),) = gateway.client.submitted
    assert parse_chat(spec.body.encode()).model == "omni", "a retry reads the body again"
    return spec.sampling[THINKER]


def test_fields_reach_the_stage_that_answers(gateway: ServedGateway, loaded: Loaded) -> None:
    tokenizer = load_tokenizer(loaded.checkpoint)
    answer = chat(
        gateway,
        logit_bias={"7": -100, "5": 2.5},
        allowed_token_ids=[9, 4, 9],
        stop_token_ids=[3],
        bad_words=["answer"],
        min_p=0.25,
    )
    assert answer.status_code == 200, answer.text
    main = main_of(gateway)
    assert main.logit_bias == ((7, -100.0), (5, 2.5)) and main.min_p == 0.25
    assert (main.allowed_token_ids, main.stop_token_ids) == ((4, 9), (3,))
    bare = tuple(tokenizer.encode("answer", add_special_tokens=False).ids)
    assert main.bad_words[0] == bare
    for word in main.bad_words:
        assert tokenizer.decode(list(word)).strip() == "answer"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"70000000": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias.01"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(n): 0 for n in range(301)}}, "logit_bias"),
        ({"stop_token_ids": [70_000_000]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"min_p": 1.5}, "min_p"),
    ],
)
def test_value_out_of_range_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, Any], param: str
) -> None:
    answer = chat(gateway, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and not gateway.client.submitted


def test_text_of_a_stop_token_is_not_shown(gateway: ServedGateway, loaded: Loaded) -> None:
    tokenizer = load_tokenizer(loaded.checkpoint)
    ids = tokenizer.encode(Script().text, add_special_tokens=False).ids
    gateway.client.script.end_token = False
    answer = gateway.create(extra_body={"stop_token_ids": [ids[-1]], "max_tokens": len(ids)})
    shown = [token for token in ids if token != ids[-1]]
    assert answer.choices[0].message.content == tokenizer.decode(shown)
    assert answer.choices[0].finish_reason == "stop"
