"""Rules for answers, under the names of OpenAI's API, vLLM and SGLang: which ones reach the model,
and which ones are refused.
"""

import json
from typing import Any

import httpx
import pytest

from fleet.core.ids import StageName
from fleet.core.request import Constraint
from tests.web.conftest import ASK, ServedGateway
from web.schema.chat import parse_chat

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
JSON_RULE = Constraint(kind="json", text=json.dumps(SCHEMA))
REGEX_RULE = Constraint(kind="regex", text="a+")
CHOICE_RULE = Constraint(kind="grammar", text='start: "yes" | "no"')
GBNF = 'root ::= "x" | "y"'
NAMED = 'start: <|im_start|> "a" <[1]>'
"""A grammar with control tokens, by their name and by their id."""
GRAMMAR_RULE = Constraint(kind="grammar", text=GBNF)
ANY_RULE = Constraint(kind="json", text='{"type": "object"}')

SERVED: list[tuple[dict[str, Any], Constraint | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_RULE),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        JSON_RULE,
    ),
    ({"guided_json": SCHEMA}, JSON_RULE),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"}, JSON_RULE),
    ({"guided_regex": "a+"}, REGEX_RULE),
    ({"guided_choice": ["yes", "no"], "guided_json": None, "regex": ""}, CHOICE_RULE),
    ({"guided_grammar": GBNF}, GRAMMAR_RULE),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_RULE),
    ({"structured_outputs": {"regex": "a+"}}, REGEX_RULE),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICE_RULE),
    ({"structured_outputs": {"grammar": GBNF}}, GRAMMAR_RULE),
    ({"structured_outputs": {"json_object": True}}, ANY_RULE),
    ({"json_schema": json.dumps(SCHEMA)}, JSON_RULE),
    *(
        (fields, Constraint(kind="json", text='{"const": null}'))
        for fields in (
            {"guided_json": {"const": None}},
            {"structured_outputs": {"json": {"const": None}}},
        )
    ),
    ({"structured_outputs": {"json": None, "choice": []}, "guided_json": {}}, None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        Constraint(kind="json", text="{}"),
    ),
    ({"regex": "a+"}, REGEX_RULE),
    ({"guided_grammar": NAMED}, Constraint(kind="grammar", text=NAMED)),
    ({"ebnf": GBNF}, GRAMMAR_RULE),
]


@pytest.mark.parametrize(("fields", "rule"), SERVED)
def test_rule_reaches_the_stage_that_answers(
    gateway: ServedGateway, fields: dict[str, Any], rule: Constraint | None
) -> None:
    gateway.create(extra_body=fields)
    ((spec, _),) = gateway.client.submitted
    assert spec.sampling[StageName("thinker")].constraint == rule
    again = parse_chat(spec.body.encode()).rule
    assert (again.constraint if again is not None else None) == rule, "a retry keeps the rule"
    assert all(
        sampling.constraint is None for name, sampling in spec.sampling.items() if name != "thinker"
    )


MANY_PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(40)]}
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
WHERE = "response_format.json_schema.schema"


def of_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, WHERE, "required"),
    "a schema that is none": (of_schema({"type": "objct"}), WHERE, "JSON schema cannot be used"),
    "a text that is no JSON": (of_schema("{"), WHERE, "JSON schema cannot be used"),
    "an unknown format": (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "use one of text, json_object, json_schema",
    ),
    "a keyword that is not kept": (of_schema({"not": {"type": "string"}}), WHERE, "not"),
    "a regular expression that is none": ({"guided_regex": "(a"}, "guided_regex", "expression"),
    "a grammar that is none": ({"ebnf": "root ::= ("}, "ebnf", "grammar cannot be used"),
    "two rules": (
        {"guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
        "guided_regex sets a rule too",
    ),
    "no end": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "remove one of them"),
    "a long rule": ({"guided_regex": "a" * 70_000}, "guided_regex", "shorten it"),
    "patterns that multiply": (of_schema(MANY_PATTERNS), WHERE, "make it simpler"),
    "a schema of itself": (of_schema({"$ref": "#"}), WHERE, "no answer can keep it"),
    "schemas of one another": (of_schema(MUTUAL), WHERE, "no answer can keep it"),
    "an object without end": (of_schema(ENDLESS), WHERE, "JSON schema cannot be used"),
    "a multiple that takes a minute": (
        of_schema({"type": "integer", "multipleOf": 1_000_003}),
        WHERE,
        "make it simpler",
    ),
    "a grammar of itself": ({"guided_grammar": "start: start"}, "guided_grammar", "no answer"),
    "no character": ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no answer can keep it"),
    "an unknown control token": (
        {"guided_grammar": 'start: <|nothing|> "a"'},
        "guided_grammar",
        "unknown special token",
    ),
    "a grammar without a root": ({"ebnf": 'a ::= "x"'}, "ebnf", "No 'root' rule found"),
    "a grammar of a missing rule": ({"ebnf": "root ::= a"}, "ebnf", "Rule 'a' not found"),
    "a deep grammar": (
        {"ebnf": f"root ::= {'(' * 20_000}x{')' * 20_000}"},
        "ebnf",
        "make it flatter",
    ),
    "a rule of another server": (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "no such field",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rule_that_cannot_be_kept_is_refused_by_name(gateway: ServedGateway, case: str) -> None:
    fields, param, words = REFUSED[case]
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={**ASK, **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert not gateway.client.submitted
