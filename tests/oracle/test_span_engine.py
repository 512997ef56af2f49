"""An engine whose layers are divided among span workers gives the answers of one with all layers, over real connections."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.core.request import Sampling
from tests.oracle.test_text_engine import FAMILIES, Family, write_model
from tests.span_route import ObservedLayers, SpanRoute, Split, TextDriver, single

HIDDEN, VOCAB = 64, 320
SMALL_QWEN = Family(
    name="Qwen3",
    more={"hidden_size": HIDDEN, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 4, "initializer_range": 0.2},
)
FORWARD = {
    1: Split(anchor="0:1", workers=("2:output",), returned="logits"),
    2: Split(anchor="0:0", workers=("1:2", "3:output"), returned="logits"),
    3: Split(anchor="0:0", workers=("1:1", "2:2", "3:output"), returned="logits"),
}
REVERSE = {
    1: Split(anchor="2:output", workers=("0:1",), returned="rows"),
    2: Split(anchor="3:output", workers=("0:1", "2:2"), returned="rows"),
    3: Split(anchor="3:output", workers=("0:0", "1:1", "2:2"), returned="rows"),
}
HEAD_ON_ANCHOR = {2: Split(anchor="0:0", workers=("1:2", "3:last"), returned="last_rows")}
SPLITS = {
    **{f"forward {num}": split for num, split in FORWARD.items()},
    **{f"reverse {num}": split for num, split in REVERSE.items()},
    **{f"head on anchor {num}": split for num, split in HEAD_ON_ANCHOR.items()},
}
PROMPT = list(range(40, 73))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SMALL_QWEN, tmp_path_factory.mktemp("qwen"))


@contextmanager
def driven(folder: Path, split: Split, anchor: dict[str, Any] | None = None, **options: Any) -> Iterator[TextDriver]:
    route = SpanRoute(folder, split, options=options, anchor=anchor)
    try:
        yield TextDriver(route.engine, route)
    finally:
        route.close()


def prompts_of(num: int) -> list[list[int]]:
    chance = random.Random(num)
    return [[chance.randrange(2, VOCAB) for _ in range(chance.choice((1, 3, 9, 20, 33)))] for _ in range(num)]


def sampling_of(number: int, max_tokens: int, *, sampled: bool) -> Sampling:
    if not sampled:
        return Sampling(max_tokens=max_tokens)
    return Sampling(
        max_tokens=max_tokens, temperature=0.9, top_p=0.95, seed=number, repetition_penalty=1.3, presence_penalty=0.2,
        frequency_penalty=0.1,
    )  # fmt: skip


def submit_all(driver: TextDriver, num: int, max_tokens: int, *, sampled: bool = False) -> None:
    for number, prompt in enumerate(prompts_of(num)):
        driver.submit(f"r{number}", prompt, sampling_of(number, max_tokens, sampled=sampled))


@cache
def expected(folder: Path, num: int, max_tokens: int, *, sampled: bool = False) -> TextDriver:
    """Return the answers of one process; with invariant numerics they depend neither on the batch nor on the chunks."""
    driver = single(folder, numerics="invariant", max_batch=32)
    submit_all(driver, num, max_tokens, sampled=sampled)
    driver.run()
    return driver


def assert_equal_bytes(driver: TextDriver, wanted: TextDriver) -> None:
    assert driver.tokens == wanted.tokens and not driver.errors
    for name, rows in wanted.logits.items():
        for number, (row, own) in enumerate(zip(rows, driver.logits[name], strict=True)):
            assert torch.equal(own, row), f"the logits of draw {number} of {name} differ"


def assert_nothing_held(driver: TextDriver) -> None:
    """Check that no process holds anything of an ended request, after the anchor has reported its end."""
    route = driver.route
    assert route is not None
    driver.engine.pool.check()
    assert driver.engine.stats().pages_used == 0
    driver.settle(lambda: all(worker.is_idle for worker in route.worker_at))


@pytest.mark.one_in(4, "invariant spans")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [256, 7], ids=["one chunk", "chunks"])
@pytest.mark.parametrize(("num", "max_tokens"), [(1, 12), (32, 4)], ids=["1 request", "32 requests"])
@pytest.mark.parametrize("name", SPLITS)
def test_divided_model_gives_equal_bytes(name: str, num: int, max_tokens: int, chunk: int, sampled: bool, folder: Path) -> None:
    with driven(folder, SPLITS[name], numerics="invariant", prefill_chunk_tokens=chunk, max_batch=32) as driver:
        submit_all(driver, num, max_tokens, sampled=sampled)
        driver.run()
        assert_equal_bytes(driver, expected(folder, num, max_tokens, sampled=sampled))
        assert_nothing_held(driver)
