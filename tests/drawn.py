"""Random selection from groups of similar long tests, by the markers `one_in(n, group)` and
`one_file_in(n, group)`: an ordinary run includes one test or file in `n`.
"""

from collections.abc import Sequence

import pytest

MARKERS = ("one_in", "one_file_in")


def is_drawn(item: pytest.Item) -> bool:
    """Return True if not every run includes the test."""
    return any(item.get_closest_marker(name) for name in MARKERS)


def not_drawn(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the marked tests that this run leaves out. In each group, `seed` selects one of every
    `n` tests (or files) to run.

    A test or a file that is alone in its group always runs.
    """
    groups: dict[tuple[int, str], dict[str, list[pytest.Item]]] = {}
    for item in items:
        for name, unit in (
            ("one_in", item.nodeid),
            ("one_file_in", item.nodeid.partition("::")[0]),
        ):
            if marker := item.get_closest_marker(name):
                groups.setdefault(marker.args, {}).setdefault(unit, []).append(item)
    left_out: set[pytest.Item] = set()
    for (n, _), units in groups.items():
        first = seed % min(n, len(units))
        for number, unit in enumerate(sorted(units)):
            left_out |= set(units[unit]) if number % n != first else set()
    return left_out
