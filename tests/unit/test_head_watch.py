"""A draft head that is clearly worse than the preceding version is replaced by it, once."""

import msgspec
import pytest

from fleet.drafts.exchange.watch import FEWEST_DRAFTS, MOST_DRAFTS, HeadWatch
from fleet.drafts.figures.speculation import SpeculationFigures


def figures(version: int, num_drafts: int, share: float) -> SpeculationFigures:
    """Return statistics of `num_drafts` steps with three draft tokens each, of which `share` is
    accepted at each position.
    """
    accepted = tuple(round(num_drafts * share**position) for position in (1, 2, 3))
    return SpeculationFigures(
        drafter="eagle3",
        num_draws=2 * num_drafts,
        drafted=(num_drafts,) * 3,
        accepted=accepted,
        version=version,
        head_sha256=f"{version:x}",
    )


def replaced(before: SpeculationFigures, share: float) -> SpeculationFigures:
    """Return statistics of another head that has the number of the one before."""
    return msgspec.structs.replace(figures(before.version, 300, share), head_sha256="other")


def watch(floor: float, *seen: SpeculationFigures) -> list[tuple[int, int]]:
    watching = HeadWatch(floor)
    found = [watching.observe(each) for each in seen]
    return [(worse.version, worse.before) for worse in found if worse is not None]


GOOD = figures(1, 1000, 0.8)


@pytest.mark.parametrize(
    ("floor", "seen", "expected"),
    [
        (0.8, (GOOD, figures(2, 0, 0), figures(2, FEWEST_DRAFTS - 1, 0.1)), []),
        (0.8, (GOOD, figures(2, 0, 0), figures(2, FEWEST_DRAFTS, 0.1)), [(2, 1)]),
        (0.8, (GOOD, figures(2, 0, 0), figures(2, 300, 0.1), figures(2, 400, 0.1)), [(2, 1)]),
        (0.8, (GOOD, figures(2, 0, 0), figures(2, 300, 0.78)), []),
        (0.0, (GOOD, figures(2, 0, 0), figures(2, 300, 0.1)), []),
        (0.8, (figures(1, 50, 0.8), figures(2, 0, 0), figures(2, 300, 0.1)), []),
        (0.8, (GOOD, figures(2, 0, 0), figures(2, MOST_DRAFTS + 1, 0.1)), []),
        (0.8, (GOOD, figures(1, 1500, 0.1)), []),
        (0.8, (GOOD, replaced(GOOD, 0.1)), [(1, 1)]),
    ],
    ids=[
        "too few guesses",
        "clearly worse",
        "once",
        "about equal",
        "switched off",
        "the version before is not known",
        "traffic may have changed by now",
        "no new version",
        "another head with the same number",
    ],
)
def test_worse_version_gives_way(
    floor: float, seen: tuple[SpeculationFigures, ...], expected: list[tuple[int, int]]
) -> None:
    assert watch(floor, *seen) == expected
