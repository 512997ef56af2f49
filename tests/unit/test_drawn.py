"""Random selection of the share of long tests that an ordinary run includes, by its seed."""

from dataclasses import dataclass
from typing import cast

import pytest

from tests.drawn import not_drawn


@dataclass(frozen=True, eq=False)
class CollectedTest:
    """The attributes of a collected test that the selection reads."""

    nodeid: str
    marker: pytest.MarkDecorator | None = None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marker.mark if self.marker and self.marker.name == name else None


ITEMS = [
    *(
        CollectedTest(f"test_a.py::test_long[{number}]", pytest.mark.one_in(3, "long"))
        for number in range(5)
    ),
    *(
        CollectedTest(f"test_{file}.py::test_{number}", pytest.mark.one_file_in(2, "files"))
        for file in "bcd"
        for number in "12"
    ),
    CollectedTest("test_a.py::test_alone", pytest.mark.one_in(3, "alone")),
    CollectedTest("test_a.py::test_short"),
]


def drawn(seed: int) -> set[str]:
    left_out = cast("set[CollectedTest]", not_drawn(cast("list[pytest.Item]", ITEMS), seed))
    return {item.nodeid for item in ITEMS if item not in left_out}


def test_each_run_draws_a_share_and_three_runs_draw_all() -> None:
    runs = [drawn(seed) for seed in (7, 8, 9)]
    long = [{name for name in run if "::test_long" in name} for run in runs]
    assert sorted(map(len, long)) == [1, 2, 2] and len(set.union(*long)) == 5
    assert all({"test_a.py::test_alone", "test_a.py::test_short"} <= run for run in runs), (
        "one that is alone is drawn"
    )


def test_files_are_drawn_whole() -> None:
    runs = [
        [name.partition("::")[0] for name in sorted(drawn(seed)) if "test_a" not in name]
        for seed in (7, 8)
    ]
    assert runs == [["test_c.py"] * 2, ["test_b.py"] * 2 + ["test_d.py"] * 2]
