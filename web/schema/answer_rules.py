"""Rules that a request sets for its answer, under the names of OpenAI's API, vLLM and SGLang.

Sources: openai 3.57 types (`response_format`), vllm 0.32 (`StructuredOutputsParams`, and the
earlier `guided_` fields), sglang 0.5 (`json_schema`, `regex`, `ebnf`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field

from fleet.constraints.grammar import choice_of
from fleet.core.errors import BadInput
from fleet.core.request import Constraint
from web.schema.body import Body
from web.schema.token_fields import unset
from web.schema.unserved import check_format

MAX_RULE_CHARS = 65_536
MAX_CHOICES = 1000
ANY_OBJECT = Constraint(kind="json", text='{"type": "object"}')
ValueT = TypeVar("ValueT")


Schema = Annotated[dict[str, Any] | str | None, BeforeValidator(unset)]
RuleText = Annotated[str | None, BeforeValidator(unset)]
Choices = Annotated[
    Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_CHOICES, fail_fast=True)
    ]
    | None,
    BeforeValidator(unset),
]


class AnswerRule(NamedTuple):
    """Rule for an answer, and the field that sets it."""

    where: str
    constraint: Constraint


class JsonSchemaFormat(Body):
    """A named JSON schema. Every answer conforms to the schema, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | str | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's rule: free text, any JSON object, or JSON of a schema."""

    type: Annotated[Literal["text", "json_object", "json_schema"], BeforeValidator(check_format)]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """Rules for an answer in the form of vLLM, of which a request may set one."""

    json_: Schema = Field(default=None, alias="json")
    regex: RuleText = None
    choice: Choices = None
    grammar: RuleText = None
    json_object: bool | None = None


class AnswerRules(Body):
    """The fields of a request that set a rule for its answer."""

    response_format: Annotated[ResponseFormat | None, BeforeValidator(unset)] = None
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(unset)] = None
    guided_json: Schema = None
    guided_regex: RuleText = None
    guided_choice: Choices = None
    guided_grammar: RuleText = None
    json_schema: Schema = None
    regex: RuleText = None
    ebnf: RuleText = None

    def find_rule(self) -> AnswerRule | None:
        """Return the rule for the answer; None for free text.

        Raises: BadInput if two fields set rules, or a rule is too long.
        """
        found = list(self._rules())
        for where, constraint in found:
            if len(constraint.text) > MAX_RULE_CHARS:
                reason = f"more than {MAX_RULE_CHARS} characters; shorten it"
                raise BadInput(f"{where}: {reason}", param=where)
        if len(found) > 1:
            first, second = found[0].where, found[1].where
            raise BadInput(f"{second}: {first} sets a rule too; send only one", param=second)
        return found[0] if found else None

    def _rules(self) -> Iterator[AnswerRule]:
        if (chosen := self.response_format) is not None:
            yield from _rules_of_format(chosen)
        if (vllm := self.structured_outputs) is not None:
            where = "structured_outputs"
            yield from _rule(f"{where}.json", vllm.json_, json_rule)
            yield from _rule(f"{where}.regex", vllm.regex, regex_rule)
            yield from _rule(f"{where}.choice", vllm.choice, choice_of)
            yield from _rule(f"{where}.grammar", vllm.grammar, grammar_rule)
            yield from _rule(f"{where}.json_object", vllm.json_object or None, lambda _: ANY_OBJECT)
        yield from _rule("guided_json", self.guided_json, json_rule)
        yield from _rule("guided_regex", self.guided_regex, regex_rule)
        yield from _rule("guided_choice", self.guided_choice, choice_of)
        yield from _rule("guided_grammar", self.guided_grammar, grammar_rule)
        yield from _rule("json_schema", self.json_schema, json_rule)
        yield from _rule("regex", self.regex, regex_rule)
        yield from _rule("ebnf", self.ebnf, grammar_rule)


def _rules_of_format(chosen: ResponseFormat) -> Iterator[AnswerRule]:
    where = "response_format"
    schema = chosen.json_schema.schema_ if chosen.json_schema is not None else None
    return format_rules(chosen.type, schema, where, f"{where}.json_schema.schema")


def format_rules(
    kind: str, schema: Mapping[str, Any] | str | None, where: str, schema_where: str
) -> Iterator[AnswerRule]:
    """Yield the rule for an answer in OpenAI's form, whose type is `kind`; nothing for free text.
    `where`, `schema_where`: names of the type's field and of the schema's field, for errors.
    Raises: BadInput if the schema is missing.
    """
    if kind == "json_object":
        yield AnswerRule(where, ANY_OBJECT)
    elif kind == "json_schema":
        if schema is None:
            raise BadInput(f"{schema_where}: this field is required", param=schema_where)
        yield from _rule(schema_where, schema, json_rule)


def _rule(
    where: str, value: ValueT | None, constraint: Callable[[ValueT], Constraint]
) -> Iterator[AnswerRule]:
    if value is not None:
        yield AnswerRule(where, constraint(value))


def json_rule(schema: Mapping[str, Any] | str) -> Constraint:
    """Return the rule of a JSON schema, given as an object or as its text."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint(kind="json", text=text)


def regex_rule(text: str) -> Constraint:
    """Return the rule of a regular expression for the whole answer."""
    return Constraint(kind="regex", text=text)


def grammar_rule(text: str) -> Constraint:
    """Return the rule of a grammar in Lark's or llama.cpp's (GBNF) form."""
    return Constraint(kind="grammar", text=text)
