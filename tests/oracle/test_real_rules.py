"""Answers in a given form and function calls by a real language model, SmolLM2-135M-Instruct: each
answer keeps its JSON schema, and each required call can be read.
"""

from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from fleet.processing.template import load_template
from fleet.processing.tokenizer import load_tokenizer, token_ids
from fleet.processing.tool_calls.formats import FORMATS
from fleet.stages.base import BuiltStage
from tests.oracle import smollm2
from tests.oracle.test_constraints import MAX_TOKENS, SCHEMAS, kept_answers, schema_of, texts
from tests.oracle.test_text_engine import stage
from tests.oracle.test_tool_calls import TOOLS, required_calls

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]

ASKED = (
    "What is {}?",
    "Describe {} in a few words.",
    "Answer in JSON: what do you know of {}?",
    "Write a poem on {}.",
    "How does {} feel in winter?",
)
THINGS = (
    "a cat",
    "the sea",
    "Paris",
    "a small red house",
    "music",
    "the number seven",
    "süßer Kaffee",
    "東京",
    "a tree of trees",
    "nothing",
)


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    cache = pytestconfig.cache
    assert cache is not None, "pytest runs without its cache"
    return smollm2.build_once(Path(cache.mkdir("smollm2")))


@pytest.fixture(scope="module")
def model(folder: Path) -> BuiltStage:
    return stage(folder, speculation={"drafter": "off"}, kv_pages=2048)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Fifty questions as a chat."""
    template, tokenizer = load_template(folder), load_tokenizer(folder)
    questions = [question.format(thing) for question in ASKED for thing in THINGS]
    return [
        token_ids(tokenizer, template.render([{"role": "user", "content": question}]), "")
        for question in questions
    ]


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_a_real_model_keep_the_schema(
    folder: Path, model: BuiltStage, prompts: list[list[int]], name: str
) -> None:
    answers = kept_answers(model, folder, prompts, [schema_of(SCHEMAS[name])])
    num_cut = sum(len(answer) >= MAX_TOKENS for answer in answers)
    different = Counter(texts(folder, answers))
    (example, _), *_ = different.most_common(1)
    print(f"{name}: {len(answers)} answers, {len(different)} different, {num_cut} cut: {example}")


def test_named_calls_of_a_real_model_can_be_read(
    folder: Path, model: BuiltStage, prompts: list[list[int]]
) -> None:
    jobs = list(zip(cycle(FORMATS), prompts, strict=False))
    for tool in TOOLS:
        calls = required_calls(model, folder, jobs, [tool], max_calls=1)
        assert len(calls) == len(jobs) and {name for name, _ in calls} == {tool.name}
        print(f"{tool.name}: {len(calls)} calls, {len(set(calls))} different, e.g. {calls[0]}")
