"""Groups of similar long tests, of which an ordinary run draws a share: markers `one_in(n, group)`,
`one_file_in(n, group)`.
"""

from collections.abc import Sequence

import pytest


def not_drawn(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the tests with a marker that this run leaves out: by its seed it draws one test, or
    one file, in `n` of each group.

    A test or a file that is alone in its group is always drawn.
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
