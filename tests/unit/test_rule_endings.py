"""Answers that keep a rule end before their limit of tokens, whatever the model prefers."""

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import validate

from fleet.constraints.rules import Constraints, MatchedRule
from fleet.core.request import Constraint
from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
END = TOKENIZER.get_vocab()["<|im_end|>"]
RULES = Constraints(lambda: TOKENIZER, TOKENIZER.get_vocab_size(), frozenset([END]))
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["name", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "two that contain each other": {
        "$defs": {
            "even": {
                "type": "object",
                "properties": {"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}},
                "required": ["odd"],
                "additionalProperties": False,
            },
            "odd": {
                "type": "object",
                "properties": {
                    "count": {"type": "number"},
                    "even": {"$ref": "#/$defs/even"},
                    "note": {"type": "string"},
                },
                "required": ["count", "even"],
                "additionalProperties": False,
            },
        },
        "$ref": "#/$defs/even",
    },
    "a long list": {
        "type": "array",
        "minItems": 3,
        "items": {"type": "object", "properties": {"é": {"type": "string", "minLength": 2}}},
    },
    "words": {"type": "array", "items": {"enum": ["süß", "大きい", "}]", 'a "quoted" one']}},
}


def open_rule(constraint: Constraint, limit: int) -> MatchedRule:
    opened = RULES.compile(constraint, limit)
    assert opened is not None
    return opened()


def allowed_ids(rule: MatchedRule, drafts: list[int]) -> list[int]:
    allowed = rule.allowed(drafts)
    assert allowed is not None and rule.error is None
    return np.flatnonzero(allowed).tolist()


@pytest.mark.parametrize("limit", [48, 100, 300])
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_end_before_the_limit(name: str, limit: int) -> None:
    rule = Constraint(kind="json", text=json.dumps(SCHEMAS[name]))
    for seed in range(6):
        ids = random_answer(open_rule(rule, limit), limit, seed)
        assert ids[-1] == END and len(ids) <= limit
        validate(json.loads(TOKENIZER.decode(ids[:-1])), SCHEMAS[name])


def random_answer(rule: MatchedRule, limit: int, seed: int) -> list[int]:
    """Return an answer of random allowed tokens. At each place, what a rule allows after drafts is
    checked to be what it allows once they are sampled.
    """
    chosen, ids = random.Random(seed), list[int]()
    allowed = allowed_ids(rule, [])
    while len(ids) < limit and END not in ids:
        draft = chosen.choice(allowed)
        after = allowed_ids(rule, [draft]) if draft != END else []
        rule.add(draft)
        ids.append(draft)
        allowed = after and allowed_ids(rule, [])
        assert allowed == after
    return ids


@pytest.mark.parametrize(
    "free",
    [Constraint(kind="regex", text="(.|\n)*"), Constraint(kind="grammar", text="start: /[a-z ]+/")],
)
def test_text_that_may_end_anywhere_goes_on_to_the_limit(free: Constraint) -> None:
    rule, limit = open_rule(free, 40), 40
    for _ in range(limit):
        going_on = [token for token in allowed_ids(rule, []) if token != END]
        rule.add(going_on[0])
    assert rule.error is None


def test_limit_too_small_for_any_answer_changes_nothing() -> None:
    schema = {"type": "object", "properties": {"a": {"const": "x" * 50}}, "required": ["a"]}
    short, long = (
        open_rule(Constraint(kind="json", text=json.dumps(schema)), limit) for limit in (5, 500)
    )
    assert allowed_ids(short, []) == allowed_ids(long, [])
