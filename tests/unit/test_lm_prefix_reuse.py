"""Prefix cache of the batch loop: which rows a session's next request reuses, and which are
dropped.
"""

import random
from functools import partial

import pytest

from tests.capabilities import prefixes_of
from tests.unit.counting_loop import (
    RUNNERS,
    CountingProgram,
    Make,
    answer_all,
    by_hand,
    counting_loop,
    feed,
    run,
    spans,
    submit,
    sums,
)

FIRST = [3, 1, 4, 1, 5, 9, 2]


@pytest.fixture(params=RUNNERS)
def make(request: pytest.FixtureRequest) -> Make:
    return partial(counting_loop, request.param)


def rows_after(numbers: list[int], max_tokens: int) -> list[int]:
    """Return the numbers of the rows cached after a request: the prompt, and all sampled ones but
    the last.
    """
    return [*numbers, *(answer % 100 for answer in by_hand(numbers, max_tokens)[:-1])]


def num_passes(program: CountingProgram, name: str) -> int:
    return sum(name in names for names in program.passes)


def test_next_turn_computes_only_uncached_rows(make: Make) -> None:
    loop, program = make()
    answer_all(loop, {"first": FIRST}, session="talk")
    before = rows_after(FIRST, 6)
    assert prefixes_of(loop).num_rows("talk") == len(before) == 12
    stats = loop.stats()
    assert stats.kv.pages_used == stats.kv.pages_cached == 6
    second = [*before, *range(50, 61)]
    submit(loop, "second", second, session="talk")
    assert (
        loop.stats().kv.rows_reused,
        loop.stats().kv.pages_cached,
        prefixes_of(loop).num_rows("talk"),
    ) == (
        12,
        0,
        0,
    )
    outputs = run(loop)
    assert sums(outputs, "second") == by_hand(second, 6)
    assert num_passes(program, "second") == 3 + 5, (
        "three for the eleven new rows, with the first draw"
    )
    alone, _ = make()
    assert spans(outputs, "second") == spans(answer_all(alone, {"second": second}), "second"), (
        "it is reported in the same pieces"
    )


@pytest.mark.parametrize(
    ("second", "reused"),
    [(FIRST, 6), (FIRST[:3], 2), ([3, 1, 4, 8, 5, 9, 2], 3), ([8, *FIRST], 0), ([3], 0)],
)
def test_diverging_prompt_reuses_its_common_prefix(
    make: Make, second: list[int], reused: int
) -> None:
    loop, _ = make(chunk=2)
    answer_all(loop, {"first": FIRST}, session="talk")
    submit(loop, "second", second, session="talk")
    assert loop.stats().kv.rows_reused == reused
    assert sums(run(loop), "second") == by_hand(second, 6)
    assert prefixes_of(loop).num_rows("talk") == len(second) + 5


def test_input_in_pieces_reuses_rows_until_it_differs(make: Make) -> None:
    loop, program = make(chunk=2)
    answer_all(loop, {"first": FIRST}, session="talk")
    submit(loop, "second", FIRST[:2], session="talk", final=False)
    program.passes.clear()
    assert feed(loop, "second", FIRST[2:5], final=False) == 3
    reported = run(loop)
    assert not program.passes, "there is nothing to compute"
    assert feed(loop, "second", [9, 7, 7], final=True) == 1
    second = [*FIRST[:5], 9, 7, 7]
    reported += run(loop)
    assert sums(reported, "second") == by_hand(second, 6)
    assert spans(reported, "second")[:4] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_cached_prefix_is_dropped_before_a_request_waits_or_is_evicted(make: Make) -> None:
    loop, program = make(num_pages=8, chunk=4)
    for name in ("one", "two"):
        submit(loop, name, [1, 2, 3], max_tokens=3, session=name)
    run(loop)
    assert loop.stats().kv.pages_cached == 6
    program.passes.clear()
    submit(loop, "long", list(range(8)), max_tokens=8)
    submit(loop, "short", [1], max_tokens=1)
    outputs = run(loop)
    assert sums(outputs, "long") == by_hand(list(range(8)), 8)
    assert {name for names in program.passes[:2] for name in names} == {"short", "long"}, (
        "neither waits"
    )
    assert num_passes(program, "long") == 9
    assert (
        prefixes_of(loop).num_rows("one"),
        prefixes_of(loop).num_rows("two"),
        loop.stats().kv.pages_used,
    ) == (
        0,
        0,
        0,
    )


def test_request_with_reused_prefix_can_be_evicted(make: Make) -> None:
    loop, _ = make(num_pages=12, chunk=4)
    answer_all(loop, {"first": list(range(10))}, max_tokens=2, session="talk")
    submit(loop, "eldest", list(range(8)), max_tokens=12)
    outputs = loop.step()
    submit(loop, "second", list(range(6)), session="talk", final=False)
    outputs = [*outputs, *run(loop)]
    feed(loop, "second", [7, 7], final=True)
    outputs += run(loop)
    assert sums(outputs, "eldest") == by_hand(list(range(8)), 12)
    assert sums(outputs, "second") == by_hand([*range(6), 7, 7], 6)


def test_failure_leaves_nothing_cached(make: Make) -> None:
    loop, program = make(chunk=1)
    answer_all(loop, {"first": FIRST}, session="talk")
    submit(loop, "bad", [3, 66], session="talk")
    program.poison = 66.0
    run(loop)
    assert (prefixes_of(loop).num_rows("talk"), loop.stats().kv.pages_used) == (0, 0)


def test_last_ended_request_of_a_session_stays_cached_until_dropped(make: Make) -> None:
    loop, _ = make()
    submit(loop, "long", [1, 2, 3], max_tokens=9, session="talk")
    submit(loop, "short", [4, 5], max_tokens=2, session="talk")
    run(loop)
    assert (
        prefixes_of(loop).num_rows("talk"),
        prefixes_of(loop).num_rows("other"),
        prefixes_of(loop).num_rows(""),
    ) == (11, 0, 0)
    answer_all(loop, {"other": [4, 5]}, max_tokens=2, session="other")
    prefixes_of(loop).drop("talk")
    assert (prefixes_of(loop).num_rows("talk"), prefixes_of(loop).num_rows("other")) == (0, 3)
    prefixes_of(loop).drop()
    assert loop.stats().kv.pages_used == 0
    loop.pool.check()


def test_finish_caches_computed_rows(make: Make) -> None:
    loop, _ = make(chunk=3)
    first = submit(loop, "first", FIRST, session="talk")
    loop.step()
    loop.finish(first)
    assert prefixes_of(loop).num_rows("talk") == 3
    answer_all(loop, {"second": FIRST}, session="talk")


def test_conversations_in_a_small_pool_give_the_same_answers_as_without_sessions(
    make: Make,
) -> None:
    chance = random.Random(5)
    loop, _ = make(num_pages=20, chunk=3)
    rows: dict[str, list[int]] = {name: [1, 2] for name in "abc"}
    for round_ in range(25):
        asked = {name: rows[name] for name in chance.sample("abc", chance.randrange(1, 4))}
        for name, numbers in asked.items():
            submit(loop, f"{name}{round_}", numbers, max_tokens=4, session=name)
        outputs = run(loop)
        for name, numbers in asked.items():
            assert sums(outputs, f"{name}{round_}") == by_hand(numbers, 4)
            grown = [*rows_after(numbers, 4), chance.randrange(9)]
            rows[name] = grown if len(grown) < 30 else grown[: chance.randrange(1, 9)]
    stats = loop.stats()
    assert stats.kv.rows_reused > 100 and stats.kv.pages_used == stats.kv.pages_cached
