"""The `text` graph on vLLM in real processes, through the `openai` client, compared with
`transformers`.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import validate
from openai import AsyncOpenAI

from fleet.lab.measure.prompts import PROMPTS
from tests.e2e.fleets import ProcessFleet, fleet_up
from tests.vllm.fleets import ON_VLLM, SPLIT, TEXT_FILE, openai_client
from tests.vllm.reference import TIE, ReferenceModel, ReferenceText

MAX_TOKENS = 24
WORDS = " ".join(PROMPTS).split()
QUESTIONS = [
    " ".join(random.Random(number).choices(WORDS, k=1 + number * number)) for number in range(20)
]
"""Questions from one word to several prefill chunks, more of them than the worker has slots."""


@pytest.fixture(scope="module", params=[(), SPLIT], ids=["whole", "split"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessFleet]:
    with fleet_up(
        tmp_path_factory.mktemp("vllm"), *ON_VLLM, *request.param, options=TEXT_FILE
    ) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def reference(fleet: ProcessFleet) -> ReferenceModel:
    return ReferenceModel(Path(fleet.config.checkpoint))


async def ask(client: AsyncOpenAI, question: str, penalty: float = 0.0) -> tuple[str, int]:
    """Return the text of a greedy answer, and its number of tokens."""
    model = (await client.models.list()).data[0].id
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        frequency_penalty=penalty,
        presence_penalty=penalty,
    )
    assert answer.usage is not None and answer.choices[0].message.content is not None
    return answer.choices[0].message.content, answer.usage.completion_tokens


def assert_same_or_tied(
    capsys: pytest.CaptureFixture[str],
    name: str,
    answers: list[tuple[str, int]],
    expected: list[ReferenceText],
) -> None:
    """Compare answers token by token; an answer may diverge only where two tokens were tied. Print
    the number of diverging answers.
    """
    margins = [one.divergence(*answer) for answer, one in zip(answers, expected, strict=True)]
    diverged = [margin for margin in margins if margin is not None]
    with capsys.disabled():
        print(
            f"\n{name}: {len(diverged)} of {len(answers)} answers diverge from transformers at "
            f"a tie below {TIE:g}"
        )
    assert [margin for margin in diverged if margin >= TIE] == []


async def test_greedy_answers_equal_transformers_alone_and_batched(
    fleet: ProcessFleet, reference: ReferenceModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy answers equal `transformers`, first in a batch and then alone, when vLLM has most rows
    of each prompt in its prefix cache.
    """
    expected = [reference.answer(question, MAX_TOKENS) for question in QUESTIONS]
    lengths = [reference.num_tokens(question) for question in QUESTIONS]
    assert min(lengths) < 32 and max(lengths) > 2 * 256, "from less than a block to several chunks"
    first, second = (one.prefixes[-1] for one in expected[:2])
    assert (expected[0].divergence(second, MAX_TOKENS) or 0.0) > TIE, (
        f"the answers depend on the prompts: {first!r}, {second!r}"
    )
    async with openai_client(fleet) as client:
        batched = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
        alone = [await ask(client, question) for question in QUESTIONS]
    assert_same_or_tied(capsys, "batched", batched, expected)
    assert_same_or_tied(capsys, "alone", alone, expected)


async def test_penalties_count_the_tokens_of_the_answer_alone(
    fleet: ProcessFleet, reference: ReferenceModel, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [reference.answer(question, MAX_TOKENS, penalty=1.5) for question in QUESTIONS[:4]]
    assert all(
        one.prefixes[-1] != reference.answer(q, MAX_TOKENS).prefixes[-1]
        for one, q in zip(expected, QUESTIONS, strict=False)
    )
    async with openai_client(fleet) as client:
        answers = await asyncio.gather(
            *(ask(client, question, penalty=1.5) for question in QUESTIONS[:4])
        )
    assert_same_or_tied(capsys, "with penalties", answers, expected)


FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


async def test_answers_in_a_batch_keep_the_rule_of_each(fleet: ProcessFleet) -> None:
    async with openai_client(fleet) as client:
        model = (await client.models.list()).data[0].id

        async def answer(seed: int) -> str:
            rule = {"guided_json": FORM} if seed % 2 else {"regex": "[ab]{3}, (yes|no)"}
            done = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTIONS[seed]}],
                max_tokens=100,
                temperature=(seed % 3) * 0.6,
                seed=seed,
                extra_body=rule,
            )
            assert done.choices[0].finish_reason == "stop"
            return done.choices[0].message.content or ""

        answers = await asyncio.gather(*(answer(seed) for seed in range(12)))
    for seed, text in enumerate(answers):
        if seed % 2:
            validate(json.loads(text), FORM)
        else:
            assert re.fullmatch("[ab]{3}, (yes|no)", text)
    assert len(set(answers)) > 3
