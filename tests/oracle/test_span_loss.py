"""Span workers that die, lose rows or fail: the answers stay byte-equal, and only what was lost is
computed again.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fleet.core.request import Sampling
from tests.capabilities import prefixes_of
from tests.oracle.test_span_engine import (
    HIDDEN,
    PROMPT,
    SMALL_QWEN,
    SPLITS,
    VOCAB,
    assert_equal_bytes,
    assert_nothing_held,
    driven,
    expected,
    prompts_of,
    sampling_of,
    submit_all,
)
from tests.oracle.test_text_engine import write_model
from tests.span_route import TextDriver, kill_some, route_of, single
from tests.span_workers import SpanWorkerThread

pytestmark = pytest.mark.one_file_in(4, "spans of an engine")

INVARIANT: dict[str, Any] = {"numerics": "invariant", "prefill_chunk_tokens": 7, "max_batch": 32}
LOSSES = (
    "forward 1",
    "forward 2",
    "forward 3",
    "reverse 1",
    "reverse 2",
    "reverse 3",
    "head on anchor 2",
)
NUM, MAX_TOKENS = 8, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SMALL_QWEN, tmp_path_factory.mktemp("qwen"))


def num_rows_of(driver: TextDriver, names: Sequence[str] | set[str]) -> int:
    """Return the number of rows that the requests need in each process: all except the one of the
    last sampled token.
    """
    prompts = prompts_of(NUM)
    return sum(len(prompts[int(name[1:])]) + len(driver.tokens[name]) - 1 for name in names)


def assert_computed_once(driver: TextDriver, worker: SpanWorkerThread) -> None:
    """Check that a worker has computed each row of the requests that were open when it joined, and
    no row twice.
    """
    wanted = num_rows_of(driver, worker.started_with[0])
    assert worker.host.num_rows_again == 0
    if len(worker.started_with) == 1 or worker.started_with[-1] == worker.started_with[0]:
        assert worker.host.num_rows == wanted, worker.name
    assert worker.host.num_rows <= wanted


@pytest.mark.one_in(4, "span losses")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LOSSES)
def test_killed_workers_are_replaced_and_alone_compute_again(
    name: str, seed: int, folder: Path
) -> None:
    chance = random.Random(f"{name} {seed}")
    for _ in range(4):
        with driven(folder, SPLITS[name], **INVARIANT) as driver:
            route = route_of(driver)
            kill_some(route, chance, (0, 0, 1, 2))
            submit_all(driver, NUM, MAX_TOKENS, sampled=True)
            driver.run()
            assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
            assert route.num_replaced
            for worker in route.worker_at:
                assert_computed_once(driver, worker)
            assert_nothing_held(driver)


@pytest.mark.one_in(4, "span losses without rows")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LOSSES)
def test_without_kept_rows_all_workers_compute_again(name: str, seed: int, folder: Path) -> None:
    chance = random.Random(f"{name} {seed}")
    for _ in range(4):
        with driven(folder, SPLITS[name], {"keep_bytes": 0}, **INVARIANT) as driver:
            kill_some(route_of(driver), chance, (0, 0, 1, 2))
            submit_all(driver, NUM, MAX_TOKENS, sampled=True)
            driver.run()
            assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
            assert route_of(driver).num_replaced
            assert_nothing_held(driver)


@pytest.mark.one_in(4, "span losses among aborts")
@pytest.mark.parametrize(
    "keep_bytes", [1 << 30, 40 * HIDDEN * 4, 0], ids=["all rows kept", "few", "none"]
)
@pytest.mark.parametrize("name", ["forward 2", "reverse 2", "head on anchor 2"])
def test_deaths_among_aborts_sessions_and_evictions_change_no_answer(
    name: str, keep_bytes: int, folder: Path
) -> None:
    chance = random.Random(f"{name} {keep_bytes}")
    asked: dict[str, tuple[list[int], Sampling]] = {}
    ended: set[str] = set()
    options: dict[str, Any] = {**INVARIANT, "kv_pages": 14}
    with driven(folder, SPLITS[name], {"keep_bytes": keep_bytes}, **options) as driver:
        while len(asked) < 60 or driver.open:
            if len(driver.open) < 8 and len(asked) < 60:
                name = f"r{len(asked)}"
                session = chance.choice(("", "one", "two"))
                length = chance.randrange(1, 30)
                prompt = [
                    *PROMPT[:length],
                    *(chance.randrange(2, VOCAB) for _ in range(chance.randrange(1, 20))),
                ]
                asked[name] = (
                    prompt,
                    sampling_of(len(asked), chance.randrange(1, 16), sampled=chance.random() < 0.5),
                )
                driver.submit(name, *asked[name], session)
            if driver.open and chance.random() < 0.04:
                ended.add(chance.choice(sorted(driver.open)))
                driver.end(max(ended & driver.open), keep=chance.random() < 0.5)
            if chance.random() < 0.04:
                chance.choice(route_of(driver).worker_at).kill()
            driver.turn()
        assert not driver.errors and route_of(driver).num_replaced > 3
        prefixes_of(driver.engine).drop()
        assert_nothing_held(driver)
        answers = {name: tokens for name, tokens in driver.tokens.items() if name not in ended}
    whole = single(folder, **INVARIANT)
    for name in answers:
        whole.submit(name, *asked[name])
    whole.run()
    assert answers == whole.tokens and len(answers) > 20
