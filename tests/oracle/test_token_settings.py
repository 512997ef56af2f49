"""Settings about single tokens of an answer (biases, allowed tokens, bad words, stop tokens,
min-p): compared with `generate()` of `transformers`, in mixed batches, from any token of the log,
and with drafts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.torch.adjustments import Adjustments
from fleet.graphs import get_graph
from fleet.lab.measure.twin import SlowTwin
from tests.oracle.test_text_engine import (
    FAMILIES,
    LM,
    PROMPTS,
    TEXT,
    answers_of,
    greedy,
    stage,
    write_model,
)
from tests.oracle.twins import tokens_of

pytestmark = pytest.mark.one_file_in(6, "engines")

MAX_TOKENS = 20
EVEN = tuple(range(2, 320, 2))
Settings = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILIES[0], tmp_path_factory.mktemp("lm"))


def settings_of(plain: Sequence[int]) -> list[Settings]:
    """Return settings as `Sampling` and as `generate()` name them. `plain`: the answer without
    them, whose tokens they are about.
    """
    first, second, third = plain[:3]
    return [
        ({"logit_bias": ((first, -100.0),)}, {"sequence_bias": {(first,): -100.0}}),
        (
            {"logit_bias": ((first, -2.5), (7, 3.25)), "repetition_penalty": 1.4},
            {"sequence_bias": {(first,): -2.5, (7,): 3.25}, "repetition_penalty": 1.4},
        ),
        ({"bad_words": ((second, third),)}, {"bad_words_ids": [[second, third]]}),
        ({"bad_words": ((second,), (first, 9))}, {"bad_words_ids": [[second], [first, 9]]}),
        ({"allowed_token_ids": EVEN}, {"prefix_allowed_tokens_fn": lambda _row, _ids: EVEN}),
        ({"stop_token_ids": (third,)}, {"eos_token_id": [1, third]}),
        (
            {"stop_token_ids": (third,), "min_tokens": 6},
            {"eos_token_id": [1, third], "min_new_tokens": 6},
        ),
        ({}, {}),
    ]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_mixed_batch_matches_single_generate_calls(folder: Path, numerics: str) -> None:
    plain = greedy(folder, PROMPTS, MAX_TOKENS)
    jobs = [
        (prompt, own, of_generate)
        for prompt, answer in zip(PROMPTS, plain, strict=True)
        for own, of_generate in settings_of(answer)
    ]
    built = stage(folder, numerics=numerics, speculation={"drafter": "off"})
    made = answers_of(
        built,
        [prompt for prompt, _, _ in jobs],
        lambda n: Sampling(max_tokens=MAX_TOKENS, **jobs[n][1]),
    )
    for (prompt, _, of_generate), answer in zip(jobs, made, strict=True):
        (wanted,) = greedy(folder, [prompt], MAX_TOKENS, **of_generate)
        assert answer == wanted
    assert len({tuple(answer) for answer in made}) > 5 * len(PROMPTS)


def sampled(plain: Sequence[int]) -> list[Sampling]:
    """Return the settings with noise, and with min-p."""
    return [
        Sampling(max_tokens=MAX_TOKENS, temperature=0.9, seed=n, min_p=0.02 * (n % 3), **own)
        for n, (own, _) in enumerate(settings_of(plain))
    ]


def test_answers_are_independent_of_the_batch_and_of_drafts(folder: Path) -> None:
    (plain,) = greedy(folder, PROMPTS[:1], MAX_TOKENS)
    samplings = sampled(plain)
    prompts = [PROMPTS[0]] * len(samplings)
    alone = stage(folder, numerics="invariant", speculation={"drafter": "off"})
    wanted = [answers_of(alone, prompts[:1], lambda _, one=one: one)[0] for one in samplings]
    assert len({tuple(answer) for answer in wanted}) == len(samplings)
    assert answers_of(alone, prompts, lambda n: samplings[n]) == wanted
    for drafter in ("ngram", "suffix"):
        drafted = stage(folder, numerics="invariant", speculation={"drafter": drafter})
        for _ in range(2):  # the second time, earlier answers are drafts
            assert answers_of(drafted, prompts, lambda n: samplings[n]) == wanted
        figures = drafted.engine.stats().speculation
        assert figures is not None and (drafter == "ngram" or sum(figures.accepted) > 0)


def test_answer_continues_from_any_place_of_its_log(folder: Path) -> None:
    (plain,) = greedy(folder, PROMPTS[:1], MAX_TOKENS)
    built = stage(folder, numerics="invariant")
    for sampling in sampled(plain):
        (whole,) = answers_of(built, PROMPTS[:1], lambda _, own=sampling: own)
        specs = [
            RequestSpec(
                id=RequestId(f"{place}"),
                graph="text",
                prompt_ids=tuple(PROMPTS[0]),
                outputs=(TEXT,),
                sampling={LM: sampling},
                given=tuple(whole[:place]),
            )
            for place in range(len(whole))
        ]
        answers = SlowTwin(get_graph("text"), {LM: built}).run(specs)
        assert [tokens_of(answers, spec.id) for spec in specs] == [whole] * len(specs)


def test_answer_that_no_token_may_continue_fails(folder: Path) -> None:
    sampling = Sampling(max_tokens=4, allowed_token_ids=(5, 6), bad_words=((5,), (6,)))
    spec = RequestSpec(
        id=RequestId("r"),
        graph="text",
        prompt_ids=tuple(PROMPTS[0]),
        outputs=(TEXT,),
        sampling={LM: sampling},
    )
    twin = SlowTwin(get_graph("text"), {LM: stage(folder)})
    assert twin.run([spec])[spec.id][TEXT] == []
    error = twin.errors[spec.id]
    assert isinstance(error, BadInput) and "no token is left" in error.message


def test_request_without_these_settings_has_no_adjustments() -> None:
    assert Adjustments.of(Sampling(temperature=0.7, top_k=3, stop=("x",), min_tokens=4)) is None
    for field, value in {
        "min_p": 0.1,
        "logit_bias": ((3, 1.0),),
        "allowed_token_ids": (3,),
        "bad_words": ((3, 4),),
        "stop_token_ids": (3,),
    }.items():
        assert Adjustments.of(msgspec.structs.replace(Sampling(), **{field: value})) is not None
