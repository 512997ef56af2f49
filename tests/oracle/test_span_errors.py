"""Errors of span workers (missing rows, a failed request, a missing route, aborts): other requests
are not affected, and nothing stays behind.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.core.errors import EngineError
from fleet.core.ids import RequestId
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
    observe_anchor,
    submit_all,
)
from tests.oracle.test_text_engine import write_model
from tests.span_route import TextDriver, route_of, single
from tests.span_workers import ObservedLayers

pytestmark = pytest.mark.one_file_in(4, "spans of an engine")

INVARIANT: dict[str, Any] = {"numerics": "invariant", "prefill_chunk_tokens": 7, "max_batch": 32}
NUM, MAX_TOKENS = 8, 8
TWO_WORKERS = ("forward 2", "reverse 2", "head on anchor 2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SMALL_QWEN, tmp_path_factory.mktemp("qwen"))


def run_all(driver: TextDriver, folder: Path) -> None:
    """Run the requests, and compare their answers with the answers of one process."""
    submit_all(driver, NUM, MAX_TOKENS, sampled=True)
    driver.run()
    assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
    assert_nothing_held(driver)


@pytest.mark.one_in(3, "span prefixes")
@pytest.mark.parametrize("number", [2, 4, 9])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", TWO_WORKERS)
def test_worker_without_the_rows_before_a_pass_refuses_it_and_they_are_recomputed(
    name: str, place: int, number: int, folder: Path
) -> None:
    with driven(folder, SPLITS[name], **INVARIANT) as driver:
        route = route_of(driver)
        tampered, other = route.worker_at[place], route.worker_at[1 - place]
        tampered.on_pass = lambda arrived: (
            tampered.host.close_tables(range(1000)) if arrived == number else None
        )
        run_all(driver, folder)
        assert route.generation == 1 and route.chain is not None
        assert set(route.chain.errors) == {"span_prefix_mismatch"}
        assert tampered.host.num_rows_again == 0
        assert place == 0 or other.host.num_rows_again > 0, (
            "the first worker has computed the pass that the last one refuses"
        )


def row_after(folder: Path, name: str, place: int | None, position: int) -> Tensor:
    """Return the hidden state at a position as it leaves the layers of a worker, or of the anchor
    if `place` is None.
    """
    seen: list[Tensor] = []
    with driven(folder, SPLITS[name], **INVARIANT) as driver:
        observe(driver, place, lambda rows_NH: seen.append(rows_NH.clone()))
        driver.submit("bad", PROMPT, Sampling(max_tokens=4, ignore_eos=True))
        driver.run()
    num_chunks = -(-len(PROMPT) // 7)
    # Each chunk of 7 rows, and each draw's row, is in a tile of its own.
    return (
        seen[position // 7][position % 7]
        if position < len(PROMPT)
        else seen[num_chunks + position - len(PROMPT)][0]
    )


def observe(driver: TextDriver, place: int | None, after: Callable[[Tensor], None]) -> None:
    if place is None:
        observe_anchor(driver, after)
        return

    def set_after(layers: ObservedLayers) -> None:
        layers.after = after

    route_of(driver).worker_at[place].observe = set_after


@pytest.mark.one_in(3, "span errors")
@pytest.mark.parametrize("position", [3, 17, 34], ids=["first chunk", "later chunk", "answer"])
@pytest.mark.parametrize("place", [0, 1, None], ids=["first worker", "last worker", "anchor"])
@pytest.mark.parametrize("name", TWO_WORKERS)
def test_error_of_a_computation_fails_the_request_at_fault_alone(
    name: str, place: int | None, position: int, folder: Path
) -> None:
    poison_H = row_after(folder, name, place, position)

    def fail_for_poison(rows_NH: Tensor) -> None:
        if (rows_NH == poison_H).all(1).any():
            raise RuntimeError("a poisoned row")

    with driven(folder, SPLITS[name], **INVARIANT) as driver:
        observe(driver, place, fail_for_poison)
        driver.submit("bad", PROMPT, Sampling(max_tokens=4, ignore_eos=True))
        submit_all(driver, NUM, MAX_TOKENS, sampled=True)
        driver.run()
        error = driver.errors.pop("bad")
        assert isinstance(error, EngineError) and not driver.errors
        assert len(driver.tokens.pop("bad")) == (2 if position == 34 else 0)
        assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
        assert_nothing_held(driver)


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_aborted_and_finished_requests_leave_nothing_in_any_process(
    name: str, folder: Path
) -> None:
    chance = random.Random(name)
    with driven(folder, SPLITS[name], kv_pages=40, prefill_chunk_tokens=7) as driver:
        num_submitted = num_ended = 0
        while num_ended < 350:
            if len(driver.open) < 12:
                num_submitted += 1
                prompt = [chance.randrange(2, VOCAB) for _ in range(chance.randrange(1, 40))]
                session = chance.choice(("", "", "one", "two"))
                driver.submit(
                    f"r{num_submitted}",
                    prompt,
                    Sampling(max_tokens=chance.randrange(1, 30)),
                    session,
                )
            if driver.open and chance.random() < 0.6:
                driver.end(chance.choice(sorted(driver.open)), keep=chance.random() < 0.5)
                num_ended += 1
            if driver.open and chance.random() < 0.1:
                driver.engine.pause(RequestId(chance.choice(sorted(driver.open))), paused=False)
            driver.turn()
        for request in sorted(driver.open):
            driver.end(request, keep=False)
        prefixes_of(driver.engine).drop()
        assert not driver.errors
        assert_nothing_held(driver)


@pytest.mark.parametrize(
    "keep_bytes", [1 << 30, 20 * HIDDEN * 4, 0], ids=["all rows kept", "few", "none"]
)
@pytest.mark.parametrize("name", TWO_WORKERS)
def test_worker_that_missed_a_route_of_the_lineage_takes_part_again(
    name: str, keep_bytes: int, folder: Path
) -> None:
    with driven(folder, SPLITS[name], {"keep_bytes": keep_bytes}, **INVARIANT) as driver:
        route = route_of(driver)
        submit_all(driver, NUM, MAX_TOKENS, sampled=True)
        for place, num_tokens in ((1, 1), (0, 2), (1, 3), (1, 4), (0, 5)):
            driver.run(lambda num_tokens=num_tokens: len(driver.tokens["r7"]) >= num_tokens)
            route.exchange(place)
        driver.run()
        assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
        assert route.generation > 5
        assert_nothing_held(driver)


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_workers_keep_rows_over_routes_that_never_start(name: str, folder: Path) -> None:
    """Workers keep their rows over routes that never start: a route ends before the engine uses it,
    and in the next route a worker cannot connect to its neighbour.
    """
    with driven(folder, SPLITS[name], **INVARIANT) as driver:
        route = route_of(driver)
        first, second = route.worker_at
        submit_all(driver, NUM, MAX_TOKENS, sampled=True)
        driver.run(lambda: len(driver.tokens["r7"]) >= 2)
        assert route.chain is not None
        route.chain.close()
        assert route.connect() and route.chain is not None
        route.chain.close()
        first.refuses_hops = True
        assert not route.connect()
        first.refuses_hops = False
        driver.run()
        assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
        assert route.worker_at == [first, second] and route.generation >= 4
        total = first.host.num_rows
        assert (
            total == second.host.num_rows
            and not first.host.num_rows_again
            and not second.host.num_rows_again
        )
        assert_nothing_held(driver)


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_replaced_worker_with_fast_numerics_continues_the_answers(name: str, folder: Path) -> None:
    answers: list[dict[str, list[int]]] = []
    for kills in (False, True):
        with driven(folder, SPLITS[name], prefill_chunk_tokens=7) as driver:
            submit_all(driver, NUM, MAX_TOKENS)
            for place in (0, 1, 1, 0) if kills else ():
                driver.run(lambda place=place: len(driver.tokens["r7"]) >= 1 + place)
                route_of(driver).worker_at[place].kill()
            driver.run()
            answers.append(driver.tokens)
            assert not driver.errors
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_workers_keep_no_rows_of_another_lineage(name: str, folder: Path) -> None:
    with driven(folder, SPLITS[name], **INVARIANT) as driver:
        route = route_of(driver)
        submit_all(driver, NUM, MAX_TOKENS, sampled=True)
        driver.run(lambda: len(driver.tokens["r7"]) >= 2)
        before = [worker.host for worker in route.worker_at]
        route.begin_lineage()
        driver.run()
        assert_equal_bytes(driver, expected(folder, NUM, MAX_TOKENS, sampled=True))
        assert all(
            worker.host is not host for worker, host in zip(route.worker_at, before, strict=True)
        )
        assert_nothing_held(driver)


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_pages_of_a_request_without_finite_rows_serve_others_afterwards(
    name: str, folder: Path
) -> None:
    """Pages of a request without finite hidden states serve other requests afterwards. No mask
    hides NaN, so a page must be zeroed in every process before it is used again.
    """
    poison_H = row_after(folder, name, 0, 3)

    def spoil(rows_NH: Tensor) -> None:
        rows_NH[(rows_NH - poison_H).abs().amax(1) < 1e-3] = torch.nan

    whole = single(folder)
    with driven(folder, SPLITS[name], kv_pages=16) as driver:
        observe(driver, 0, spoil)
        for number in range(6):
            driver.submit("bad", PROMPT[:33], Sampling(max_tokens=9))
            driver.run()
            assert "not a number" in driver.errors.pop("bad").message
            for each in (driver, whole):
                # Short and long ones in each pass: the context of a short one is padded.
                for other, length in enumerate((3, 20, 3, 20, 3, 20)):
                    each.submit(f"{number} {other}", PROMPT[1:length][::-1], Sampling(max_tokens=6))
                each.run()
        assert not driver.errors and {**driver.tokens, "bad": []} == {**whole.tokens, "bad": []}
