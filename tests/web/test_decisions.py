"""Decisions through the OpenAI client: shapes, probabilities, prompts and refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types import Decision

from fleet.core.errors import EngineError
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import Script
from tests.web.test_responses import MAIN
from web.gateway.decision_labels import OptionLabel, probabilities
from web.gateway.live_captures import NO_STORE

PATH = "/v1/decisions"
TRUE: dict[str, Any] = {"type": "predicate", "instructions": "It is about heat.", "name": "heat"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": [
        {"type": "input_text", "text": "Which one?"},
        {"type": "input_json", "data": {"limit": 3}},
    ],
    "choices": [{"value": "true"}, {"value": True, "description": "really"}, {"value": "hot"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "warmth",
    "instructions": "How warm?",
    "levels": [{"label": "cold"}, {"label": "warm"}, {"label": "hot", "description": "40 C"}],
}
ALL = [TRUE, CHOICE, SCORE]


def decide(gateway: ServedGateway, **fields: Any) -> Decision:
    create = cast(Callable[..., Decision], gateway.openai().decisions.create)
    return create(**{"model": "omni", "input": "What is hot?", "questions": ALL, **fields})


def post(gateway: ServedGateway, **fields: Any) -> httpx.Response:
    body = {"model": "omni", "input": "What is hot?", "questions": ALL, **fields}
    return gateway.http.post(PATH, json=body)


def prompts(gateway: ServedGateway) -> list[str]:
    decode = gateway.client.tokenizer.decode
    texts = [decode(s.prompt_ids, skip_special_tokens=False) for s, _ in gateway.client.submitted]
    return sorted(texts, key=lambda text: ("warm?" in text, "Which one?" in text))


def shares_of(gateway: ServedGateway, words: str) -> list[float]:
    """Return the probabilities of the options of the question with `words`, of whose tokens the
    fake fleet gives 0, -1, ... as the log probabilities.
    """
    decode = gateway.client.tokenizer.decode
    (spec,) = [s for s, _ in gateway.client.submitted if words in decode(s.prompt_ids)]
    weights: dict[str, float] = {}
    for number, token in enumerate(spec.sampling[MAIN].logprob_ids):
        label = decode([token]).strip()
        weights[label] = weights.get(label, 0) + math.exp(-number)
    return [weight / sum(weights.values()) for weight in weights.values()]


def test_decision_has_openai_shape_and_the_probabilities_of_the_model(
    gateway: ServedGateway,
) -> None:
    made = decide(gateway)
    Decision.model_validate(made.model_dump())
    heat, choice, score = made.answers
    assert heat.type == "predicate" and heat.name == "heat"
    assert heat.probability == pytest.approx(shares_of(gateway, "about heat")[0])
    assert choice.type == "choice" and choice.name is None
    shares = shares_of(gateway, "Which one?")
    assert [each.value for each in choice.probabilities] == ["true", True, "hot"]
    assert [each.probability for each in choice.probabilities] == pytest.approx(shares)
    assert choice.choice == "true" and choice.confidence == pytest.approx(max(shares))
    assert score.type == "score" and score.name == "warmth"
    shares = shares_of(gateway, "How warm?")
    assert [(each.value, each.label) for each in score.probabilities] == [
        (0, "cold"),
        (1, "warm"),
        (2, "hot"),
    ]
    assert score.score == pytest.approx(shares[1] + 2 * shares[2])
    specs = [spec for spec, _ in gateway.client.submitted]
    assert made.model == "omni" and len(specs) == 3
    assert made.usage.input_tokens == sum(len(spec.prompt_ids) for spec in specs)
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_each_question_is_one_token_that_is_not_trained_on(gateway: ServedGateway) -> None:
    decide(gateway)
    for spec, _ in gateway.client.submitted:
        main = spec.sampling[MAIN]
        assert (main.max_tokens, main.temperature, main.top_logprobs) == (1, 0, 0)
        assert sorted(main.allowed_token_ids) == sorted(main.logprob_ids)
        assert spec.stages == (MAIN,) and spec.reply[NO_STORE]


def test_prompt_has_the_input_then_the_question(gateway: ServedGateway) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_json", "data": [{"celsius": 40}]}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is hot."}]},
    ]
    decide(gateway, input=turns)
    heat, choice, score = prompts(gateway)
    for prompt in (heat, choice, score):
        before = prompt.partition('[{"celsius": 40}]')[0]
        assert "Be brief." in before and "It is hot.<|im_end|>\n<|im_start|>user\n" in prompt
    assert "It is about heat." in heat
    assert 'Which one?\n{"limit": 3}' in choice and "B: true (really)" in choice
    assert "A: cold\nB: warm\nC: hot (40 C)" in score


def test_many_questions_are_answered_in_their_order(gateway: ServedGateway) -> None:
    questions = [{**TRUE, "name": f"q{number}"} for number in range(40)]
    made = decide(gateway, questions=questions)
    assert [answer.name for answer in made.answers] == [f"q{number}" for number in range(40)]
    assert len(gateway.client.submitted) == 40


def test_probability_is_summed_over_the_tokens_of_a_label() -> None:
    labels = [OptionLabel("A", (1, 2)), OptionLabel("B", (3,))]
    told = {1: math.log(0.1), 2: math.log(0.2), 3: math.log(0.1)}
    assert probabilities(labels, told) == pytest.approx([0.75, 0.25])
    assert probabilities(labels, {1: -1000.0, 2: -1000.0, 3: -2000.0}) == [1.0, 0.0]


def test_failure_of_one_question_fails_the_decision(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=0, failure=EngineError("it broke"))
    with pytest.raises(openai.InternalServerError, match="it broke"):
        decide(gateway)


def test_calls_and_outputs_are_a_part_of_the_input(tooled: Loaded) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    with serving(tooled) as gateway:
        decide(gateway, input=[{"role": "user", "content": "when?"}, call, output])
        for prompt in prompts(gateway):
            assert "<tool_response>noon</tool_response>" in prompt
        refused = post(gateway, input=[output])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[0].call_id"


def ask(**fields: Any) -> dict[str, Any]:
    return {"questions": [{**CHOICE, **fields}]}


IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}
CALL = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [CALL]}, "input[0]"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name"),
    ({"input": "<|im_end|>"}, "input"),
    ({"input": "word " * 3_000}, "input"),
    ({"input": [{"role": "user", "content": "a"}] * 8}, "input"),
    ({"questions": []}, "questions"),
    ({"questions": [TRUE] * 401}, "questions"),
    ({"questions": [{"type": "rank", "instructions": "x"}]}, "questions[0]"),
    ({"questions": [{**TRUE, "choices": CHOICE["choices"]}]}, "questions[0].choices"),
    ({"questions": [{**TRUE, "instructions": "<|im_end|>"}]}, "questions[0]"),
    ({"questions": [{**TRUE, "instructions": [IMAGE]}]}, "questions[0].instructions[0]"),
    (ask(choices=CHOICE["choices"][:1]), "questions[0].choices"),
    (ask(choices=CHOICE["choices"] * 2), "questions[0].choices[3].value"),
    (ask(choices=[{"value": 1}, {"value": "a"}]), "questions[0].choices[0].value"),
    (ask(choices=[{"value": str(n)} for n in range(255)]), "questions[0].choices"),
    (ask(weight=2), "questions[0].weight"),
    ({"stream": True}, "stream"),
    ({"any_new_setting": 1}, "any_new_setting"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_wrong_or_unserved_field_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, Any], param: str
) -> None:
    answer = post(gateway, **fields)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param) and error["message"].startswith(param), error
    assert not gateway.client.submitted


def test_decision_is_refused_by_name_where_vllm_is_the_engine(loaded: Loaded) -> None:
    config = loaded.config.model_copy(update={"engine": "vllm"})
    with serving(replace(loaded, config=config)) as gateway:
        answer = post(gateway)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
        assert "on vLLM, without log probabilities" in answer.json()["error"]["message"]
        assert not gateway.client.submitted


def test_harmless_fields_are_accepted(gateway: ServedGateway) -> None:
    answer = post(
        gateway,
        safety_identifier="u",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        prompt_cache_key="k",
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-fleet-ignored"] == "prompt_cache_options, safety_identifier"
