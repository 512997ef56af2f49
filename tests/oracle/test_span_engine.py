"""An engine whose layers are divided among span workers, over real connections, gives the answers
of an engine with all layers.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.core.ids import RequestId, StageName
from fleet.core.request import Sampling
from fleet.spans.net.ring import BlockReads
from tests.capabilities import prefixes_of
from tests.oracle.test_text_engine import FAMILIES, Family, write_model
from tests.span_route import SpanRoute, Split, TextDriver, single
from tests.span_workers import LM, WAIT_S

pytestmark = pytest.mark.one_file_in(4, "spans of an engine")

HIDDEN, VOCAB = 64, 320
SMALL_QWEN = Family(
    name="Qwen3",
    more={
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "initializer_range": 0.2,
    },
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
def driven(
    folder: Path,
    split: Split,
    anchor: dict[str, Any] | None = None,
    stage: StageName = LM,
    blocks: BlockReads | None = None,
    **options: Any,
) -> Iterator[TextDriver]:
    route = SpanRoute(folder, split, options=options, anchor=anchor, stage=stage, blocks=blocks)
    try:
        yield TextDriver(route.engine, route)
    finally:
        route.close()


def prompts_of(num: int) -> list[list[int]]:
    chance = random.Random(num)
    return [
        [chance.randrange(2, VOCAB) for _ in range(chance.choice((1, 3, 9, 20, 33)))]
        for _ in range(num)
    ]


def sampling_of(number: int, max_tokens: int, *, sampled: bool) -> Sampling:
    if not sampled:
        return Sampling(max_tokens=max_tokens)
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.9,
        top_p=0.95,
        seed=number,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
    )


def submit_all(driver: TextDriver, num: int, max_tokens: int, *, sampled: bool = False) -> None:
    for number, prompt in enumerate(prompts_of(num)):
        driver.submit(f"r{number}", prompt, sampling_of(number, max_tokens, sampled=sampled))


@cache
def expected(folder: Path, num: int, max_tokens: int, *, sampled: bool = False) -> TextDriver:
    """Return the answers of one process with all layers; with invariant numerics they depend
    neither on the batch nor on the chunks.
    """
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
    """Check that no process holds state of an ended request, once the anchor has reported its
    end.
    """
    route = driver.route
    assert route is not None
    driver.engine.pool.check()
    engine: Any = driver.engine
    assert driver.engine.stats().kv.pages_used == 0
    driver.settle(lambda: all(worker.is_idle for worker in route.worker_at))
    kept = engine._passes._log
    assert not (kept.num_tables or kept.num_bytes or kept.after(0)), "the anchor keeps sent rows"


@pytest.mark.one_in(2, "invariant spans")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [256, 7], ids=["one chunk", "chunks"])
@pytest.mark.parametrize(
    ("num", "max_tokens"), [(1, 12), (32, 4)], ids=["1 request", "32 requests"]
)
@pytest.mark.parametrize("name", SPLITS)
def test_divided_model_gives_equal_bytes(
    name: str, num: int, max_tokens: int, chunk: int, sampled: bool, folder: Path
) -> None:
    with driven(
        folder, SPLITS[name], numerics="invariant", prefill_chunk_tokens=chunk, max_batch=32
    ) as driver:
        submit_all(driver, num, max_tokens, sampled=sampled)
        driver.run()
        assert_equal_bytes(driver, expected(folder, num, max_tokens, sampled=sampled))
        assert_nothing_held(driver)


@pytest.mark.parametrize("name", ["forward 3", "reverse 3"])
def test_rows_that_are_read_by_nixl_give_equal_bytes(name: str, folder: Path) -> None:
    """Hidden states read by NIXL give equal bytes, in every step and after a worker is replaced."""
    with driven(
        folder, SPLITS[name], blocks=BlockReads(min_bytes=1), numerics="invariant", max_batch=32
    ) as driver:
        route = driver.route
        assert route is not None
        submit_all(driver, 32, 4)
        driver.run(lambda: sum(map(len, driver.tokens.values())) > 8)
        assert route.worker_at[0].num_blocks_sent > 0
        route.worker_at[1].kill()
        driver.run()
        assert_equal_bytes(driver, expected(folder, 32, 4))
        assert_nothing_held(driver)


THREE_LAYERS = {
    "forward": Split(anchor="0:0", workers=("1:1", "2:output"), returned="logits"),
    "reverse": Split(anchor="2:output", workers=("0:0", "1:1"), returned="rows"),
    "head on anchor": Split(anchor="0:0", workers=("1:1", "2:last"), returned="last_rows"),
}
SOME_FAMILIES = [
    family
    for family in FAMILIES
    if family.name in ("Llama", "Qwen3", "Gemma2", "Gemma3Text", "GPT2", "OPT")
]


@pytest.mark.parametrize("family", SOME_FAMILIES, ids=lambda family: family.name)
def test_divided_model_with_fast_numerics_gives_close_logits(
    family: Family, tmp_path: Path
) -> None:
    folder = write_model(family, tmp_path)
    whole = single(folder, prefill_chunk_tokens=9)
    submit_all(whole, 4, 8)
    whole.run()
    for split in THREE_LAYERS.values():
        with driven(folder, split, prefill_chunk_tokens=9) as driver:
            submit_all(driver, 4, 8)
            driver.run()
            assert driver.tokens == whole.tokens
            for name, rows in whole.logits.items():
                assert torch.allclose(
                    torch.stack(driver.logits[name]), torch.stack(rows), rtol=1e-4, atol=1e-4
                )


def play_session(driver: TextDriver) -> None:
    """Run two conversations beside single requests, with pauses, steps, a finish and an abort in a
    fixed order.
    """
    first = [*PROMPT[:20], 5, 9]
    driver.submit("turn 1", first, Sampling(max_tokens=6), session="talk")
    driver.submit("other", PROMPT[::-1], sampling_of(3, 9, sampled=True), session="other")
    driver.run()
    second = [*first, *driver.tokens["turn 1"], 17, 18, 19]
    driver.submit("turn 2", second, sampling_of(4, 30, sampled=True), session="talk")
    driver.submit("alone", PROMPT, Sampling(max_tokens=8))
    driver.submit("aborted", PROMPT[4:], Sampling(max_tokens=40))
    driver.run(lambda: len(driver.tokens["turn 2"]) >= 3)
    driver.end("aborted", keep=False)
    driver.engine.pause(RequestId("turn 2"), paused=True)
    driver.run(lambda: driver.open == {"turn 2"})
    assert len(driver.tokens["turn 2"]) < 30, "a paused request makes no progress"
    driver.engine.pause(RequestId("turn 2"), paused=False)
    driver.run(lambda: len(driver.tokens["turn 2"]) >= 10)
    driver.end("turn 2", keep=True)
    third = [*second, *driver.tokens["turn 2"][:7], 3]
    driver.submit("turn 3", third, Sampling(max_tokens=5), session="talk")
    driver.submit("diverging", [*PROMPT[::-1][:12], 4], Sampling(max_tokens=5), session="other")
    driver.run()


def answers_of_session(driver: TextDriver) -> dict[str, list[int]]:
    """Return the tokens of each request; of a request that was ended from outside, only as many
    tokens as every engine has given.
    """
    least = {"turn 2": 10, "aborted": 0}
    return {name: tokens[: least.get(name)] for name, tokens in driver.tokens.items()}


@pytest.mark.parametrize("kv_pages", [64, 9], ids=["enough pages", "few pages"])
def test_one_script_of_sessions_gives_equal_answers_in_every_topology(
    kv_pages: int, folder: Path
) -> None:
    options: dict[str, Any] = {
        "numerics": "invariant",
        "prefill_chunk_tokens": 7,
        "kv_pages": kv_pages,
    }
    whole = single(folder, **options)
    play_session(whole)
    assert whole.engine.stats().kv.rows_reused > 0
    for name in ("forward 1", "forward 2", "reverse 2", "head on anchor 2"):
        with driven(folder, SPLITS[name], **options) as driver:
            play_session(driver)
            assert answers_of_session(driver) == answers_of_session(whole), name
            assert (
                kv_pages == 9
                or driver.engine.stats().kv.rows_reused == whole.engine.stats().kv.rows_reused
            )
            prefixes_of(driver.engine).drop()
            assert_nothing_held(driver)


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("name", ["forward 2", "reverse 2"])
def test_prefill_has_no_more_passes_in_flight_than_the_window(
    name: str, window: int | None, folder: Path
) -> None:
    with driven(
        folder, SPLITS[name], {"window": window}, numerics="invariant", prefill_chunk_tokens=3
    ) as driver:
        driver.submit("long", PROMPT, Sampling(max_tokens=1))
        driver.run()
        assert driver.route is not None and driver.route.chain is not None
        assert driver.route.chain.most_in_flight == (window or 4)
        assert driver.route.chain.num_results == 11


def test_forward_prefill_returns_only_the_logits_of_draws(folder: Path) -> None:
    with driven(folder, FORWARD[2], prefill_chunk_tokens=3) as driver:
        driver.submit("long", PROMPT, Sampling(max_tokens=3, ignore_eos=True))
        driver.run()
        assert driver.route is not None and driver.route.chain is not None
        assert driver.route.chain.num_sent_bytes == (len(PROMPT) + 2) * HIDDEN * 4
        assert driver.route.chain.num_received_bytes == 3 * VOCAB * 4


def test_reverse_prefill_runs_the_head_once_a_prompt_and_returns_hidden_rows(folder: Path) -> None:
    with driven(folder, REVERSE[2], prefill_chunk_tokens=3) as driver:
        driver.submit("long", PROMPT, Sampling(max_tokens=3, ignore_eos=True))
        driver.run()
        assert driver.route is not None and driver.route.chain is not None
        assert len(driver.logits["long"]) == 3, "one row of logits for each draw"
        sent, received = driver.route.chain.num_sent_bytes, driver.route.chain.num_received_bytes
        assert sent == received == (len(PROMPT) + 2) * HIDDEN * 4


@pytest.mark.parametrize("name", ["forward 2", "reverse 2"])
def test_wire_dtype_applies_to_both_directions(name: str, folder: Path) -> None:
    tokens: list[list[int]] = []
    num_bytes: list[tuple[int, int]] = []
    for wire_dtype in ("float32", "bfloat16"):
        with driven(
            folder, SPLITS[name], {"wire_dtype": wire_dtype}, prefill_chunk_tokens=7
        ) as driver:
            driver.submit("long", PROMPT, Sampling(max_tokens=8, ignore_eos=True))
            driver.run()
            assert driver.route is not None and driver.route.chain is not None
            num_bytes.append(
                (driver.route.chain.num_sent_bytes, driver.route.chain.num_received_bytes)
            )
            tokens.append(driver.tokens["long"])
    (sent, received), halves = num_bytes
    assert halves == (sent // 2, received // 2) and sent and received
    assert len(tokens[0]) == len(tokens[1]) == 8


def meeting_in_pass(barrier: threading.Barrier, number: int) -> Callable[[Any], None]:
    """Return an observer of a worker's computations. Computation `number`, counted from 1, waits at
    the barrier until the other processes arrive there.
    """
    count = iter(range(1, 1000))

    def observe(_: Any) -> None:
        if next(count) == number:
            barrier.wait(WAIT_S)

    return observe


@pytest.mark.parametrize("name", ["forward 2", "reverse 2"])
def test_workers_compute_chunks_of_one_prompt_at_the_same_time(name: str, folder: Path) -> None:
    """Workers compute chunks of one prompt at the same time: no process passes the barrier until
    both workers, and in the forward topology the anchor, are in a computation.
    """
    is_forward = name.startswith("forward")
    barrier = threading.Barrier(3 if is_forward else 2)
    with driven(folder, SPLITS[name], prefill_chunk_tokens=3) as driver:
        assert driver.route is not None
        first, second = driver.route.worker_at
        first.observe = lambda layers: setattr(layers, "before", meeting_in_pass(barrier, 2))
        second.observe = lambda layers: setattr(layers, "before", meeting_in_pass(barrier, 1))
        if is_forward:
            observe_anchor(driver, meeting_in_pass(barrier, 3))
        driver.submit("long", PROMPT, Sampling(max_tokens=2))
        driver.run()
        assert not barrier.broken and len(driver.tokens["long"]) == 2


def observe_anchor(driver: TextDriver, observe: Callable[[Tensor], None]) -> None:
    """Call `observe` with the hidden states that leave the anchor's layers."""
    layers: Any = driver.engine.program
    layers, forward = layers.layers, layers.layers.forward

    def observed(rows_NH: Tensor, layout: Any) -> Any:
        done = forward(rows_NH, layout)
        observe(done.rows_NH)
        return done

    layers.forward = observed
