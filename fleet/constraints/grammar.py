"""Constraints as llguidance's grammars. Source: llguidance 1.7 (`LLMatcher`)."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from fleet.constraints.trial import find_failure
from fleet.core.errors import BadInput
from fleet.core.request import Constraint

WHERE = "response_format"
MAX_CAUSE_CHARS = 300
JSON_FORM: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""One form of each JSON text, in which no model can write blanks without end; `oneOf` is read as
`anyOf`, as by OpenAI's strict schemas.
"""


def grammar_of(constraint: Constraint, where: str = WHERE) -> str:
    """Return a constraint as a grammar of llguidance. `where`: name of the input field with the
    constraint, for errors. Raises: BadInput if a schema is not JSON, or a grammar is nested too
    deeply.
    """
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark_of(constraint, where))
    try:
        return LLMatcher.grammar_from_json_schema(constraint.text, overrides=JSON_FORM)
    except ValueError as error:
        raise refused(constraint, str(error), where) from error


def _lark_of(constraint: Constraint, where: str) -> str:
    try:
        return any_to_lark(constraint.text)
    except RecursionError:
        raise refused(constraint, "nested too deeply; make it flatter", where) from None
    except Exception as error:  # the library raises plain Exception for a rule that is missing
        raise refused(constraint, str(error), where) from error


def check_rule(constraint: Constraint, where: str, tokens: LLTokenizer) -> None:
    """Check that a constraint can be compiled, and that an answer can begin under the constraint: a
    rule that no answer satisfies, or that is costly, would fail requests or stall a worker. The
    time is not bounded, so call this in a process that can be killed. `where`: name of the input
    field with the constraint, for errors. `tokens`: the vocabulary of a trial (`trial.vocabulary`).

    Raises: BadInput.
    """
    grammar = grammar_of(constraint, where)
    if message := LLMatcher.validate_grammar(grammar) or find_failure(grammar, tokens):
        raise refused(constraint, message, where)


def choice_of(texts: Sequence[str]) -> Constraint:
    """Return the constraint of an answer that is one of `texts`."""
    options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return Constraint(kind="grammar", text=f"start: {options}")


def refused(constraint: Constraint, message: str, where: str = WHERE) -> BadInput:
    """Return the error of a rule that cannot be compiled or kept."""
    kinds = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar"}
    cause = " ".join(message.split())[:MAX_CAUSE_CHARS]
    return BadInput(f"{where}: the {kinds[constraint.kind]} cannot be used: {cause}", param=where)
