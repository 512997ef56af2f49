"""Groups of similar long tests, of which an ordinary run draws a share: the marker `one_in(n, group)`."""

from collections.abc import Sequence

import pytest


def not_drawn(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the tests marked `one_in(n, group)` that this run leaves out: it draws one in `n` of each group, by its seed.

    A test that is selected by itself is always drawn.
    """
    groups: dict[tuple[int, str], list[pytest.Item]] = {}
    for item in items:
        if marker := item.get_closest_marker("one_in"):
            groups.setdefault(marker.args, []).append(item)
    left_out: set[pytest.Item] = set()
    for (n, _), group in groups.items():
        first = seed % min(n, len(group))
        left_out |= {item for number, item in enumerate(sorted(group, key=lambda item: item.nodeid)) if number % n != first}
    return left_out
