"""A model divided among an anchor and span workers answers as one process does, also while workers are killed."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from fleet.core.request import Sampling
from fleet.core.span_messages import Returned
from fleet.graphs.text import LM
from fleet.stages.base import BuildOptions
from fleet.stages.text import build
from tests.oracle.test_text_engine import Family, write_model
from tests.span_route import Engine, EngineDriver, SpanRoute, anchor_options, open_route
from tests.support import wait_until

NUM_LAYERS = 4
MODEL = Family(name="Qwen3", more={"head_dim": 12, "num_hidden_layers": NUM_LAYERS})
LAYOUTS: dict[str, tuple[str, Returned, tuple[str, ...]]] = {
    "forward, 1": ("0:1", "logits", ("2:output",)),
    "forward, 2": ("0:0", "logits", ("1:2", "3:output")),
    "forward, 3": ("0:0", "logits", ("1:1", "2:2", "3:output")),
    "head on the anchor": ("0:0", "last_rows", ("1:1", "2:last")),
    "reverse, 1": ("2:output", "rows", ("0:1",)),
    "reverse, 2": ("3:output", "rows", ("0:0", "1:2")),
    "reverse, 3": ("3:output", "rows", ("0:0", "1:1", "2:2")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(MODEL, tmp_path_factory.mktemp("model"))


def prompts_of(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(rng.randrange(1, 40))] for _ in range(number)]


def sampling_of(number: int, max_tokens: int) -> Sampling:
    if number % 2 == 0:
        return Sampling(max_tokens=max_tokens)
    return Sampling(max_tokens=max_tokens, temperature=0.9, seed=number, repetition_penalty=1.2, top_p=0.95)


def submit_all(answers: EngineDriver, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    for number, ids in enumerate(prompts):
        answers.submit(f"r{number}", ids, sampling_of(number, max_tokens))


def whole_answers(model: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, list[int]]:
    built = build(BuildOptions(stage=LM, checkpoint=model, numerics="invariant"))
    answers = EngineDriver(cast(Engine, built.engine))
    submit_all(answers, prompts, max_tokens)
    return answers.run()


def options_of(model: Path, layout: str, **options: object) -> tuple[BuildOptions, tuple[str, ...]]:
    anchor, returned, spans = LAYOUTS[layout]
    return anchor_options(model, anchor, returned, **{"numerics": "invariant", **options}), spans  # pyright: ignore[reportArgumentType]


def assert_nothing_left(route: SpanRoute) -> None:
    """Check that neither the anchor nor a worker holds anything of a request."""
    engine, passes = route.engine, route.passes

    def is_empty() -> bool:
        engine.take_suspects()
        engine.await_pass(0.0)
        return passes.is_empty and all(worker.hosting.is_empty for worker in route.workers)

    wait_until(is_empty, "nothing is left in the anchor and the workers")
    assert engine.stats().pages_used == 0
    engine.pool.check()


@pytest.mark.parametrize("chunk", [7, 256], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize(("number", "max_tokens"), [(1, 30), (32, 8)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_of_a_divided_model_are_those_of_one_process(
    model: Path, layout: str, number: int, max_tokens: int, chunk: int
) -> None:
    prompts = prompts_of(number)
    options, spans = options_of(model, layout, prefill_chunk_tokens=chunk, max_batch=32)
    with open_route(options, spans) as route:
        answers = EngineDriver(route.engine)
        submit_all(answers, prompts, max_tokens)
        assert answers.run() == whole_answers(model, prompts, max_tokens)
        assert_nothing_left(route)


@pytest.mark.parametrize("keep_bytes", [1 << 30, 0], ids=["rows kept", "nothing kept"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_workers_change_no_answer(model: Path, layout: str, keep_bytes: int) -> None:
    """Workers are killed at random moments, one or two at a time."""
    prompts, max_tokens = prompts_of(8, seed=1), 24
    expected = whole_answers(model, prompts, max_tokens)
    options, spans = options_of(model, layout, prefill_chunk_tokens=7, keep_bytes=keep_bytes)
    rng = random.Random(layout)
    with open_route(options, spans) as route:
        answers = EngineDriver(route.engine)
        submit_all(answers, prompts, max_tokens)
        num_kills = 0
        while answers.ended < set(answers.tokens):
            for _ in range(rng.randrange(1, 6)):
                answers.turn()
            if num_kills == 10:
                answers.run()
                break
            killed = rng.sample(route.workers, k=min(len(spans), rng.choice([1, 1, 2])))
            kept = {worker: worker.hosting.num_rows_again for worker in route.workers if worker not in killed}
            for worker in killed:
                worker.kill()
            num_kills += 1
            route.connect()
            answers.turn()
            if keep_bytes:
                assert all(worker.hosting.num_rows_again == before for worker, before in kept.items())
        assert num_kills >= 3 and answers.tokens == expected and not answers.errors
        if keep_bytes:
            assert all(worker.hosting.num_rows_again == 0 for worker in route.workers)
        assert_nothing_left(route)
