"""Answers that keep a rule: JSON of a schema, regular expressions, choices, grammars; in batches,
after recovery, with drafts and in invariant numerics.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from fleet.constraints.grammar import choice_of
from fleet.constraints.rules import Constraints
from fleet.core.ids import RequestId
from fleet.core.request import Constraint, RequestSpec, Sampling
from fleet.graphs import get_graph
from fleet.lab.measure.twin import SlowTwin
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.processing.tokenizer import load_tokenizer
from fleet.stages.base import BuiltStage
from tests.oracle.test_text_engine import LM, PROMPTS, TEXT, answers_of, stage
from tests.oracle.twins import tokens_of

pytestmark = pytest.mark.one_file_in(6, "engines")

WORD = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "enumeration": {"enum": ["red", "green", 7, None, True]},
    "array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    "union": {"anyOf": [WORD, {"type": "boolean"}, {"type": "null"}]},
    "recursion": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"enum": [1, 2]},
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-\\d{2}$"},
    "constant": {"const": {"größe": "süß ☕"}},
    "nesting": {
        "type": "object",
        "properties": {
            "city": {
                "type": "object",
                "properties": {"name": WORD, "size": {"enum": ["small", "large"]}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "days": {
                "type": "array",
                "items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "unicode": {
        "type": "object",
        "properties": {"größe": {"enum": ["süß", "大きい", "🙂"]}, "имя": WORD},
        "required": ["größe", "имя"],
        "additionalProperties": False,
    },
    "union of objects": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "word"}, "word": WORD},
                "required": ["kind", "word"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "number"}, "number": {"enum": [1, 2.5, -3]}},
                "required": ["kind", "number"],
                "additionalProperties": False,
            },
        ]
    },
}
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("lm"))


def schema_of(schema: Mapping[str, Any]) -> Constraint:
    return Constraint(kind="json", text=json.dumps(schema))


RULES = [
    *map(schema_of, SCHEMAS.values()),
    Constraint(kind="regex", text="(yes|no), [0-9]{1,3}"),
    choice_of(["left", "right", 'a "quoted" one', "süß\n"]),
    Constraint(kind="grammar", text='start: "begin" (" x" | " y")~2 " end"'),
]


def sampling_of(rule: Constraint, seed: int) -> Sampling:
    return Sampling(max_tokens=MAX_TOKENS, temperature=1.2, seed=seed, constraint=rule)


def texts(folder: Path, answers: list[list[int]]) -> list[str]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(answer) for answer in answers]


def assert_kept(rule: Constraint, text: str) -> None:
    if rule.kind == "json":
        validate(json.loads(text), json.loads(rule.text))
    elif rule.kind == "regex":
        assert re.fullmatch(rule.text, text)
    elif text.startswith("begin"):
        assert re.fullmatch("begin( x| y){2} end", text)
    else:
        assert text in ("left", "right", 'a "quoted" one', "süß\n")


def kept_answers(
    built: BuiltStage, folder: Path, prompts: Sequence[list[int]], rules: Sequence[Constraint]
) -> list[list[int]]:
    """Return the answer to each prompt under each rule, computed in one batch, after checking that
    it keeps the rule. The number of the prompt is the seed.
    """
    jobs = [(rule, prompt, seed) for seed, prompt in enumerate(prompts) for rule in rules]
    answers = answers_of(
        built,
        [prompt for _, prompt, _ in jobs],
        lambda n: sampling_of(jobs[n][0], jobs[n][2]),
    )
    for (rule, _, _), text in zip(jobs, texts(folder, answers), strict=True):
        assert_kept(rule, text)
    return answers


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_answers_in_a_batch_keep_the_rule_of_each(folder: Path, numerics: str) -> None:
    built = stage(folder, numerics=numerics, speculation={"drafter": "off"})
    answers = kept_answers(built, folder, PROMPTS, RULES)
    assert len({tuple(answer) for answer in answers}) > len(RULES)
    for index in (0, 5, 17):
        seed, number = divmod(index, len(RULES))
        if numerics == "invariant":
            own = sampling_of(RULES[number], seed)
            alone = answers_of(built, [PROMPTS[seed]], lambda _, own=own: own)
            assert alone == [answers[index]]


def test_answer_continues_from_any_place_of_its_log(folder: Path) -> None:
    built = stage(folder, numerics="invariant")
    for rule in RULES[::3]:
        sampling = sampling_of(rule, 3)
        (whole,) = answers_of(built, PROMPTS[:1], lambda _, own=sampling: own)
        for place in range(len(whole)):
            spec = RequestSpec(
                id=RequestId(f"{place}"),
                graph="text",
                prompt_ids=tuple(PROMPTS[0]),
                outputs=(TEXT,),
                sampling={LM: sampling},
                given=tuple(whole[:place]),
            )
            answers = SlowTwin(get_graph("text"), {LM: built}).run([spec])
            assert tokens_of(answers, spec.id) == whole


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafts_change_no_answer(folder: Path, drafter: str) -> None:
    plain = stage(folder, numerics="invariant", speculation={"drafter": "off"})
    drafted = stage(folder, numerics="invariant", speculation={"drafter": drafter})
    rules = [rule for rule in RULES for _ in range(2)]

    def sampling(n: int) -> Sampling:
        return sampling_of(rules[n], n // 2 * 2)

    prompts = [PROMPTS[0]] * len(rules)
    assert answers_of(drafted, prompts, sampling) == answers_of(plain, prompts, sampling)
    figures = drafted.engine.stats().speculation
    assert figures is not None and sum(figures.accepted) > 0


def test_answer_that_broke_its_rule_fails(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    end = tokenizer.get_vocab()["<|im_end|>"]
    rules = Constraints(lambda: tokenizer, tokenizer.get_vocab_size(), frozenset([end]))
    open_rule = rules.compile(RULES[0], MAX_TOKENS)
    assert open_rule is not None
    rule = open_rule()
    assert rule.error is None
    rule.add(end)
    assert rule.error is not None and "the JSON schema cannot be used" in rule.error.message
    assert rule.allowed(()) is None
