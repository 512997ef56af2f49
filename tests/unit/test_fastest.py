"""The fastest implementation of a computation is chosen by measurement, once per machine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleet.core.errors import EngineStopped
from fleet.engine.torch import fastest
from fleet.engine.torch.fastest import FILE_NAME, Fastest

CPU = torch.device("cpu")
LOGGER = "fleet.engine.torch.fastest"


@dataclass(slots=True)
class CandidateBench:
    """Clock that only advances while a candidate runs, and the names of all runs."""

    now_s: float = 0.0
    runs: list[str] = field(default_factory=list[str])

    def clock(self) -> float:
        return self.now_s

    def fastest(self, folder: Path | None = None, time_limit_s: float = 5.0) -> Fastest:
        return Fastest(CPU, folder, time_limit_s=time_limit_s, clock=self.clock)

    def candidate(
        self, name: str, ms: float, output: Tensor | BaseException | None = None
    ) -> Callable[[], Tensor]:
        """Return a candidate that takes `ms` and returns or raises `output`; None: the numbers 0 to
        7.
        """

        def run() -> Tensor:
            self.runs.append(name)
            self.now_s += ms / 1000
            if isinstance(output, BaseException):
                raise output
            return torch.arange(8.0) if output is None else output

        return run

    def pair(self, slow_ms: float = 5.0, fast_ms: float = 2.0) -> dict[str, Callable[[], Tensor]]:
        return {
            "library": self.candidate("library", slow_ms),
            "own": self.candidate("own", fast_ms),
        }


def test_faster_candidate_is_chosen_for_each_key() -> None:
    bench = CandidateBench()
    chooser = bench.fastest()
    assert chooser.choose("small", bench.pair(5, 2)) == "own"
    assert chooser.choose("large", bench.pair(2, 5)) == "library"
    rows = [(row.key, row.candidate, row.is_chosen) for row in chooser.table()]
    assert rows == [
        ("small", "library", False),
        ("small", "own", True),
        ("large", "library", True),
        ("large", "own", False),
    ]
    assert [row.outcome for row in chooser.table()] == pytest.approx([5, 2, 2, 5])


def test_known_key_is_not_measured_again() -> None:
    bench = CandidateBench()
    chooser = bench.fastest()
    chooser.choose("key", bench.pair())
    num_runs = len(bench.runs)
    assert chooser.choose("key", bench.pair()) == "own"
    assert len(bench.runs) == num_runs


def many_numbers(place: int | None = None, added: float = 0.0) -> Tensor:
    """Return a million ones; at `place` something is added."""
    numbers = torch.ones(1_000_000)
    if place is not None:
        numbers[place] += added
    return numbers


@pytest.mark.parametrize(("added", "is_used"), [(5e-4, True), (5e-3, False)])
def test_single_value_may_differ_by_little_more(added: float, is_used: bool) -> None:
    bench = CandidateBench()
    candidates = {
        "library": bench.candidate("library", 5, many_numbers()),
        "own": bench.candidate("own", 2, many_numbers(77, added)),
    }
    chooser = bench.fastest()
    assert (chooser.choose("key", candidates) == "own") == is_used
    assert is_used or "where values reach 1" in str(chooser.table()[-1].outcome)


def test_much_slower_candidate_runs_twice_only() -> None:
    bench = CandidateBench()
    bench.fastest().choose("key", bench.pair(2, 100))
    assert bench.runs.count("own") == 2
    assert bench.runs.count("library") > 4


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (torch.arange(8.0) + 0.01, "differs by 0.24% in norm"),
        (torch.arange(9.0), "shapes"),
        (torch.full((8,), float("nan")), "differs by nan"),
        (RuntimeError("no kernel\nmore"), "RuntimeError: no kernel"),
        (AssertionError("odd size"), "AssertionError: odd size"),
    ],
)
def test_wrong_or_failing_candidate_is_refused_with_one_line(
    output: Tensor | BaseException, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = CandidateBench()
    chooser = bench.fastest()
    with caplog.at_level(logging.WARNING, LOGGER):
        chosen = chooser.choose("key", bench.pair() | {"bad": bench.candidate("bad", 1, output)})
    assert chosen == "own"
    assert bench.runs.count("bad") == 1
    (record,) = caplog.records
    assert reason in record.message and "candidate bad is not used" in record.message
    assert "\n" not in record.message
    assert reason in str(chooser.table()[-1].outcome)


def test_rounding_is_no_difference() -> None:
    bench = CandidateBench()
    exact = torch.linspace(-1, 1, 100)
    candidates = {
        "library": bench.candidate("library", 2, exact.bfloat16()),
        "own": bench.candidate("own", 1, exact),
    }
    assert bench.fastest().choose("key", candidates) == "own"


def test_candidates_may_write_to_the_same_memory() -> None:
    bench = CandidateBench()
    memory = torch.zeros(4)
    candidates = {
        "library": lambda: memory.fill_(1.0),
        "own": lambda: memory.fill_(2.0),
    }
    assert bench.fastest().choose("key", candidates) == "library"


def test_several_outputs_are_compared() -> None:
    outputs = [torch.ones(2), torch.arange(3)]
    spoiled = [torch.ones(2), torch.arange(3) + 1]
    candidates = {"library": lambda: outputs, "bad": lambda: spoiled}
    assert CandidateBench().fastest().choose("key", candidates) == "library"


def test_error_of_the_reference_is_raised() -> None:
    bench = CandidateBench()
    candidates = {"library": bench.candidate("library", 1, RuntimeError("broken"))}
    with pytest.raises(RuntimeError, match="broken"):
        bench.fastest().choose("key", candidates)


def test_default_is_used_after_the_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    bench = CandidateBench()
    chooser = bench.fastest(time_limit_s=0.13)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert chooser.choose("first", bench.pair(50, 20)) == "own"
        num_runs = len(bench.runs)
        assert chooser.choose("second", bench.pair(50, 20), default="own") == "own"
        assert chooser.choose("third", bench.pair(50, 20)) == "library"
    assert len(bench.runs) == num_runs
    assert len(caplog.records) == 1 and "limit of 0.13 s" in caplog.records[0].message
    assert {row.key for row in chooser.table()} == {"first"}


def test_time_limit_ends_a_measurement_between_candidates() -> None:
    bench = CandidateBench()
    assert bench.fastest(time_limit_s=0.1).choose("key", bench.pair(200, 1), "own") == "own"
    assert "own" not in bench.runs


def test_results_are_read_by_the_next_start(tmp_path: Path) -> None:
    bench = CandidateBench()
    folder = tmp_path / "new"
    bench.fastest(folder).choose("key", bench.pair())
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]
    bench.runs.clear()
    later = bench.fastest(folder)
    assert later.choose("key", bench.pair()) == "own"
    assert bench.runs == []
    assert [row.candidate for row in later.table()] == ["library", "own"]


def test_results_of_other_candidates_or_versions_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = CandidateBench()
    bench.fastest(tmp_path).choose("key", bench.pair())
    bench.runs.clear()
    more = bench.pair() | {"new": bench.candidate("new", 1)}
    assert bench.fastest(tmp_path).choose("key", more) == "new"
    monkeypatch.setattr(fastest, "_environment", lambda _: "another device")
    bench.runs.clear()
    assert bench.fastest(tmp_path).choose("key", bench.pair(1, 9)) == "library"
    assert bench.runs


def test_two_processes_keep_both_results(tmp_path: Path) -> None:
    bench = CandidateBench()
    one, other = bench.fastest(tmp_path), bench.fastest(tmp_path)
    one.choose("first", bench.pair())
    other.choose("second", bench.pair())
    bench.runs.clear()
    later = bench.fastest(tmp_path)
    later.choose("first", bench.pair())
    later.choose("second", bench.pair())
    assert bench.runs == []


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"{}", b'{"format": "other"}', b"[1]"])
def test_broken_or_foreign_file_is_ignored_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    bench = CandidateBench()
    with caplog.at_level(logging.WARNING, LOGGER):
        assert bench.fastest(tmp_path).choose("key", bench.pair()) == "own"
    assert "is ignored" in caplog.records[0].message
    bench.runs.clear()
    assert bench.fastest(tmp_path).choose("key", bench.pair()) == "own"
    assert bench.runs == []


def test_file_that_cannot_be_written_costs_a_log_line_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    bench = CandidateBench()
    chooser = bench.fastest(tmp_path / "file")
    with caplog.at_level(logging.WARNING, LOGGER):
        assert chooser.choose("first", bench.pair()) == "own"
        assert chooser.choose("second", bench.pair()) == "own"
    assert [record.message.count("cannot be written") for record in caplog.records] == [1]


def test_candidate_that_breaks_the_device_is_not_tried_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = CandidateBench()
    bad = bench.candidate("bad", 1, RuntimeError("illegal memory access"))
    own = bench.candidate("own", 1)
    candidates = {"library": bench.candidate("library", 2), "bad": bad, "own": own}

    def fail(_device: torch.device) -> None:
        raise EngineStopped("device fails every computation")

    with monkeypatch.context() as patched:
        patched.setattr(fastest, "check_device", fail)
        with pytest.raises(EngineStopped):
            bench.fastest(tmp_path).choose("key", candidates)
    bench.runs.clear()
    assert bench.fastest(tmp_path).choose("key", candidates) == "own"
    assert "bad" not in bench.runs
