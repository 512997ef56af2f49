"""The share of long tests that an ordinary run draws by its seed."""

from dataclasses import dataclass
from typing import cast

import pytest

from tests.drawn import not_drawn


@dataclass(frozen=True)
class CollectedTest:
    """The part of a collected test that is read."""

    nodeid: str
    group: str

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.one_in(3, self.group).mark if name == "one_in" and self.group else None


ITEMS = [
    *(CollectedTest(f"test_long[{number}]", "long") for number in range(5)),
    CollectedTest("test_alone", "alone"),
    CollectedTest("test_short", ""),
]


def drawn(seed: int) -> set[str]:
    left_out = cast("set[CollectedTest]", not_drawn(cast("list[pytest.Item]", ITEMS), seed))
    return {item.nodeid for item in ITEMS if item not in left_out}


def test_each_run_draws_a_share_and_three_runs_draw_all() -> None:
    runs = [drawn(seed) for seed in (7, 8, 9)]
    long = [{name for name in run if name.startswith("test_long")} for run in runs]
    assert sorted(map(len, long)) == [1, 2, 2] and len(set.union(*long)) == 5
    assert all({"test_alone", "test_short"} <= run for run in runs), "a test that is selected by itself is drawn"
