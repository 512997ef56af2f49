"""Choice of a drafter by measured speed; a function gives the simulated steps' times and accepted
tokens.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from fleet.drafts.choice import FIRST_TERM, LAST_TERM, DrafterChoice
from fleet.drafts.figures.speculation import EAGLE3, OFF, SUFFIX

Speeds = dict[str, float]
"""Tokens/s with each drafter, relative to steps without drafts."""


def passes(
    choice: DrafterChoice, gains: Speeds, count: int, requests: Callable[[int], int] = lambda _: 1
) -> Counter[str]:
    """Simulate `count` steps of n requests that take 1 + n / 8, with noise of up to a tenth; return
    the number of steps per drafter.
    """
    rng, used = random.Random(1), Counter[str]()
    for number in range(count):
        used[choice.name] += 1
        num_requests = requests(number)
        seconds = (1 + num_requests / 8) * rng.uniform(0.9, 1.1)
        choice.add(num_requests, num_requests, seconds / gains.get(choice.name, 1.0))
    return used


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({SUFFIX: 1.5, EAGLE3: 2.0}, EAGLE3),
        ({SUFFIX: 1.5, EAGLE3: 0.5}, SUFFIX),
        ({SUFFIX: 0.5, EAGLE3: 0.5}, OFF),
    ],
)
def test_the_fastest_drafter_is_used_nearly_always(gains: Speeds, best: str) -> None:
    choice = DrafterChoice((SUFFIX, EAGLE3))
    assert choice.name == OFF, "passes without drafts are measured first"
    used = passes(choice, gains, 20 * LAST_TERM)
    assert choice.gains[OFF] == 1.0
    assert used[best] > 0.97 * used.total() and all(used[name] for name in (OFF, SUFFIX, EAGLE3)), (
        used
    )


def test_load_that_changes_does_not_disturb_the_comparison() -> None:
    """A changing load does not disturb the comparison: the number of requests, and with it the step
    time, differs from step to step.
    """
    rng = random.Random(2)
    choice = DrafterChoice((SUFFIX, EAGLE3))
    used = passes(choice, {SUFFIX: 1.5, EAGLE3: 1.0}, 4 * LAST_TERM, lambda _: rng.randint(1, 16))
    assert used[SUFFIX] > 0.9 * used.total(), used


def test_drafter_that_becomes_slow_is_left_immediately() -> None:
    choice = DrafterChoice((SUFFIX, EAGLE3))
    passes(choice, {SUFFIX: 1.5, EAGLE3: 2.0}, 8 * LAST_TERM)
    assert choice.name == EAGLE3
    used = passes(choice, {SUFFIX: 1.5, EAGLE3: 0.5}, FIRST_TERM)
    assert used[SUFFIX] > FIRST_TERM / 4, "long before the next regular comparison"


def test_drafter_that_becomes_fast_is_found_within_a_term() -> None:
    choice = DrafterChoice((SUFFIX,))
    passes(choice, {SUFFIX: 0.5}, 4 * LAST_TERM)
    assert choice.name == OFF
    assert passes(choice, {SUFFIX: 1.5}, 2 * LAST_TERM)[SUFFIX] > LAST_TERM / 2


def test_nothing_to_compare_is_off_for_ever() -> None:
    choice = DrafterChoice(())
    assert passes(choice, {}, 1000) == {OFF: 1000}
