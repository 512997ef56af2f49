"""Decisions of a real language model, SmolLM2-135M-Instruct, in a fleet of processes: each
probability is what `transformers` computes for the same prompt.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from openai import OpenAI
from openai.types import Decision

from tests.e2e.fleets import ProcessFleet, fleet_up
from tests.oracle import smollm2

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

FACTS = (
    ("The sky is blue on a clear day.", "What is said is about the sky."),
    ("I love this place, it is wonderful!", "The writer is happy."),
    ("Paris is the capital of France.", "The text names a city."),
    ("My flight was cancelled and nobody helped me.", "The writer complains."),
)
TOPICS = ("sport", "cooking", "weather", "money")
MOODS = ("very bad", "bad", "neither", "good", "very good")
MOST_DIFFERENT = 2e-3
"""Largest difference of a probability: the engine computes several prompts in one pass."""


@pytest.fixture(scope="module")
def weights(pytestconfig: pytest.Config) -> Path:
    cache = pytestconfig.cache
    assert cache is not None, "pytest runs without its cache"
    return smollm2.build_once(Path(cache.mkdir("smollm2")))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[ProcessFleet]:
    settings = ("graph=text", f"checkpoint={weights}", "device=cpu", "web.port=0")
    with fleet_up(tmp_path_factory.mktemp("fleet"), *settings) as fleet:
        yield fleet


class TransformersModel:
    """`transformers` with the same weights."""

    def __init__(self, weights: Path) -> None:
        library: Any = import_module("transformers")
        self._tokenizer = library.AutoTokenizer.from_pretrained(weights)
        self._model = library.AutoModelForCausalLM.from_pretrained(weights, dtype="float32").eval()

    def shares(self, prompt_ids: list[int], labels: list[str]) -> list[float]:
        """Return the probability of each label as the next token, with and without a space before
        the label, given that the next token is a label.
        """
        torch: Any = import_module("torch")
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt_ids])).logits[0, -1].softmax(-1)
        weights = [sum(float(logits[token]) for token in self._ids(label)) for label in labels]
        return [weight / sum(weights) for weight in weights]

    def _ids(self, label: str) -> set[int]:
        ways = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (label, f" {label}")
        )
        return {ids[0] for ids in ways if len(ids) == 1}


@pytest.fixture(scope="module")
def oracle(weights: Path) -> TransformersModel:
    return TransformersModel(weights)


def prompts_of(fleet: ProcessFleet, text: str) -> list[tuple[str, list[int]]]:
    """Return the prompts of all requests with `text`, as text and as tokens."""
    rows = fleet.get("/v1/fleet/requests?limit=200")["data"]
    traces = [fleet.get(f"/v1/fleet/requests/{row['id']}") for row in rows]
    return [(each["prompt"], each["prompt_ids"]) for each in traces if text in each["prompt"]]


def test_probabilities_are_those_of_transformers(
    fleet: ProcessFleet, oracle: TransformersModel
) -> None:
    questions: list[dict[str, Any]] = [
        {
            "type": "choice",
            "instructions": "What is the topic?",
            "choices": [{"value": topic} for topic in TOPICS],
        },
        {
            "type": "score",
            "instructions": "How does the writer feel?",
            "levels": [{"label": mood} for mood in MOODS],
        },
    ]
    num_compared, right = 0, 0
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        decide = cast(Callable[..., Decision], client.decisions.create)
        for fact, statement in FACTS:
            predicate = {"type": "predicate", "instructions": statement}
            made = decide(model=model, input=fact, questions=[predicate, *questions])
            found = prompts_of(fleet, fact)
            assert len(found) == len(questions) + 1
            heat, topic, mood = made.answers
            assert heat.type == "predicate" and topic.type == "choice" and mood.type == "score"
            right += heat.probability > 0.5
            told = {
                statement: (["Yes", "No"], [heat.probability, 1 - heat.probability]),
                "the topic?": (list("ABCD"), [each.probability for each in topic.probabilities]),
                "feel?": (list("ABCDE"), [each.probability for each in mood.probabilities]),
            }
            for words, (labels, shares) in told.items():
                (prompt_ids,) = [ids for prompt, ids in found if words in prompt]
                expected = oracle.shares(prompt_ids, labels)
                assert shares == pytest.approx(expected, abs=MOST_DIFFERENT), (fact, words)
                num_compared += len(shares)
    print(f"{num_compared} probabilities equal; {right} of {len(FACTS)} statements taken as true")
